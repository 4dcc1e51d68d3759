"""What a trainer needs to go on elsewhere, and its history."""

import copy
import io
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _random_state
from ._model import CallableModel
from .errors import InvalidArgument, StateError

if TYPE_CHECKING:
    from .trainer import Trainer

#: Epochs that a history holds.
HISTORY = 1000


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """One epoch of a history."""

    #: Counted from 0 over all runs.
    epoch: int
    #: Mean over the epoch's samples, each before its step.
    loss: float
    samples: int
    #: Logical batches.
    batches: int
    #: Wall clock time of its steps.
    seconds: float


def state_of(trainer: "Trainer", cloned: bool = True) -> dict[str, Any]:
    """See `Trainer.state_dict`. Without `cloned` its tensors are the live ones, for a file."""
    if trainer._parts.in_step:
        raise StateError(
            "a step is running, and half a step is no state to resume from; call state_dict in "
            "on_batch_end"
        )
    optimizer = trainer._updates.optimizer
    model, criterion = _module_of(trainer._model), _module_of(trainer._loss)
    names = _names(trainer)
    state = {
        "version": 1,
        "model": None if model is None else model.state_dict(),
        "criterion": None if criterion is None else criterion.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameters": names,
        "others": dict(_others(trainer, names)),
        "classes": {n: _kind(p) for n, p in _parts_of(trainer).items() if p is not None},
        **{n: _state_of(part) for n, part in _parts_of(trainer).items() if n != "optimizer"},
        "callbacks": trainer._callbacks.state_dict(),
        "loop": trainer._loop.state(),
        "loader": trainer._batches.state(),
        "random": _random_state.capture(),
        "history": [(e.epoch, e.loss, e.samples, e.batches, e.seconds) for e in trainer._history],
    }
    plain: dict[str, Any] = _plain(state, {} if cloned else None)
    return plain


def restore(trainer: "Trainer", state: dict[str, Any], copied: bool = False) -> None:
    """See `Trainer.load_state_dict`. All is checked before anything is loaded; `copied` says that
    nobody else holds the state's tensors."""
    if trainer._loop.running:
        raise StateError("the trainer runs; load a state between two runs")
    if not isinstance(state, dict) or state.get("version") != 1 or not _KEYS <= state.keys():
        raise InvalidArgument(
            "this is not the state of a Trainer; give what trainer.state_dict() returned, or what "
            "trainer.save(path) wrote"
        )
    trainer._batches.check(state["loader"])
    parts = _parts_of(trainer)
    for name in ("schedule", "grad_scaler"):
        if (state[name] is None) != (parts[name] is None):
            having = "has none" if parts[name] is None else "has one"
            raise InvalidArgument(
                f"this trainer {having} for {name}, unlike the one of the state; make the "
                f"trainer as that one was made"
            )
    for name, kind in state["classes"].items():
        if _kind(parts[name]) != kind:
            raise InvalidArgument(
                f"the state is of a trainer whose {name} is {kind}, and this one's is "
                f"{_kind(parts[name])}; make this trainer with {kind}, load, and give it another "
                f"{name} afterwards"
            )
    modules = {"model": _module_of(trainer._model), "criterion": _module_of(trainer._loss)}
    for name, module in modules.items():
        _check_tensors(name, {} if module is None else module.state_dict(), dict(state[name] or {}))
    _check_parameters(trainer, state)
    trainer._callbacks.check(state["callbacks"])
    if not copied:  # what is loaded may be kept and changed in place
        changed = ("optimizer", "schedule", "grad_scaler", "callbacks")
        state = {**state, **{name: _plain(state[name], {}) for name in changed}}

    # First what may refuse a state by itself, and can be put back.
    loaded: list[tuple[Any, Any]] = []
    try:
        for part, own in (
            (trainer._callbacks, state["callbacks"]),
            (parts["schedule"], state["schedule"]),
            (parts["grad_scaler"], state["grad_scaler"]),
        ):
            if part is not None:
                loaded.append((part, _plain(part.state_dict(), {})))
                part.load_state_dict(own)
        for name, module in modules.items():
            if module is not None:
                module.load_state_dict(state[name])
        parts["optimizer"].load_state_dict(state["optimizer"])
    except BaseException:
        for part, before in reversed(loaded):
            part.load_state_dict(before)
        raise
    with torch.no_grad():
        for position, parameter in _others(trainer, _names(trainer)):
            parameter.copy_(state["others"][position])
    trainer._history = deque((EpochSummary(*e) for e in state["history"]), maxlen=HISTORY)
    trainer._loop.restore(state["loop"])
    trainer._batches.restore(state["loader"])
    _random_state.restore(state["random"])


def write(state: dict[str, Any], path: str) -> None:
    """To a file that `torch.load` reads with weights only, or StateError that names the part."""
    try:
        torch.save(state, path)
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # reads no tensors
        except (OSError, RuntimeError):  # a file system without mmap
            torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        tensors = ("model", "criterion", "optimizer", "others", "random", "loader")
        for name in sorted(state, key=tensors.__contains__):
            found = _refused(name, state[name])
            if found is not None:
                raise StateError(
                    f"{found}, cannot be saved so that torch.load reads it with weights only; make "
                    f"it of tensors, numbers, strings, lists and dicts"
                ) from error
        raise


