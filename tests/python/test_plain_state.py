"""What forwards leave in Python: hooks and flags that are installed once, counters, lists. Runs that
do not count (measurements, checks, attempts that failed) leave nothing of it."""

import copy
from types import SimpleNamespace
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, Tally, classification
from torch import nn
from wrap_support import close, grads

N, SIZE = 13, 4


class InstallsOnce(nn.Module):
    """As Hugging Face's models collect hidden states: hooks behind a flag, at the first call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        drop = nn.Dropout(0.5 if kind == "drop" else 0.0)
        self.layers = nn.ModuleList([nn.Linear(6, 8), norm, drop, nn.Linear(8, 5)])
        self.installed = False
        self.found: list[torch.Tensor] = []
        self.double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(lambda _m, _a, out: self.found.append(out))
            self.add_module("extra", nn.Identity())
            self.installed = True
        self.found.clear()
        for layer in self.layers:
            x = layer(x)
        return tuple(self.found)


def of_all(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    rest = sum((each.square().mean() for each in outputs[:-1]), start=torch.zeros(()).double())
    return F.cross_entropy(outputs[-1], targets) + len(outputs) * rest


INSTALLS = {
    "budget": ("", {"memory_budget": "64MiB"}),
    "auto": ("", {"memory_budget": "auto"}),
    "norm": ("norm", {"micro_batch_size": SIZE}),
    "norm, budget": ("norm", {"memory_budget": "64MiB"}),
    "norm, static": ("norm", {"micro_batch_size": SIZE, "static_graph": True}),
    "drawn": ("drop", {"micro_batch_size": SIZE, "match_native_rng": True}),
}


@pytest.mark.parametrize("way", INSTALLS)
@pytest.mark.parametrize("by", ["coupled", "wrap"])
def test_what_is_installed_once_is_installed_once(way: str, by: str) -> None:
    kind, options = INSTALLS[way]
    theirs = InstallsOnce(kind)
    model = copy.deepcopy(theirs)
    batch = ib.VirtualBatch(model, ib.losses.coupled(of_all), **options)
    wrapped = ib.wrap(model, **options)
    x, y = classification(N)
    for step in range(3):
        theirs.zero_grad()
        model.zero_grad()
        torch.manual_seed(step)
        of_all(theirs(x), y).backward()
        torch.manual_seed(step)
        if by == "wrap":
            of_all(wrapped(x), y).backward()
        else:
            batch.backward(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert [len(layer._forward_hooks) for layer in model.layers] == [1, 1, 1, 1]
    assert model.installed and "extra" in model._modules


@pytest.mark.parametrize("options", [{"memory_budget": "64MiB"}, {"micro_batch_size": 2}])
@pytest.mark.parametrize("output", ["output_hidden_states", "output_attentions"])
def test_outputs_that_hugging_face_collects(options: dict[str, Any], output: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8, attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = transformers.BertModel(config).double()
    model = copy.deepcopy(theirs)
    ids = torch.randint(20, (6, 5))
    name = output.removeprefix("output_")

    def loss(outputs: Any, *_: Any) -> torch.Tensor:
        return sum(each.square().mean() for each in outputs[name])

    loss(theirs(input_ids=ids, **{output: True})).backward()
    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), **options)
    for _ in range(2):
        model.zero_grad()
        batch.backward({"input_ids": ids, output: True})
        close(grads(model), grads(theirs), 1e-11)
    wrapped = ib.wrap(model, **options)
    for _ in range(2):
        model.zero_grad()
        outputs = wrapped(input_ids=ids, **{output: True})
        assert len(outputs[name]) == (3 if name == "hidden_states" else 2)
        loss(outputs).backward()
        close(grads(model), grads(theirs), 1e-11)


def counting(kind: str) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    drop = nn.Dropout(0.5 if kind == "drop" else 0.0)
    norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), norm, drop, nn.Linear(8, 5))
    return Calls(forward, layers=layers).double()


@pytest.mark.parametrize("way", INSTALLS)
@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_what_hooks_note_in_runs_that_do_not_count_is_undone(way: str, by: str) -> None:
    kind, options = INSTALLS[way]
    model = counting(kind)
    noted: list[int] = []
    model.log, model.sizes = SimpleNamespace(sizes=[]), []

    def hook(_m: Any, args: Any, _o: Any) -> None:
        for where in (noted, model.sizes, model.log.sizes):
            where.append(len(args[0]))

    model.layers[0].register_forward_hook(hook)
    x, y = classification(N)
    if by == "wrap":
        wrapped = ib.wrap(model, **options)
        F.cross_entropy(wrapped(x), y).backward()
        sizes = wrapped.last_report.micro_batch_sizes
    else:
        loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
        sizes = ib.VirtualBatch(model, loss, **options).backward(x, y).micro_batch_sizes
    assert noted == model.sizes == model.log.sizes
    # One forward of the whole batch notes one size.
    if "static" not in way:  # which runs forward for some micro-batches only
        assert noted == [N] and sum(sizes) == N


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_how_often_hooks_see_a_forward(by: str, norm: bool) -> None:
    """By what no snapshot undoes: docs/limits.md says it."""
    model = counting("norm" if norm else "")
    tally, callbacks = Tally(), Tally()
    model.layers[0].register_forward_hook(tally)
    x, y = classification(12)
    options: dict[str, Any] = {"micro_batch_size": 3}
    if by == "wrap":
        wrapped = ib.wrap(model, **options)
    else:
        loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
        batch = ib.VirtualBatch(model, loss, on_micro_batch=callbacks, **options)
    counts = []
    for _ in range(4):
        tally.count = 0
        if by == "wrap":
            F.cross_entropy(wrapped(x), y).backward()
        else:
            batch.backward(x, y)
        counts.append(tally.count)
    assert counts == [11 if norm else 8, 8, 4, 8]
    assert by == "wrap" or callbacks.count == 4 * 4


def test_verify_leaves_attributes_as_they_were() -> None:
    model = InstallsOnce("")
    x, y = classification(N)

    def loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs[-1], targets)

    assert ib.verify(model, ib.losses.coupled(loss), x, y, micro_batch_size=SIZE).exact
    assert not model.installed and "extra" not in model._modules
    assert all(not layer._forward_hooks for layer in model.layers)


@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_looks_leave_generators_of_ones_own(by: str) -> None:
    """What forward changes in Python is looked at by runs more, which draw as well."""
    generator = torch.Generator()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.log.append(len(x))
        return self.layer(x) * torch.rand(len(x), 5, generator=generator, dtype=x.dtype)

    model = Calls(forward, layer=nn.Linear(6, 5)).double()
    model.log = []
    x, y = classification(N)
    generator.manual_seed(3)
    F.cross_entropy(model(x), y).backward()
    wanted, stands = grads(model), generator.get_state()
    model.zero_grad()
    generator.manual_seed(3)
    if by == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=SIZE, match_native_rng=True)
        F.cross_entropy(wrapped(x), y).backward()
    else:
        loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE, match_native_rng=True)
        batch.backward(x, y)
    close(grads(model), wanted, 1e-12)
    assert torch.equal(generator.get_state(), stands)
