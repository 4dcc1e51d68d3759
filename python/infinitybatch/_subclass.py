"""Subclasses of a module's class whose objects share that module's state."""

import abc
import functools
import types
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from ._programs import is_exporting, no_program


def known(kind: type, mixin: type, key: Any) -> type | None:
    """What `subclass_of` has made, with "_infinitybatch_key": key among the names."""
    for made in type.__subclasses__(kind):  # held by nothing but its objects
        if mixin in made.__bases__ and vars(made).get("_infinitybatch_key") == key:
            return made
    return None


def subclass_of(kind: type, mixin: type, names: dict[str, Any], slots: tuple[str, ...]) -> type:
    """`kind` with `mixin` in front of it and the name of `kind`.

    Args:
        names: more of the namespace.
        slots: what each object has of its own, beside the shared `__dict__`.
    """
    namespace = {
        "__slots__": slots,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_infinitybatch_kind": kind,
        **dict(_slots(kind)),
        **names,
    }
    # As Python makes classes: the author's metaclass may keep a list of what people wrote.
    maker: Any = abc.ABCMeta if isinstance(kind, abc.ABCMeta) else type
    return maker.__new__(type(kind), kind.__name__, (mixin, kind), namespace)


def _slots(kind: type) -> Iterator[tuple[str, property]]:
    """Slots of the inner class lie in its objects, not in the shared dict."""
    for base in reversed(kind.__mro__):
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):
                yield name, _forwarded(slot)


def _forwarded(slot: Any) -> property:
    return property(
        lambda self: slot.__get__(self._infinitybatch.inner),
        lambda self, value: slot.__set__(self._infinitybatch.inner, value),
        lambda self: slot.__delete__(self._infinitybatch.inner),
    )


def with_state_of(inner: nn.Module, kind: type) -> Any:
    """An object of `kind` on the very dict of `inner`. Raises TypeError where objects of the class
    have state elsewhere, as those of C do (a module that is a dict, too)."""
    module = object.__new__(kind)
    object.__setattr__(module, "__dict__", inner.__dict__)
    return module


#: What fullgraph=True says.
_WHY_NOT_COMPILED = (
    "ib.wrap computes micro-batches outside of compiled code; compile inside of it, "
    "ib.wrap(torch.compile(model)), or leave fullgraph out"
)


class Method:
    """A method of such a class. What is set in its place is the object's own (mixed precision sets
    forward); what is set on the inner module lies in the shared dict, and is run by that one."""

    def __init__(self, name: str, function: FunctionType) -> None:
        self.name = name
        self.function = function
        self.in_compiled_code = torch.compiler.disable(function, reason=_WHY_NOT_COMPILED)

    def __get__(self, module: Any, _: type | None = None) -> Any:
        if module is None:
            return self.function
        if is_exporting():  # which would stumble over the next lines
            raise no_program("torch.export")
        if is_compiling():
            return functools.partial(self.in_compiled_code, module)
        own = module._infinitybatch.own
        return own[self.name] if self.name in own else MethodType(self.function, module)

    def __set__(self, module: Any, method: Any) -> None:
        module._infinitybatch.own[self.name] = method

    def __delete__(self, module: Any) -> None:
        module._infinitybatch.own.pop(self.name, None)


def is_graph_module(kind: type) -> bool:
    """Whether `kind` writes its forward on the class of what it is called on."""
    return issubclass(kind, torch.fx.GraphModule)


__all__ = ["Method", "is_graph_module", "known", "subclass_of", "with_state_of"]
