"""What a wrapped module is: an object of a subclass of the inner module's class, on its state."""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling
from torch.jit import is_tracing

from . import _C, _subclass, _tree
from ._accumulation import tell_of_accumulation
from ._caches import Dropped, is_cache, natively
from ._methods import Watch, own_methods, watched
from ._offload import Offload
from ._programs import no_program, outside_of_program
from ._returned import Returned
from ._rows import explain_lists, refuse_lists_of_samples
from ._trim import TrimPadding
from .errors import BatchError, Error, Unsupported

WrappedT = TypeVar("WrappedT", bound="Wrapped")

#: What a wrapped module has of its own: the hooks around its call, which is one for the whole batch,
#: where those of the inner module see each micro-batch.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_SLOTS = ("_infinitybatch", "_compiled_call_impl", *_HOOKS)


def _registering(name: str) -> Any:
    """`register_forward_hook` and its like: what code of a step registers, which may run several
    times, goes where such steps look and put back: to the inner module, which runs plainly there."""

    @functools.wraps(getattr(nn.Module, name))
    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _C._in_step():
            return getattr(self._infinitybatch.inner, name)(*args, **kwargs)
        return getattr(super(Wrapped, self), name)(*args, **kwargs)

    return register


@dataclass(slots=True)
class State:
    """What a wrapped module holds beside the inner one's state."""

    inner: nn.Module
    options: dict[str, Any]
    methods: tuple[str, ...]  # computed in micro-batches beside forward
    agreement: Any  # of the ranks, or None
    view: Any  # of the inner module: a ModelView
    steps: dict[str, _C.Wrap]  # by the name of the method
    last: _C.Wrap  # the one that was called last
    dropped: Dropped
    returned: Returned
    own: dict[str, Callable[..., Any]] = field(default_factory=dict)  # set on the object
    like_inner: dict[str, Callable[..., Any]] = field(default_factory=dict)  # those that wrap set
    judged: set[str] = field(default_factory=set)  # other methods, once one call was watched
    watch: Watch | None = None
    accumulates: bool = False  # others accumulate its gradients, and have been told


