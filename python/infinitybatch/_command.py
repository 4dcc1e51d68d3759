"""`python -m infinitybatch train --model package.module:factory`: the Trainer as a program."""

import argparse
import contextlib
import json
import math
import os
import random
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ._agreement import refuse_other_ranks
from ._command_flags import DEFAULTS, FIXED, PROGRAM, UsageError, parser
from ._command_metrics import metrics_of
from ._command_parts import Data, data_of, loss_of, model_of, named, optimizer_of, schedule_of
from .callbacks import EMA, BatchEnd, Callback, Checkpoint, EpochEnd
from .errors import BatchError, Error, InvalidArgument, OffloadError, Unsupported
from .progress import Progress
from .trainer import Trainer

#: Options of the library as this program's flags.
_AS_FLAGS = {
    "memory_budget": "--memory-budget",
    "micro_batch_size": "--micro-batch-size",
}


class _Terminated(BaseException):
    """SIGTERM."""


class Flags(Callback):
    """Keeps the flags in checkpoints."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self._flags = flags

    def state_dict(self) -> dict[str, Any]:
        return {"flags": json.dumps(self._flags)}


class _Report(Callback):
    """Measures at the end of each epoch, and tells; ends a training that diverges."""

    def __init__(self, data: Data, metrics: Any, ema: EMA | None, as_json: bool) -> None:
        self._data, self._metrics, self._ema, self._as_json = data, metrics, ema, as_json
        self._first: float | None = None
        self._peak = self._size = 0
        self.last: dict[str, Any] = {}

    def tell(self, event: str, fields: dict[str, Any]) -> None:
        if self._as_json:
            print(json.dumps({"event": event, **_finite(fields)}), flush=True)

    def on_batch_end(self, event: BatchEnd) -> None:
        self._first = event.loss if self._first is None else self._first
        if not math.isfinite(event.loss):
            raise Error(
                f"training diverged: the loss is {event.loss} in step {event.batch + 1} of epoch "
                f"{event.epoch + 1}, it was {self._first:g} in the first step; use a smaller --lr"
            )
        self._peak = max(self._peak, event.report.peak_bytes)
        self._size = max(self._size, *event.report.micro_batch_sizes)

    def on_epoch_end(self, event: EpochEnd) -> None:
        fields = {
            "epoch": event.epoch + 1,
            "loss": event.loss,
            "seconds": event.seconds,
            "samples_per_second": event.samples / event.seconds if event.seconds else None,
            "micro_batch_size": self._size,
            "steps": event.batches,
            "peak_bytes": self._peak,
        }
        self._peak = self._size = 0
        if self._data.held_out is not None:
            averaged = self._ema.applied() if self._ema else contextlib.nullcontext()
            with averaged:
                found = event.trainer.evaluate(self._data.held_out, self._metrics)
            fields["held_out_loss"] = found.loss
            if "accuracy" in found.metrics:
                fields["held_out_accuracy"] = found.metrics["accuracy"]
            fields["held_out_metrics"] = found.metrics
        self.last = fields
        self.tell("epoch", fields)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def run(arguments: list[str]) -> int:
    """Trains as the flags say, and returns the exit code; what is wrong is one line on stderr.
    Exceptions of the user's own code go on, with their traceback."""
    try:
        try:
            refuse_other_ranks("train")
        except Unsupported as error:
            raise UsageError(str(error)) from None
        return _train(_flags(arguments))
    except UsageError as error:
        return _fail(2, error, arguments)
    except (torch.OutOfMemoryError, OffloadError) as error:
        return _fail(3, error, arguments)
    except InvalidArgument as error:
        return _fail(1 if isinstance(error, BatchError) else 2, error, arguments)
    except Error as error:
        return _fail(1, error, arguments)


def _fail(code: int, error: BaseException, arguments: list[str]) -> int:
    message = " ".join(str(error).split())
    for name, flag in _AS_FLAGS.items():
        message = message.replace(name, flag)
    if "--json" in arguments:
        print(json.dumps({"event": "error", "exit_code": code, "message": message}), flush=True)
    print(f"infinitybatch: {message}", file=sys.stderr)
    return code


def _flags(arguments: list[str]) -> argparse.Namespace:
    given = vars(parser().parse_args(arguments))
    saved: dict[str, Any] = {}
    if "resume" in given:
        saved = _saved_flags(given["resume"])
        for name in FIXED:
            if name in given and given[name] != saved[name]:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"{flag} is {given[name]}, and {given['resume']} was trained with "
                    f"{saved[name]}; leave {flag} out, or train anew without --resume"
                )
    flags = argparse.Namespace(**(DEFAULTS | saved | given))
    if not flags.model or ":" not in flags.model:
        raise UsageError(f"--model {flags.model} is no package.module:factory, as in: pkg.nets:Net")
    if flags.save and Path(flags.save).suffix not in (".pt", ".pth", ".safetensors"):
        raise UsageError(f"--save {flags.save} must end in .pt, .pth or .safetensors")
    if flags.save and not os.path.isdir(os.path.dirname(flags.save) or "."):
        folder = os.path.dirname(flags.save)
        raise UsageError(f"--save {flags.save}: there is no folder {folder}: mkdir -p {folder}")
    if flags.save and flags.save.endswith(".safetensors"):
        _safetensors()
    if flags.checkpoint_every and not flags.save:
        raise UsageError("--checkpoint-every needs a place, as in: --save model.pt")
    return flags


