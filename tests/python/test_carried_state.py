"""Tensors that modules carry from call to call in plain attributes: noticed, named, put back."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from module_state_support import CRITERION, from_first_batch, layers
from support import Calls, classification, mlp, native, ours, worst_error
from torch import nn


def hidden_state(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.hidden = torch.tanh(self.layer(x) + (0 if self.hidden is None else self.hidden.detach()))
    return self.head(self.hidden)


def hidden_pair(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = 0.0 if self.hidden is None else self.hidden[1]["h"]
    y = torch.tanh(self.layer(x) + h)
    self.hidden = (1, {"h": y.detach().mean(0)})
    return self.head(y)


def moving_average(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.hidden is None:
        self.hidden = torch.zeros(8, dtype=torch.float64)
    y = self.layer(x)
    self.hidden.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return self.head(torch.tanh(y - self.hidden))


def growing_cache(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x)
    self.hidden = y.detach() if self.hidden is None else torch.cat([self.hidden, y.detach()])
    return self.head(torch.tanh(y + self.hidden.mean(0)))


CARRIED = {f.__name__: f for f in (hidden_state, hidden_pair, moving_average, growing_cache)}


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("way", ["streamed", "coupled", "wrapped", "without a graph"])
def test_state_in_plain_attributes_is_noticed_and_put_back(name, way):
    model = layers(CARRIED[name])
    model.hidden = None
    inputs, targets = classification(12)
    with pytest.raises((ib.CouplingError, ib.Unsupported)) as raised:
        if way == "streamed":
            ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(inputs, targets)
        elif way == "coupled":
            loss = ib.losses.coupled(CRITERION)
            ib.VirtualBatch(model, loss, micro_batch_size=4, retained_micro_batches=3).backward(
                inputs, targets
            )
        elif way == "wrapped":
            ib.wrap(model, micro_batch_size=4)(inputs)
        else:
            with torch.no_grad():
                ib.wrap(model, micro_batch_size=4)(inputs)
    if isinstance(raised.value, ib.CouplingError):
        assert raised.value.op.startswith("hidden")
        assert "per_micro_batch" in str(raised.value)
    assert model.hidden is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", CARRIED)
def test_state_of_an_earlier_step_is_noticed(name):
    """A first call fills the attribute; the step's first micro-batch already reads it."""
    model = layers(CARRIED[name])
    model.hidden = None
    inputs, targets = classification(12)
    model(inputs[:4])
    kept = copy.deepcopy(model.hidden) if name != "hidden_state" else model.hidden.detach().clone()
    with pytest.raises((ib.CouplingError, ib.Unsupported)):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(inputs, targets)
    now = model.hidden
    if isinstance(kept, tuple):
        kept, now = kept[1]["h"], now[1]["h"]
    assert torch.equal(now.detach(), kept)


@pytest.mark.parametrize("name", CARRIED)
def test_carried_state_is_exact_in_one_micro_batch(name):
    model = layers(CARRIED[name])
    model.hidden = None
    inputs, targets = classification(12)
    wanted = native(model, CRITERION, inputs, targets)
    found = ours(model, CRITERION, inputs, targets, memory_budget="256MiB")
    assert worst_error(found, wanted) <= 1e-12
    ours(model, CRITERION, inputs, targets, micro_batch_size=4, batch_coupling="per_micro_batch")


def test_a_state_of_other_rows_is_named_where_forward_fails_on_it():
    model = layers(hidden_state)
    model.hidden = None
    inputs, targets = classification(5)
    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=2)

    def of_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.zeros(len(x) + self.calls, 8, dtype=x.dtype) + (
            0 if self.hidden is None else self.hidden.detach()
        )
        self.calls += 1
        return self.head(self.layer(x) + self.hidden[: len(x)])

    model.function, model.calls = of_rows, 0
    whole = copy.deepcopy(model)
    CRITERION(whole(inputs), targets).backward()
    batch.backward(inputs, targets)  # each micro-batch finds no state yet, as the whole batch does
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    with pytest.raises(ib.CouplingError, match="'hidden'"):
        batch.backward(inputs, targets)
    assert model.calls == 1


def test_errors_of_forward_itself_come_back_as_they_are():
    def broken(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.layer(x)
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("no fault of the state's")
        return self.head(self.hidden)

    model = layers(broken)
    model.hidden, model.calls = None, 0
    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=2)
    batch.backward(*classification(6))
    with pytest.raises(RuntimeError, match="no fault of the state's"):
        batch.backward(*classification(6))


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("coupled", [False, True])
def test_attempts_and_rehearsals_leave_no_state(name, coupled):
    """Before the whole batch is run, smaller sizes were."""
    model = layers(CARRIED[name])
    model.hidden = None
    inputs, targets = classification(12)
    loss = ib.losses.coupled(CRITERION) if coupled else CRITERION
    whole = copy.deepcopy(model)
    batch = ib.VirtualBatch(model, loss, memory_budget="256MiB")
    for _ in range(2):
        model.zero_grad()
        whole.zero_grad()
        CRITERION(whole(inputs), targets).backward()
        if name == "hidden_state":
            whole.hidden = whole.hidden.detach()
        try:
            batch.backward(inputs, targets)
        except ib.Unsupported:
            # A tape is replayed, and does not know the state that it was recorded with.
            assert coupled and all(each.grad is None for each in model.parameters())
            return
        for wanted, found in zip(whole.parameters(), model.parameters(), strict=True):
            if wanted.grad is not None:
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-11, atol=1e-15)