class Wrapped(nn.Module):
    """What `wrap` returns: an instance of this class and of the inner module's class.

    Parameters, buffers, submodules and all attributes are those of the inner module. Methods run on
    the wrapped module, so that `self(x)` in them is computed in micro-batches, too.
    """

    __slots__ = ()
    _infinitybatch: State
    _infinitybatch_kind: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the inner class, for `type(model)(...)` asks for one of that."""
        return cls._infinitybatch_kind(*args, **kwargs)

    def __init_subclass__(cls, **_: Any) -> None:
        """The inner class is not told of a subclass that its author did not write."""

    @property
    def last_report(self) -> _C.WrapReport | None:
        """What the last call did, and its backward so far; None before the first one."""
        return self._infinitybatch.last.last_report()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_infinitybatch":
                raise
            inner = self._infinitybatch.inner
            if isinstance(self, type(inner)):
                raise
        # The class of the inner module has changed since, as parametrize and lazy modules do it.
        return getattr(inner, name)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        # What a function does may hang on the very class of the module that it is given.
        inner = self._infinitybatch.inner
        result = inner.apply(*args, **kwargs)
        return self if result is inner else result

    def _register_load_state_dict_pre_hook(self, hook: Any, with_module: bool = False) -> Any:
        # It would refer to the wrapped module: copies of the inner one alone would come upon it.
        inner = self._infinitybatch.inner
        return inner._register_load_state_dict_pre_hook(hook, with_module)

    register_forward_hook = _registering("register_forward_hook")
    register_forward_pre_hook = _registering("register_forward_pre_hook")
    register_full_backward_hook = _registering("register_full_backward_hook")
    register_full_backward_pre_hook = _registering("register_full_backward_pre_hook")

    def extra_repr(self) -> str:
        state = self._infinitybatch
        given = ("micro_batch_size", "memory_budget")
        said = [f"{k}={state.options[k]!r}" for k in given if state.options[k] is not None]
        return ", ".join(filter(None, [state.inner.extra_repr(), *said]))

    # ---- Copies: another inner module, wrapped ---------------------------------------------------

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        state = self._infinitybatch
        return again, (state.inner, state.options, state.methods, _hooks_of(self))

    def __copy__(self: WrappedT) -> WrappedT:
        state = self._infinitybatch
        return again(state.inner, state.options, state.methods, _hooks_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        state = self._infinitybatch
        inner = copy.deepcopy(state.inner, memo)
        if id(self) not in memo:  # the inner module may hold this one
            hooks = copy.deepcopy(_hooks_of(self), memo)
            memo[id(self)] = again(inner, state.options, state.methods, hooks)
        return memo[id(self)]

    # ---- What would lose micro-batches -----------------------------------------------------------

    def __prepare_scriptable__(self) -> Any:
        raise no_program("torch.jit.script")

    def _replicate_for_data_parallel(self) -> Any:
        raise Unsupported(
            "nn.DataParallel cannot copy a wrapped module to several devices: use "
            "DistributedDataParallel(ib.wrap(model))"
        )


def wrapped(
    inner: nn.Module,
    options: dict[str, Any],
    methods: tuple[str, ...],
    agreement: Any,
    view: Any,
    steps: dict[str, _C.Wrap],
    dropped: Dropped,
    returned: Returned,
) -> Any:
    """A module that computes forward and `methods` of `inner` by `steps`."""
    kind = getattr(type(inner), "_infinitybatch_kind", type(inner))
    try:
        module = _subclass.with_state_of(inner, _class_of(kind, methods))
    except TypeError:
        module = _subclass.with_state_of(inner, _class_of(nn.Module, methods))
    state = State(
        inner, options, methods, agreement, view, steps, steps["forward"], dropped, returned
    )
    object.__setattr__(module, "_infinitybatch", state)
    fresh = nn.Module()
    for name in _SLOTS[1:]:
        object.__setattr__(module, name, getattr(fresh, name))
    for name in steps:
        if name in inner.__dict__:
            like = _bound_like(name, getattr(inner, name))
            state.own[name] = types.MethodType(like, module)
    state.like_inner = dict(state.own)
    return module


def unwrap(model: nn.Module) -> nn.Module:
    """The module that `wrap` was given first; `model` itself where `wrap` has not returned it."""
    while isinstance(model, Wrapped):
        model = model._infinitybatch.inner
    return model


def inner_to_wrap(model: nn.Module) -> nn.Module:
    """What wrapping `model` computes: of a wrapped module the inner one, unless methods were set on
    it since (as mixed precision sets forward), which it alone has: then itself, computing plainly."""
    while isinstance(model, Wrapped):
        state = model._infinitybatch
        if state.own != state.like_inner:
            break
        model = state.inner
    return model


def take_hooks(module: Wrapped, before: nn.Module) -> None:
    """`module` calls the hooks that were registered on `before`, and what removes them there."""
    if isinstance(before, Wrapped) and module._infinitybatch.inner is not before:
        for name in _HOOKS:
            object.__setattr__(module, name, getattr(before, name))


def again(
    inner: nn.Module, options: dict[str, Any], methods: tuple[str, ...], hooks: dict[str, Any]
) -> Any:
    from .wrap import make  # makes what this file holds

    module = make(inner, options, methods, None)
    for name, value in hooks.items():
        object.__setattr__(module, name, copy.copy(value))
    return module


# A file of a wrapped module holds these beside the classes of the user. torch.load(weights_only=True)
# may call them, which make a wrapper of what was loaded and nothing else.
torch.serialization.add_safe_globals([again, Offload, TrimPadding])


def _hooks_of(module: Wrapped) -> dict[str, Any]:
    return {name: getattr(module, name) for name in _HOOKS}


def _class_of(kind: type[nn.Module], methods: tuple[str, ...]) -> type:
    """One class for each `kind` and `methods`."""
    known = _subclass.known(kind, Wrapped, methods)
    return known or _subclass.subclass_of(kind, Wrapped, _names(kind, methods), _SLOTS)


def _names(kind: type[nn.Module], methods: tuple[str, ...]) -> dict[str, Any]:
    names: dict[str, Any] = {"_infinitybatch_key": methods}
    for name, method in own_methods(kind):
        names[name] = watched(name, method)
    for name in ("forward", *methods):
        method = in_micro_batches(name, getattr(kind, name, None))
        names[name] = _subclass.Method(name, method)
    for name in ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward"):
        native = getattr(nn.Module, name)
        if getattr(kind, name) is not native:  # runs where the inner module itself is called
            names[name] = native
    if _subclass.is_graph_module(kind):
        names["recompile"] = lambda self: self._infinitybatch.inner.recompile()
    return names


def in_micro_batches(name: str, like: Any) -> Any:
    """A method that computes the inner module's `name`, with the signature of `like`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._infinitybatch
        if type(args) is not tuple or is_compiling() or is_tracing():
            return outside_of_program(call, self, args, kwargs)
        if _C._in_step():  # of another one, which computes micro-batches of all that it calls
            return _plainly(state, name)(*args, **kwargs)
        for value in args:
            if type(value) is not torch.Tensor and is_cache(value):
                return natively(state.inner, name, args, kwargs)
        for value in kwargs.values():
            if type(value) is not torch.Tensor and is_cache(value):
                return natively(state.inner, name, args, kwargs)
        agreement = state.agreement if is_grad_enabled() else None
        if agreement is not None:
            agreement.prepare(state.inner)
        try:
            if not state.accumulates and is_grad_enabled():
                depth = 5 if name == "forward" else 3
                state.accumulates = tell_of_accumulation(kwargs, stacklevel=depth)
            step = state.last = state.steps[name]
            try:
                if state.watch is None:
                    outputs = step.forward(args, kwargs)
                else:
                    with state.watch:
                        outputs = step.forward(args, kwargs)
            except BatchError as error:
                refuse_lists_of_samples(error, args, kwargs)
                return _without_rows(state, name, args, kwargs)
            except (Error, torch.OutOfMemoryError) as error:
                if not state.view.runs_uncompiled_after(error):
                    raise
                outputs = step.forward(args, kwargs)
            except Exception as error:
                explain_lists(error, (args, kwargs))
                raise
            if state.dropped.name and not state.dropped.told:
                # nn.Module has two frames of its own between forward and who calls the module.
                state.dropped.tell(stacklevel=4 if name == "forward" else 2)
            return state.returned.as_natively(outputs, args, kwargs)
        except Exception:
            if agreement is not None:
                agreement.end_failed()
            raise

    # No __wrapped__: who unwraps functions would come upon the inner one, which runs natively.
    call.__name__, call.__doc__ = name, getattr(like, "__doc__", None)
    call.__qualname__ = getattr(like, "__qualname__", name)
    call.__module__ = getattr(like, "__module__", None) or __name__
    try:
        call.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # of C++
        pass
    return call


