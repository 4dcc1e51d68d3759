"""Native's or our side of a case: its model, its data, its steps."""

import random
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import numpy as np
import torch

from .case import Case
from .device import moved_there
from .oracle import State, outputs_of, state_of
from .statement import WIDTH

CLASSES = 4


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def lying(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers, or some of them, in another order in memory."""
    if how == "transposed":
        return x.t().contiguous().t()
    if how == "holes":
        return torch.stack([x, x], 2)[:, :, 0]
    return x[:, :1].expand_as(x) if how == "expanded" else x


class Side:
    def __init__(self, case: Case) -> None:
        self.case = case
        #: Which allocation of each of the library's calls fails, if any does.
        self.fails: int | None = None
        self.space: dict[str, Any] = {"__name__": "fuzzed"}
        exec(compile(case.source(), f"case {case.seed}", "exec"), self.space)
        seeded(case.seed)
        self.model = self.space["Model"]().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=case.momentum)

    def step(self) -> None:
        """The optimizer's; it does not run away, whatever the model."""
        gradients = [p.grad.to_dense() for p in self.model.parameters() if p.grad is not None]
        norm = sum(float(g.abs().square().sum()) for g in gradients) ** 0.5
        self.optimizer.param_groups[0]["lr"] = 0.02 / max(1.0, norm)
        self.optimizer.step()

    def batch(self, step: int, rows: int, further: bool = False) -> tuple[dict[str, Any], Any]:
        """Inputs and targets of a step; with `further` another batch of it."""
        with torch.device("cpu"):
            inputs, targets = self.drawn(self.case.seed * 100 + 10 * further + step, rows)
            if step < len(self.case.layouts):
                inputs["x"] = lying(inputs["x"], self.case.layouts[step])
        inputs, targets = moved_there((inputs, targets))
        if self.case.way.input_gradient:
            inputs["x"].requires_grad_()
        return inputs, targets

    def drawn(self, seed: int, rows: int) -> tuple[dict[str, Any], Any]:
        g = torch.Generator().manual_seed(seed)
        real = {"generator": g, "dtype": torch.float64}
        inputs: dict[str, Any] = {"x": torch.randn(rows, 5, **real)}
        made: dict[str, Callable[[], Any]] = {
            "z": lambda: torch.randn(rows, 4, **real),
            "tokens": lambda: torch.randint(7, (rows, 3), generator=g),
            "seq": lambda: torch.randn(3, rows, WIDTH, **real),
            "table": lambda: torch.randn(4, WIDTH, **real),
            "scale": lambda: torch.tensor(0.7, dtype=torch.float64),
            "flag": lambda: True,
            "ids": lambda: torch.randint(3, (rows,), generator=g).double(),
            "boxes": lambda: torch.cat(
                [torch.randint(rows, (9, 1), generator=g).double(), torch.randn(9, 2, **real)], 1
            ),
            "words": lambda: torch.randint(7, (rows, self.case.words), generator=g),
            "numbers": lambda: torch.randn(rows, self.case.words, **real),
            "mask": lambda: self.space["padded"](rows, self.case.words, self.case.left, g),
        }
        inputs |= {name: make() for name, make in made.items() if name in self.case.inputs}
        kind = self.case.criterion.targets
        if kind == "objects":
            count = int(torch.randint(1, 3 * rows, (), generator=g))
            image = torch.randint(rows, (count, 1), generator=g)
            return inputs, torch.cat([image, torch.randn(count, CLASSES, **real)], 1)
        if kind == "numbers":
            return inputs, torch.randn(rows, CLASSES, **real)
        if kind == "words":
            labels = torch.randint(CLASSES, (rows, self.case.words), generator=g)
            return inputs, labels.masked_fill(inputs["mask"] == 0, -100)
        labels = torch.randint(CLASSES, (rows,), generator=g)
        if kind == "classes":
            labels[1::3] = -100
        return inputs, labels

    def turn(self, step: int) -> None:
        """Changes settings in front of a step."""
        if self.case.turns:
            self.space["turn"](self.model, step)

    def look(self, call: Callable[..., Any], inputs: dict[str, Any]) -> State:
        """Outputs in eval mode."""
        self.model.eval()
        with torch.no_grad():
            outputs = outputs_of(call(**inputs))
        self.model.train()
        return {f"eval {name}": value for name, value in outputs.items()}

    def left(self, inputs: dict[str, Any], seen: State) -> State:
        x = inputs["x"].grad
        gradient = {"gradient of x": None if x is None else x.clone()}
        return state_of(self) | seen | (gradient if self.case.way.input_gradient else {})


def nested(model: Any, kind: str) -> Any:
    """What the library is given in place of `model`, which stays the one that is trained."""
    if kind == "itself":
        return ib.wrap(model, micro_batch_size=2)
    names = {"the outlet": ["out"], "each child": [name for name, _ in model.named_children()]}
    for name in names.get(kind, []):
        setattr(model, name, ib.wrap(getattr(model, name), micro_batch_size=2))
    return model


def marked(inputs: dict[str, Any]) -> dict[str, Any]:
    """As the library has to be told: where the batch lies, and what is no batch."""
    return {
        name: ib.batch_dim(value, 1)
        if name == "seq"
        else ib.shared(value)
        if name in ("table", "scale", "boxes")
        else value
        for name, value in inputs.items()
    }


Guard = Callable[[str, Callable[[], Any]], Any]


def drive(side: Side, call: Callable[..., Any], step: int, rows: int, guard: Guard) -> State:
    """One training step through `call`, the model or a wrapped one; gradients are left in .grad."""
    loop = side.case.way.loop
    loss = side.space["loss"]
    inputs, y = side.batch(step, rows)
    other, y_other = side.batch(step, rows, further=True)
    outputs = guard("forward", lambda: call(**inputs))
    seen = outputs_of(outputs)
    value = loss(outputs, y)
    if loop == "two calls":
        more = guard("forward", lambda: call(**other))
        seen |= {f"further {name}": leaf for name, leaf in outputs_of(more).items()}
        value = value + loss(more, y_other)
    if loop == "no_grad between":
        with torch.no_grad():
            more = guard("forward", lambda: call(**other))
        seen |= {f"further {name}": leaf for name, leaf in outputs_of(more).items()}
    seen["loss"] = value.detach().clone()
    if loop == "autograd.grad":
        wanted = [p for p in side.model.parameters() if p.requires_grad]
        found = guard("backward", lambda: torch.autograd.grad(value, wanted, allow_unused=True))
        for parameter, gradient in zip(wanted, found, strict=True):
            parameter.grad = gradient
    else:
        guard("backward", lambda: value.backward(retain_graph=loop == "retain_graph"))
        if loop == "retain_graph":
            guard("backward", value.backward)
    return side.left(inputs, seen)
