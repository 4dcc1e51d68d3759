"""A wrapped model in the loop that accelerate's documentation has, beside the same loop without.

GradScaler is not in it: Accelerator(mixed_precision="fp16") is for accelerators only.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
from adapter_support import (
    MICRO_BATCH,
    PER_EPOCH,
    STEPS,
    encoder,
    loader,
    loss_of,
    moved_away,
    same_weights,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

accelerate = pytest.importorskip("accelerate", reason="of requirements-loops.txt")
#: Where the training ends and goes on in another Accelerator: in the middle of an epoch.
MIDDLE = 110


@pytest.fixture(autouse=True)
def no_state_of_other_tests() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


class Run:
    def __init__(self, options: dict[str, Any], workers: int) -> None:
        torch.manual_seed(0)
        self.inner = encoder()
        self.average = AveragedModel(self.inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.model = ib.wrap(self.inner, **options) if options else self.inner
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.machine = accelerate.Accelerator(cpu=True)
        self.prepared = self.machine.prepare(self.model, optimizer, loader(workers), schedule)
        self.machine.register_for_checkpointing(self.average)

    def steps(self, begin: int, end: int) -> None:
        model, optimizer, rows, schedule = self.prepared
        step = begin
        while step < end:
            for x, weight in self.machine.skip_first_batches(rows, step % PER_EPOCH):
                optimizer.zero_grad()
                self.machine.backward(loss_of(model(x), weight))
                self.machine.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                self.average.update_parameters(self.inner)
                step += 1
                if step == end:
                    break


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    first = Run(options, workers=2)
    first.steps(0, MIDDLE)
    first.machine.save_state(str(folder))
    second = Run(options, workers=2)
    second.machine.load_state(str(folder))
    second.steps(MIDDLE, STEPS)
    back = second.machine.unwrap_model(second.prepared[0])
    assert back is second.model
    return {"weights": second.inner.state_dict(), "average": second.average.state_dict()}


def test_200_steps(tmp_path: Path) -> None:
    wanted, found = trained(tmp_path / "a"), trained(tmp_path / "b", micro_batch_size=MICRO_BATCH)
    same_weights(found["weights"], wanted["weights"])
    same_weights(found["average"], wanted["average"])
    torch.manual_seed(0)
    moved_away(wanted["weights"], encoder().state_dict())


def accumulating(steps: int, batch: Any) -> list[warnings.WarningMessage]:
    machine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = machine.prepare(ib.wrap(encoder(), micro_batch_size=MICRO_BATCH))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ib.AccumulationNotice)
        with torch.no_grad():
            model(batch)
        for _ in range(3):
            with machine.accumulate(model):
                machine.backward(loss_of(model(batch), batch[:, 0]))
    return [w for w in told if w.category is ib.AccumulationNotice]


def test_accumulate_is_told_of_once_and_where_it_is_called() -> None:
    batch = torch.randn(12, 6).double()
    (told,) = accumulating(4, batch)
    assert str(told.message).startswith("IB109: Accelerator(gradient_accumulation_steps=4) divides")
    assert "leave gradient_accumulation_steps at 1" in str(told.message)
    assert told.filename == __file__
    accelerate.state.GradientState._reset_state()
    assert accumulating(1, batch) == []


def test_a_warning_made_an_error_comes_before_anything_ran() -> None:
    accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inner = encoder()
    before = {name: value.clone() for name, value in inner.state_dict().items()}
    model = ib.wrap(inner, micro_batch_size=MICRO_BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ib.AccumulationNotice)
        with pytest.raises(ib.AccumulationNotice, match="IB109"):
            model(torch.randn(12, 6).double())
    same_weights(inner.state_dict(), before, 0)
    assert model.last_report is None


def test_accumulation_is_not_the_whole_batch() -> None:
    """What the warning is about: two batches through `accumulate`, beside their whole."""
    x = torch.randn(24, 6).double()
    weight = torch.ones(24).double()
    results = []
    for parts in (2, 1):
        torch.manual_seed(0)
        inner = encoder()
        machine = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
        model = machine.prepare(ib.wrap(inner, micro_batch_size=MICRO_BATCH))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ib.AccumulationNotice)
            for part in x.chunk(parts):
                with machine.accumulate(model):
                    machine.backward(loss_of(model(part), weight))
        results.append(inner[3].weight.grad.clone())
        accelerate.state.GradientState._reset_state()
    assert float((results[0] - results[1]).norm() / results[1].norm()) > 0.05
