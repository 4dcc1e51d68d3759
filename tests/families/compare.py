"""Gradients of a model by streaming and by `wrap`, beside those of the native whole batch."""

import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

import infinitybatch as ib  # noqa: E402
import torch  # noqa: E402
from measure import allowed, errors, gradients  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree  # noqa: E402

N, SIZES, DRAWS = 5, (1, 2, 5), 8
#: Of what native adds to what is there; a plan for less than the whole batch where one can be.
BUDGET_SHARE = 0.7


def outputs_of(outputs: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the outputs that has a history, by its place in them."""
    tree = dict(outputs) if isinstance(outputs, Mapping) else outputs
    leaves, _ = _pytree.tree_flatten_with_path(tree)
    return {
        _pytree.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    }


def by_sample(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) == N


class Every(nn.Module):
    """Of each sample one row of every output that has a row for each sample."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def joined(self, outputs: Any) -> torch.Tensor:
        found = outputs_of(outputs)
        rows = [found[name].flatten(1) if found[name].dim() > 1 else found[name][:, None]
                for name in self.names]  # fmt: skip
        return torch.cat([row.double() for row in rows], 1)

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.joined(self.model(**inputs))


def coupled(outputs: torch.Tensor) -> torch.Tensor:
    """Compares every sample with every other."""
    rows = nn.functional.normalize(outputs, dim=1)
    return nn.functional.cross_entropy(rows @ rows.T / 0.3, torch.arange(len(rows)).roll(1))


class State:
    """Parameters and buffers of a model as they are now, to be put back (some classes change what
    `load_state_dict` does)."""

    def __init__(self, model: nn.Module) -> None:
        self.owners = [
            (table, name, tensor, tensor.detach().clone())
            for module in model.modules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for table, name, tensor, value in self.owners:
                tensor.data = value.clone()
                table[name] = tensor


Found = dict[str, torch.Tensor | None]


def taken(model: nn.Module) -> Found:
    """Gradients, which are taken away, and buffers."""
    found: Found = {f"gradient of {name}": grad for name, grad in gradients(model).items()}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return found


class Native:
    """The whole batch at once, and what it moves when its order or its loss's scale changes."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor], inputs: Any) -> None:
        self.model, self.loss, self.inputs = model, loss, inputs
        self.start = State(model)
        self.wanted = self.run()
        self.allowed = allowed(self.wanted, [self.run(torch.arange(N - 1, -1, -1))])

    def run(self, order: torch.Tensor | None = None, scale: float = 1.0) -> Found:
        self.start.restore()
        inputs, back = self.inputs, slice(None)
        if order is not None:
            back = order.argsort()
            inputs = {k: v[order] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        (self.loss(self.model(**inputs)[back]) * scale).backward()
        found = taken(self.model)
        return {
            name: value / scale if name.startswith("gradient") and value is not None else value
            for name, value in found.items()
        }

    def not_finite(self) -> str | None:
        """The first gradient of native's own that says nothing: NaN would be equal to NaN."""
        for name, value in self.wanted.items():
            if name.startswith("gradient") and value is not None and not value.isfinite().all():
                return name
        return None

    def outcome(self, found: Found) -> str:
        """README's definition first: ten times what native moves when the batch is reversed. What
        only other orders and scales of the loss excuse (models that round to float32 inside) is
        said to be so."""
        off = errors(found, self.wanted)
        beyond = {
            name: error for name, error in off.items() if not error <= self.allowed.get(name, 0)
        }
        if not beyond:
            return "exact"
        draw = torch.Generator().manual_seed(0)
        ways = (
            self.run(torch.randperm(N, generator=draw), 1 + float(torch.rand((), generator=draw)))
            for _ in range(DRAWS)
        )
        more = allowed(self.wanted, ways)
        room = {name: max(self.allowed.get(name, 0), more.get(name, 0)) for name in beyond}
        still = {name: error for name, error in beyond.items() if not error <= room[name]}
        name, error = max((still or beyond).items(), key=lambda item: item[1])
        verdict = "WRONG" if still else "as native rounds in other orders"
        return f"{verdict}: {name} is {error:.2g} off, {self.allowed.get(name, 0):.2g} allowed"


def tight_budget(native: Native) -> int:
    """Less than the whole batch takes."""
    with ib.memory.peak() as scope:
        before = ib.memory.stats().live
        native.run()
    return before + int(BUDGET_SHARE * (scope.peak - before))


def beside_native(given: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    """streaming and wrap, in micro-batches of several sizes and under a budget.

    Args:
        given: in training mode, nothing random in it, in float64.
        inputs: N samples, its arguments by name.
    """
    start = State(given)
    try:
        outputs = given(**inputs)
    except Exception as error:  # whatever the model's own code raises
        reason = f"native fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        return {"streaming": reason, "wrap": reason}
    start.restore()  # layers that initialise themselves do so anew
    every = outputs_of(outputs)
    names = [name for name, tensor in every.items() if by_sample(tensor)]
    skipped = {name: list(every[name].shape) for name in every if name not in names}
    model = Every(given, names)
    torch.manual_seed(2)
    targets = torch.randn_like(model.joined(outputs))
    del every, outputs
    criterion = nn.MSELoss()

    def stream(options: dict[str, Any]) -> None:
        ib.VirtualBatch(model, criterion, **options).backward(inputs, targets)

    def wrap(options: dict[str, Any]) -> None:
        coupled(model.joined(ib.wrap(model.model, **options)(**inputs))).backward()

    found = {"outputs": ", ".join(names)}
    if skipped:
        found["outputs left out"] = f"no row for each sample: {skipped}"
    for name, run, loss in (
        ("streaming", stream, lambda outputs: criterion(outputs, targets)),
        ("wrap", wrap, coupled),
    ):
        native = Native(model, loss, inputs)
        if spoilt := native.not_finite():
            found[name] = f"native gives no number in the {spoilt}"
            continue
        budget = {"memory_budget": tight_budget(native)}
        verdicts = {}
        for options in [{"micro_batch_size": size} for size in SIZES] + [budget]:
            native.start.restore()
            key = (
                "budget" if options is budget else f"micro-batches of {options['micro_batch_size']}"
            )
            try:
                run(options)
                verdicts[key] = native.outcome(taken(model))
            except ib.BudgetExceeded as error:
                verdicts[key] = f"refused: {type(error).__name__}"
                taken(model)
            except ib.Error as error:
                verdicts[key] = f"refused: {type(error).__name__}: {str(error).split(';')[0]}"
                taken(model)
        found |= summary(name, verdicts)
    return found


def summary(name: str, verdicts: dict[str, str]) -> dict[str, str]:
    """One verdict where all ways agree; else the worst, and each way's."""
    if len(set(verdicts.values())) == 1:
        return {name: next(iter(verdicts.values()))}
    rest = {way: verdict for way, verdict in verdicts.items() if verdict != "exact"}
    if list(rest.values()) == ["refused: BudgetExceeded"]:
        # Gradients and parameters alone are more than so little.
        return {name: "exact", f"{name}, budget": "too small for any plan"}
    order = ("WRONG", "as native rounds", "refused")
    worst = min(rest.values(), key=lambda v: next((i for i, o in enumerate(order) if o in v), 9))
    return {name: worst, f"{name} by way": str(verdicts)}
