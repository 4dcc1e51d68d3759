"""What `python -m infinitybatch train` trains with: model, data, loss, optimizer, schedule, metrics."""

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _C
from ._C import BatchSource
from ._command_flags import OPTIMIZERS, UsageError


@dataclass(frozen=True)
class Samples:
    """What `--data` holds; a model's factory may take it."""

    #: Of one sample, and how many classes; None where `--data` is a factory.
    shape: tuple[int, ...] | None
    classes: int | None
    #: "vectors", "images", "text"; None likewise.
    kind: str | None


@dataclass(frozen=True)
class Data:
    """Loaders as a Trainer takes them, and what they hold."""

    train: Any
    held_out: Any
    samples: Samples
    #: How files were read: numbers of classes, columns, scaling; None where `--data` is a factory.
    encoding: dict[str, Any] | None = None


def named(flag: str, text: str) -> Any:
    """The object that package.module:name means."""
    module, _, name = text.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # of a module that this one imports
        raise UsageError(
            f"{flag} {text}: there is no module {module}; run it where Python finds that module, as "
            f"in: PYTHONPATH=. python -m infinitybatch train"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{flag} {text}: {module} has no {name}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{flag} {text} is a {type(found).__name__}; name what can be called")
    return found


def model_of(text: str, samples: Samples) -> nn.Module:
    factory = named("--model", text)
    wants = _required(factory)
    model = factory(samples) if wants else factory()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {text} gave a {type(model).__name__}; it must give a torch.nn.Module"
        )
    return model


def _required(function: Callable[..., Any]) -> bool:
    """Whether it wants an argument, or has one that is called samples."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        p.name == "samples" or (p.default is p.empty and p.kind in positional) for p in parameters
    )


def data_of(flags: Any, batch_size: int | None) -> Data:
    if ":" in flags.data:
        return _data_of_python(flags, batch_size)
    read = _C.load_data(
        flags.data,
        flags.labels,
        flags.inputs,
        flags.csv_header,
        flags.image_size,
        flags.held_out,
        flags.context,
        getattr(flags, "encoding", None),  # of the training that is resumed
    )
    train, held_out = read["train"], read["held_out"]
    size = batch_size or len(train)

    def batches(epoch: int) -> Iterator[tuple[BatchSource, BatchSource]]:
        # The command line's order: a function of seed and epoch alone.
        generator = torch.Generator().manual_seed((flags.seed * 1_000_003 + epoch + 1) % 2**64)
        for rows in torch.randperm(len(train), generator=generator).split(size):
            yield _rows(train, rows)

    def measured() -> Iterator[tuple[BatchSource, BatchSource]]:
        yield _rows(held_out, torch.arange(len(held_out)))

    samples = Samples(read["sample_shape"], read["classes"], read["kind"])
    return Data(batches, measured if len(held_out) else None, samples, read["encoding"])


def _rows(split: Any, rows: torch.Tensor) -> tuple[BatchSource, BatchSource]:
    return (
        BatchSource(len(rows), lambda begin, end: split.inputs(rows[begin:end])),
        BatchSource(len(rows), lambda begin, end: split.targets(rows[begin:end])),
    )


def _data_of_python(flags: Any, batch_size: int | None) -> Data:
    for flag in ("labels", "inputs", "image_size", "held_out"):
        if getattr(flags, flag):
            name = flag.replace("_", "-")
            raise UsageError(
                f"--{name} is of files, and --data {flags.data} is Python: leave it out"
            )
    given = named("--data", flags.data)()
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    return Data(
        *(_loader(part, batch_size, flags.seed) for part in pair), Samples(None, None, None)
    )


def _loader(part: Any, batch_size: int | None, seed: int) -> Any:
    """Data sets are batched and shuffled here; loaders are taken as they are."""
    if part is None or not isinstance(part, torch.utils.data.Dataset):
        return part
    if isinstance(part, torch.utils.data.IterableDataset):
        return torch.utils.data.DataLoader(part, batch_size or 512)
    generator = torch.Generator().manual_seed(seed)
    size = batch_size or len(part)  # type: ignore[arg-type]
    return torch.utils.data.DataLoader(part, size, shuffle=True, generator=generator)


def loss_of(text: str) -> Any:
    if ":" in text:
        return named("--loss", text)()
    kind = getattr(nn, text, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        losses = [name for name in dir(nn) if name.endswith("Loss")]
        near = difflib.get_close_matches(text, losses, 1)
        hint = f"; did you mean {near[0]}?" if near else ", as CrossEntropyLoss"
        raise UsageError(f"--loss {text} is not one of torch.nn{hint}")
    return kind()


def optimizer_of(text: str, lr: float | None, parameters: Any) -> torch.optim.Optimizer:
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    kind = kinds.get(text.lower())
    if kind is None or kind is torch.optim.Optimizer:
        near = difflib.get_close_matches(text.lower(), kinds, 1)
        hint = f"; did you mean {near[0]}?" if near else ", as adam"
        raise UsageError(f"--optimizer {text} is not one of torch.optim{hint}")
    options = dict(OPTIMIZERS.get(text.lower(), {}))
    if lr is not None:
        options["lr"] = lr
    made: torch.optim.Optimizer = kind(parameters, **options)
    return made


def schedule_of(text: str, optimizer: torch.optim.Optimizer, epochs: int) -> Any:
    if ":" in text:
        return named("--schedule", text)(optimizer)
    if text == "constant":
        return None
    shapes = {
        "linear": lambda epoch: 1 - epoch / epochs,
        "cosine": lambda epoch: (1 + math.cos(math.pi * epoch / epochs)) / 2,
    }
    if text not in shapes:
        raise UsageError(
            f"--schedule {text} is not known; use constant, linear, cosine or "
            f"package.module:factory, called with the optimizer"
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shapes[text])