def test_a_flag_beside_a_parameter_is_put_back_with_it():
    """Some ActNorms remember in a plain bool that they are initialised."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.done:
            self.shift.data.copy_(-x.detach().mean(0))
            self.done = True
        return self.head(x + self.shift)

    model = from_first_batch(forward)
    model.done = False
    inputs, targets = classification(12)
    with pytest.raises(ib.CouplingError, match="'shift'"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(inputs, targets)
    assert model.done is False
    wanted = native(model, CRITERION, inputs, targets)
    found = ours(model, CRITERION, inputs, targets, memory_budget="256MiB")
    assert found.model.done is True
    assert worst_error(found, wanted) <= 1e-12


def attention_map(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x)
    self.hidden = y.softmax(-1)
    self.maps = [self.hidden, {"last": y.detach()}]
    return self.head(y * self.hidden)


def table(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Made once, or anew for another number of rows."""
    if self.hidden is None or len(self.hidden) != len(x):
        self.hidden = torch.linspace(0, 1, 8, dtype=x.dtype).expand(len(x), 8)
    return self.head(self.layer(x) + self.hidden)


def cleared(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.hidden = x.new_zeros(len(x), 8) if self.hidden is None else torch.zeros_like(self.hidden)
    if len(self.hidden) != len(x):
        self.hidden = x.new_zeros(len(x), 8)
    for _ in range(3):
        self.hidden = torch.tanh(self.layer(x) + self.hidden)
    return self.head(self.hidden)


def overwritten(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.hidden is None:
        self.hidden = torch.zeros(8, dtype=x.dtype)
    self.hidden.zero_()
    self.hidden += 1
    return self.head(self.layer(x) + self.hidden)


def converted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Anchors of detectors: constants that are brought to the type of what comes."""
    self.anchors = [each.to(x.dtype) for each in self.anchors]
    return self.head(self.layer(x) * self.anchors[0] + self.anchors[1])


HARMLESS = {f.__name__: f for f in (attention_map, table, cleared, overwritten, converted)}


@pytest.mark.parametrize("name", HARMLESS)
def test_attributes_that_nothing_carries_are_left_alone(name):
    model = layers(HARMLESS[name])
    model.hidden, model.anchors = None, [torch.ones(8), torch.arange(8)]
    inputs, targets = classification()
    whole = copy.deepcopy(model)
    for _ in range(2):
        whole.zero_grad()
        CRITERION(whole(inputs), targets).backward()
        batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=3)
        model.zero_grad()
        batch.backward(inputs, targets)
        for wanted, found in zip(whole.parameters(), model.parameters(), strict=True):
            if wanted.grad is not None:
                torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("wrapped", [False, True])
def test_outputs_padded_to_their_own_longest_sample_are_named(wrapped):
    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, : int(lengths.max())])

    model = Calls(forward, layer=nn.Linear(6, 3)).double()
    inputs = (torch.randn(4, 5, 6, dtype=torch.float64), torch.tensor([5, 4, 2, 1]))
    with pytest.raises(ib.BatchError, match=r"outputs has shape \[2, 5, 3\].*\[2, 2, 3\]"):
        if wrapped:
            ib.wrap(model, micro_batch_size=2)(*inputs)
        else:
            loss = ib.losses.coupled(lambda outputs: outputs.square().mean())
            ib.VirtualBatch(model, loss, micro_batch_size=2).backward(inputs)


def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.given = x
    self.first = x[..., 0]
    return self.net(self.given)


def remembers_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.given = x
    return self.net(self.given.transpose(0, 1))


def reads_what_it_remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    before, self.given = self.given, x
    return self.net(x) + 0.1 * before.mean()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_module_may_remember_its_input(wrapped):
    """Micro-batches lie in one storage, side by side, or interleaved where the batch is not first."""
    inputs, targets = classification()
    for forward, given in (
        (remembers, inputs),
        (remembers_columns, ib.batch_dim(inputs.t().contiguous(), 1)),
    ):
        model = Calls(forward, net=mlp())
        expected = copy.deepcopy(model)
        CRITERION(expected(given if forward is remembers else inputs.t()), targets).backward()
        for _ in range(2):  # what the step before has left is no state either
            model.zero_grad()
            if wrapped:
                CRITERION(ib.wrap(model, micro_batch_size=3)(given), targets).backward()
            else:
                ib.VirtualBatch(model, CRITERION, micro_batch_size=3).backward(given, targets)
        for ours_, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(ours_.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_a_remembered_input_that_is_read_is_state():
    inputs, targets = classification()
    model = Calls(reads_what_it_remembers, net=mlp())
    model.given = torch.zeros(3, 6, dtype=torch.float64)
    with pytest.raises(ib.CouplingError, match="reads 'given'"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=3).backward(inputs, targets)