def _bound_like(name: str, like: Any) -> Any:
    """The method `name` with the signature of what is set on the inner module, and takes no `self`."""
    call = in_micro_batches(name, like)
    if hasattr(call, "__signature__"):
        me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [me, *call.__signature__.parameters.values()]
        call.__signature__ = call.__signature__.replace(parameters=parameters)
    return call


def _without_rows(state: State, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No rows are no micro-batch, but a batch may well have none: it runs natively, whose gradient
    is zero, or no number. Raises otherwise, and where ranks would wait for a backward of ours."""
    leaves, dims, _, spec = _tree.flatten((args, kwargs))
    if any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves):  # a layer of what is traced
        raise no_program("torch.fx.symbolic_trace") from None
    given = state.options["batch_dim"]
    unmarked = given if isinstance(given, int) else 0
    agrees = state.agreement is not None and torch.is_grad_enabled()
    if agrees or not _tree.are_empty(leaves, dims, unmarked):
        raise
    args, kwargs = _tree.unflatten(leaves, spec)
    return _plainly(state, name)(*args, **kwargs)


def _plainly(state: State, name: str) -> Any:
    return state.inner if name == "forward" else getattr(state.inner, name)


__all__ = ["State", "Wrapped", "inner_to_wrap", "take_hooks", "unwrap", "wrapped"]
