"""infinitybatch."""

from typing import Any

import infinitybatch as ib
from torch import nn

from .cases import IGNORED, SIZE, Case, contrastive
from .row import OneStep, Row, Step


def virtual_batch(**options: Any) -> Step:
    def step(case: Case, model: nn.Module) -> None:
        loss: Any = nn.CrossEntropyLoss(ignore_index=IGNORED)
        if case.loss is contrastive:
            loss = ib.losses.coupled(contrastive)
        optimizer = OneStep(model)
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE, **options)
        batch.backward(case.inputs, case.targets)
        optimizer.step()

    return step


def wrapped(**options: Any) -> Step:
    def step(case: Case, model: nn.Module) -> None:
        optimizer = OneStep(model)
        wrapper = ib.wrap(model, micro_batch_size=SIZE, **options)
        case.loss(wrapper(case.inputs), case.targets).backward()
        optimizer.step()

    return step


def row(setting: str, step: Step) -> Row:
    # A seed that forward sets would be set for each micro-batch.
    return Row("infinitybatch", setting, "exactness.md", step, seeds=False)


ROWS = [
    row("`VirtualBatch`", virtual_batch()),
    row("`VirtualBatch`, `match_native_rng=True`", virtual_batch(match_native_rng=True)),
    row("`wrap`", wrapped()),
    row("`wrap`, `match_native_rng=True`", wrapped(match_native_rng=True)),
]