def _saved_flags(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        raise UsageError(f"--resume {path}: there is no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        states = dict(state["callbacks"]["callbacks"])
        saved: dict[str, Any] = json.loads(states[Flags.__qualname__]["flags"])
        return saved
    except Exception:
        raise UsageError(
            f"--resume {path} is no checkpoint of {PROGRAM}, or is damaged; resume from the "
            f"model.checkpoint.pt beside the model"
        ) from None


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise UsageError(
            "--save with .safetensors needs a package: pip install safetensors; or end it in .pt"
        ) from None
    return safetensors.torch


def _batch_size(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f'--batch-size must be a number of 1 or more, or "all", not {text}')
    return int(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        there = torch.accelerator.current_accelerator()
        found = ["cpu"] if there is None else ["cpu", there.type]
        raise UsageError(
            f"--device {text} is not there; this machine and this torch have: {', '.join(found)}"
        ) from None
    return device


def _train(flags: argparse.Namespace) -> int:
    device = _device(flags.device)
    loss = loss_of(flags.loss)
    of_classes = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
    metrics = metrics_of(flags.metrics, of_classes)
    named("--model", flags.model)  # told before data are read
    data = data_of(flags, _batch_size(flags.batch_size))
    flags.encoding = data.encoding  # kept in checkpoints and beside the model
    random.seed(flags.seed)
    torch.manual_seed(flags.seed)
    model = model_of(flags.model, data.samples).to(device)
    if isinstance(loss, nn.Module):
        loss.to(device)
    optimizer = optimizer_of(flags.optimizer, flags.lr, model.parameters())
    ema = None if flags.ema is None else EMA(flags.ema)
    report = _Report(data, metrics, ema, flags.json)
    checkpoint = f"{os.path.splitext(flags.save)[0]}.checkpoint.pt" if flags.save else None
    listeners: list[Callback] = [
        Flags({n: v for n, v in vars(flags).items() if n not in ("resume", "json")}),
        report,
    ]
    listeners[:0] = [ema] if ema else []  # before what is measured with it
    listeners.append(Progress(["plan", "epoch", "batch", "loss", "rate", "micro_batch_size", "peak", "eta",
                               "accuracy", *flags.metrics.split(",")]))  # fmt: skip
    if flags.checkpoint_every and checkpoint:
        listeners.append(Checkpoint(checkpoint, every_epochs=flags.checkpoint_every))
    trainer = Trainer(
        model,
        loss,
        optimizer,
        data.train,
        schedule=schedule_of(flags.schedule, optimizer, flags.epochs),
        clip_norm=flags.clip,
        callbacks=listeners,
        memory_budget=flags.memory_budget,
        micro_batch_size=flags.micro_batch_size,
        grad_scaler=torch.amp.GradScaler(device.type) if flags.amp == "float16" else None,
    )
    if flags.resume:
        trainer.load(flags.resume)
        if trainer.epochs_done >= flags.epochs:
            raise UsageError(
                f"--resume {flags.resume}: all {trainer.epochs_done} epochs are done; train on with "
                f"more, as in: --epochs {2 * trainer.epochs_done}"
            )
    parameters = sum(p.numel() for p in model.parameters())
    report.tell("start", {"model": flags.model, "parameters": parameters, **_described(data)})
    print(f"{flags.model}: {parameters:,} parameters, {flags.optimizer}", file=sys.stderr)
    code = _run(trainer, flags, device, checkpoint)
    if code:
        return code
    report.tell("summary", {**report.last, "epochs": trainer.epochs_done})
    if flags.save:
        with ema.applied() if ema else contextlib.nullcontext():
            _save(model, flags)
        report.tell("saved", {"path": flags.save, "epoch": trainer.epochs_done})
        print(f"saved {flags.save}", file=sys.stderr)
    return 0


def _described(data: Data) -> dict[str, Any]:
    samples = data.samples
    return {"sample_shape": samples.shape, "classes": samples.classes, "kind": samples.kind}


def _run(
    trainer: Trainer, flags: argparse.Namespace, device: torch.device, checkpoint: str | None
) -> int:
    def terminate(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    autocast: Any = contextlib.nullcontext()
    if flags.amp:
        autocast = torch.autocast(device.type, getattr(torch, flags.amp))
    try:
        with autocast:
            trainer(flags.epochs - trainer.epochs_done)
        return 0
    except (KeyboardInterrupt, _Terminated) as interruption:
        stopped = "terminated" if isinstance(interruption, _Terminated) else "interrupted"
        where = f"after {trainer.steps_done} steps, in epoch {trainer.epochs_done + 1}"
        message = f"{stopped} {where}; the interrupted step was discarded"
        if checkpoint:
            trainer.save(checkpoint)
            message += f"; go on with: {PROGRAM} --resume {shlex.quote(checkpoint)}"
        code = 143 if isinstance(interruption, _Terminated) else 130
        return _fail(code, Error(message), ["--json"] if flags.json else [])
    finally:
        signal.signal(signal.SIGTERM, before)


def _save(model: nn.Module, flags: argparse.Namespace) -> None:
    """Weights, and what the model was made with beside them, each whole or not at all."""
    part = f"{flags.save}.part"
    if flags.save.endswith(".safetensors"):
        _safetensors().save_model(model, part)
    else:
        torch.save(model.state_dict(), part)
    os.replace(part, flags.save)
    beside = f"{os.path.splitext(flags.save)[0]}.json"
    Path(f"{beside}.part").write_text(json.dumps(vars(flags), indent=1) + "\n")
    os.replace(f"{beside}.part", beside)
