"""What tests share that follow the ways out of messages: a case is what provokes the error, and what
its message makes of it, which succeeds."""

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import infinitybatch as ib
import pytest
import torch
from misuse_support import CRITERION, X, Y
from support import call, criterion_value, mlp
from torch import nn

ROOT = Path(__file__).resolve().parents[2]

#: A part of the message as it stands in the sources ({} for what is filled in), the call that
#: provokes it, and the call that obeys it: given the message where it takes an argument.
Case = tuple[str, Callable[[], Any], Callable[..., Any]]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MESSAGES = script("error_messages").messages(ROOT)


def that_say(part: str) -> list[Any]:
    return [message for message in MESSAGES if part in message.text]


def follow(case: Case) -> None:
    """The error is the one of the case, and what its message says works."""
    part, wrong, right = case
    with pytest.raises(Exception) as raised:
        wrong()
    text = str(raised.value) + "\n".join(getattr(raised.value, "__notes__", []))
    assert any(message.says(text) for message in that_say(part)), text
    if inspect.signature(right).parameters:
        right(text)
    else:
        right()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def exact(
    model: Any = None,
    inputs: Any = X,
    targets: Any = Y,
    loss: Any = CRITERION,
    *,
    natively: Callable[[Any], torch.Tensor] | None = None,
    wrapped: bool = False,
    **options: Any,
) -> Any:
    """A step whose gradients are natively those of the whole batch; `natively` gives the loss of a
    model where inputs and targets are not what the model and the loss take themselves."""
    model = mlp() if model is None else model
    native = copy.deepcopy(model)
    whole = (natively or (lambda m: criterion_value(loss, call(m, inputs), targets)))(native)
    whole.backward()
    if not options.keys() & {"micro_batch_size", "memory_budget"}:
        options["micro_batch_size"] = 4
    if wrapped:
        criterion_value(loss, call(ib.wrap(model, **options), inputs), targets).backward()
        report = None
    else:
        report = ib.VirtualBatch(model, loss, **options).backward(inputs, targets)
    for one, wanted in zip(gradients(model), gradients(native), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)
    return report
