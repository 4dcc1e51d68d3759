"""What a loader consists of: samplers, generators, worker processes that stay."""

import inspect
from typing import Any

import torch

from . import _random_state
from .errors import StateError
from .windows import Windows


def source_of(loader: Any) -> Any:
    """The loader within windows."""
    while isinstance(loader, Windows):
        loader = loader._loader
    return loader


def generators_of(source: Any) -> list[torch.Generator]:
    """Those of a DataLoader and its samplers, which are no defaults."""
    found: dict[int, torch.Generator] = {}
    for part in _parts_of(source):
        generator = part if isinstance(part, torch.Generator) else getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def set_epoch(source: Any, epoch: int) -> None:
    """Tells whoever wants to know: DistributedSampler, data sets and loaders that shuffle."""
    for part in (*_parts_of(source), getattr(source, "dataset", None)):
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def may_draw(source: Any) -> bool:
    """Whether reading on draws numbers of this process."""
    return not (isinstance(source, list | tuple) or getattr(source, "num_workers", 0))


def is_persistent(source: Any) -> bool:
    return isinstance(source, torch.utils.data.DataLoader) and bool(
        source.persistent_workers and source.num_workers
    )


def has_workers(source: Any) -> bool:
    """Whether worker processes that stay are there: a DataLoader draws their seed when it starts
    them, so epochs begin with one draw more before than after."""
    return is_persistent(source) and source._iterator is not None


def set_workers(source: Any, wanted: bool, skip: int) -> None:
    """Starts or ends worker processes that stay, so that an epoch begins as it did before."""
    if wanted and not is_persistent(source) and skip:
        raise StateError(
            "the current epoch was begun by a DataLoader whose workers stay, which draws its order "
            "otherwise; give it persistent_workers=True again, or load a state of an epoch's end"
        )
    if wanted == has_workers(source) or not is_persistent(source):
        return
    if not wanted:
        source._iterator = None
        return
    state, own = _random_state.Snapshot(), states_of(source)
    iter(source)
    _random_state.restore(state)
    set_generators(source, own)


def states_of(source: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators_of(source)]


def set_generators(source: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators_of(source), states, strict=False):
        generator.set_state(state)


def is_one_pass(loader: Any) -> bool:
    """A generator, or an iterator whose __iter__ begins nothing anew."""
    if not hasattr(loader, "__next__"):
        return False
    code = getattr(getattr(type(loader), "__iter__", None), "__code__", None)
    # Python that names nothing but its argument: `return self`.
    return inspect.isgenerator(loader) or code is None or not code.co_names


def kept_by(function: Any) -> list[Any]:
    """Loaders, samplers and generators that a function which makes loaders holds over its calls."""
    kinds = (torch.utils.data.DataLoader, torch.utils.data.Sampler, torch.Generator)
    held = map(source_of, _held_by(function))
    return list({id(part): part for part in held if isinstance(part, kinds)}.values())


def _held_by(function: Any) -> list[Any]:
    inner = getattr(function, "func", function)  # functools.partial
    held = [*getattr(function, "args", ()), *(getattr(function, "keywords", None) or {}).values()]
    owner = getattr(inner, "__self__", None)
    if not inspect.isroutine(inner):
        owner, inner = inner, type(inner).__call__
    held += [owner, *getattr(owner, "__dict__", {}).values()]
    held += getattr(inner, "__defaults__", None) or ()
    try:
        seen = inspect.getclosurevars(inner)
    except (TypeError, ValueError):
        return held
    return [*held, *seen.nonlocals.values(), *seen.globals.values()]


def _parts_of(source: Any) -> list[Any]:
    source = source_of(source)
    sampler, batch_sampler = (getattr(source, n, None) for n in ("sampler", "batch_sampler"))
    parts = [source, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    return list({id(part): part for part in parts if part is not None}.values())
