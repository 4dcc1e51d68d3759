"""A module that looks like another one, which it holds without having it as a child."""

import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

FaceT = TypeVar("FaceT", bound="Face")


class Face(nn.Module):
    """The face of the inner module, which is not registered as a child.

    Whatever is asked of it or set on it that is not its own (its forward and the hooks around it
    are) is the inner module's, and so is each method of nn.Module that the inner class overrides. A
    method that returns the inner module returns the face.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # From here on what is set goes to the inner module.
        self.__dict__.update(_inner=model, **shared(model))

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self._inner.training

    @training.setter
    def training(self, mode: bool) -> None:
        # Set by nn.Module's constructor too, which must not wake what sleeps inside.
        if "_inner" in self.__dict__:
            self._inner.training = mode

    @property
    def _modules(self) -> dict[str, nn.Module | None]:  # type: ignore[override]
        # Containers make another dict where one of theirs is deleted; C++ reads what stands here.
        modules = self.__dict__["_modules"] = self._inner._modules
        return modules

    @_modules.setter
    def _modules(self, modules: dict[str, nn.Module | None]) -> None:
        if "_inner" in self.__dict__:
            self._inner._modules = modules

    def train(self: FaceT, mode: bool = True) -> FaceT:
        self._inner.train(mode)
        return self

    def apply(self: FaceT, fn: Callable[[nn.Module], None]) -> FaceT:
        # What `fn` does hangs on the class of the module that it is given.
        self._inner.apply(fn)
        return self

    def _apply(self: FaceT, fn: Any, recurse: bool = True) -> FaceT:
        self._inner._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._inner._load_from_state_dict(*args)

    def _register_load_state_dict_pre_hook(self, hook: Any, with_module: bool = False) -> Any:
        # It would refer to the face: copies of the inner module alone would come upon it.
        return self._inner._register_load_state_dict_pre_hook(hook, with_module)

    def _overridden(self, name: str) -> bool:
        """Whether the inner module has something of its own in place of nn.Module's `name`."""
        inner = self._inner
        if name in inner.__dict__:
            return True
        if isinstance(inner, Face):
            return inner._overridden(name)
        return getattr(type(inner), name) is not getattr(nn.Module, name)

    def _faced(self, value: Any) -> Any:
        """What the inner module has answered, with the face in place of itself."""
        if value is self._inner:
            return self
        if type(value) is tuple:
            return tuple(map(self._faced, value))
        return map(self._faced, value) if isinstance(value, Iterator) else value

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        # Special methods are looked for by `copy` and `pickle`, which mean this object.
        if inner is None or (name.startswith("__") and name.endswith("__")):
            return super().__getattr__(name)
        value = getattr(inner, name)
        if isinstance(value, types.MethodType) and value.__self__ is inner:
            return _bound(self, value, lambda result: self if result is inner else result)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)

    def _is_own(self, name: str) -> bool:
        if "_inner" not in self.__dict__ or name in self.__dict__:
            return True
        return hasattr(type(self), name) and not (name in _NATIVE and self._overridden(name))

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._inner, name)

    # Of containers (Sequential, ModuleList): Python asks a class, not its objects, for these. A
    # module that is none raises its own TypeError.
    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._inner)

    def __getitem__(self, index: Any) -> Any:
        return self._inner[index]  # type: ignore[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._inner[index] = value  # type: ignore[index]

    def __delitem__(self, index: Any) -> None:
        del self._inner[index]  # type: ignore[attr-defined]

    def __reversed__(self) -> Any:
        return reversed(self._inner)  # type: ignore[call-overload]

    def __add__(self, other: Any) -> Any:
        return self._inner + _inside(other)  # type: ignore[operator]

    def __iadd__(self, other: Any) -> Any:
        return self._faced(operator.iadd(self._inner, _inside(other)))

    def __mul__(self, count: Any) -> Any:
        return self._inner * count  # type: ignore[operator]

    def __rmul__(self, count: Any) -> Any:
        return count * self._inner

    def __imul__(self, count: Any) -> Any:
        return self._faced(operator.imul(self._inner, count))

    def __iter__(self) -> Any:
        return iter(self._inner)  # type: ignore[call-overload]

    def __contains__(self, item: Any) -> bool:
        return item in self._inner  # type: ignore[operator]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._inner)})


def _inside(value: Any) -> Any:
    return _inside(value._inner) if isinstance(value, Face) else value


_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def shared(model: nn.Module) -> dict[str, Any]:
    """The very dicts of `model`, so that both always hold the same tensors, modules and hooks on
    their state: a module that has the face as a child asks it for those that follow loading."""
    return {name: getattr(model, name) for name in _SHARED}


class _AsInner:
    """A method of nn.Module's that is the inner module's where that one has its own.

    Asked of the class it is nn.Module's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.native = getattr(nn.Module, name)

    def __get__(self, face: Face | None, kind: type) -> Any:
        if face is None:
            return self.native
        if not face._overridden(self.name):
            return types.MethodType(self.native, face)
        value = getattr(face._inner, self.name)
        return _bound(face, value, face._faced) if callable(value) else value


def _bound(face: Face, method: Any, answer: Callable[[Any], Any]) -> types.MethodType:
    """`method` of the inner module as a method of the face."""

    @functools.wraps(getattr(method, "__func__", method))
    def call(_: Face, *args: Any, **kwargs: Any) -> Any:
        return answer(method(*args, **kwargs))

    return types.MethodType(call, face)


#: Public methods of nn.Module that are not said to be the face's own.
_NATIVE = {
    name
    for name, value in vars(nn.Module).items()
    if inspect.isfunction(value)
    and name not in {"forward", *vars(Face)}
    and not name.startswith(("_", "register_forward_", "register_full_", "register_backward_"))
}
for _name in _NATIVE:
    setattr(Face, _name, _AsInner(_name))

__all__ = ["Face", "shared"]