#: Of every state.
_KEYS = {
    *("model", "criterion", "optimizer", "parameters", "others", "classes", "schedule"),
    *("grad_scaler", "callbacks", "loop", "loader", "random", "history"),
}


def _parts_of(trainer: "Trainer") -> dict[str, Any]:
    updates = trainer._updates
    return {
        "optimizer": updates.optimizer,
        "schedule": trainer._schedule,
        "grad_scaler": updates.scaler,
    }


def _kind(part: Any) -> str:
    inner = getattr(part, "_schedulers", None)  # of SequentialLR and ChainedScheduler
    kind = type(part).__name__
    return kind if inner is None else f"{kind}({', '.join(map(_kind, inner))})"


def _module_of(part: Any) -> nn.Module | None:
    """What holds the state of a model or criterion: itself, or what it is a method of."""
    if isinstance(part, CallableModel):
        return part.module
    called = part if isinstance(part, nn.Module) else getattr(part, "__self__", None)
    return called if isinstance(called, nn.Module) else None


def _names(trainer: "Trainer") -> list[list[str | None]]:
    """Of the optimizer's parameters, group by group; None for those of nothing with a state."""
    known: dict[int, str] = {}
    for name, part in (("model", trainer._model), ("criterion", trainer._loss)):
        module = _module_of(part)
        for key, parameter in () if module is None else module.named_parameters():
            known.setdefault(id(parameter), f"{name}.{key}")
    groups = trainer._updates.optimizer.param_groups
    return [[known.get(id(p)) for p in group["params"]] for group in groups]


def _others(
    trainer: "Trainer", names: list[list[str | None]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters that no module holds: the optimizer's by position, the model's by name."""
    in_optimizer = set()
    for g, group in enumerate(trainer._updates.optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            in_optimizer.add(id(parameter))
            if names[g][i] is None:
                yield f"parameter {i} of group {g}", parameter.detach()
    if isinstance(trainer._model, nn.Module):
        return
    module = _module_of(trainer._model)
    held = set() if module is None else {id(p) for p in module.parameters()}
    for name, parameter in trainer._model.named_parameters():
        if id(parameter) not in held | in_optimizer:
            yield f"model's {name}", parameter.detach()


def _check_tensors(name: str, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    only = [f"'{key}' is the state's alone" for key in theirs.keys() - mine.keys()]
    only += [f"'{key}' is this trainer's alone" for key in mine.keys() - theirs.keys()]
    for key in mine.keys() & theirs.keys():
        a, b = mine[key], theirs[key]
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            continue
        if isinstance(a, nn.parameter.UninitializedTensorMixin) or a.numel() == 0:
            continue  # takes the state's shape
        if a.shape != b.shape:
            only.append(f"'{key}' is {tuple(a.shape)} here and {tuple(b.shape)} in the state")
    if only:
        raise InvalidArgument(
            f"the state's {name} is another one than this trainer's: {_listed(sorted(only))}; make "
            f"the trainer as that one was made"
        )


def _check_parameters(trainer: "Trainer", state: dict[str, Any]) -> None:
    mine, theirs = _names(trainer), state["parameters"]
    if [len(group) for group in mine] != [len(group) for group in theirs]:
        here, there = ([len(group) for group in names] for names in (mine, theirs))
        raise InvalidArgument(
            f"the state's optimizer has {len(there)} groups of {there} parameters, and this "
            f"trainer's has {len(here)} of {here}; make it as that one was made"
        )
    for place, (a, b) in enumerate(zip(sum(mine, []), sum(theirs, []), strict=True)):
        if a != b:
            raise InvalidArgument(
                f"parameter {place} of the state's optimizer is {b or 'of no module'}, and of this "
                f"trainer's {a or 'of no module'}; make it of the same parameters in the same order"
            )
    _check_tensors("parameters outside the model", dict(_others(trainer, mine)), state["others"])


def _listed(found: list[str]) -> str:
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")


def _plain(value: Any, clones: dict[Any, torch.Tensor] | None) -> Any:
    """Containers copied and NumPy's numbers made Python's; tensors cloned where `clones` is given,
    two views of the same numbers once."""
    if isinstance(value, torch.Tensor):
        return value if clones is None else _cloned(value, clones)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, dict):
        same = copy.copy(value)  # the kind, and what hangs on it, as state_dict's _metadata
        for key, entry in value.items():
            same[key] = _plain(entry, clones)
        return same
    if type(value) in (list, tuple):
        return type(value)(_plain(entry, clones) for entry in value)
    return value


def _cloned(tensor: torch.Tensor, clones: dict[Any, torch.Tensor]) -> torch.Tensor:
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return tensor.clone()
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() == 0 or key not in clones:
        clones[key] = tensor.clone()
    return clones[key]


def _refused(name: str, value: Any) -> str | None:
    """The innermost entry that no file can hold, described."""
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
        return None
    except Exception:
        entries: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            entries = value.items()
        elif isinstance(value, list | tuple):
            entries = enumerate(value)
        for key, entry in entries:
            found = _refused(f"{name}[{key!r}]", entry)
            if found is not None:
                return found
        return f"{name}, a {type(value).__name__}"


def _state_of(part: Any) -> Any:
    return None if part is None else part.state_dict()
