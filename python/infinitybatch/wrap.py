"""A module that is computed micro-batch by micro-batch, for training loops that stay as they are."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import distributed, nn

from . import _C, _batch_dim, _options, _trim
from ._agreement import Agreement
from ._batch_dim import BatchDim
from ._caches import Dropped
from ._model import ModelView
from ._offload import Offload, When
from ._options import MicroBatch
from ._packed import keep_longest
from ._returned import Returned
from ._trim import Trim
from ._wrapped import Wrapped, inner_to_wrap, take_hooks, unwrap, wrapped
from .errors import InvalidArgument, InvalidType


@_options.of_wrap
def wrap(
    model: nn.Module,
    *,
    memory_budget: int | float | str | None = None,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    trim: Trim | None = None,
    batch_dim: BatchDim | None = None,
    retained_micro_batches: int = 0,
    use_tapes: bool = True,
    static_graph: bool = False,
    match_native_rng: bool = False,
    batch_coupling: Literal["exact", "per_micro_batch"] = "exact",
    offload: When | Offload = "auto",
    on_micro_batch: Callable[[MicroBatch], object] | None = None,
    reduce: Literal["sum", "mean"] | None = None,
    output_batch_dim: int | None = None,
    methods: tuple[str, ...] = (),
    process_group: "distributed.ProcessGroup | None" = None,
) -> Wrapped:
    """`model` with a forward that is computed micro-batch by micro-batch, exact under any loss.

    The outputs carry one graph node for the whole batch; the loop stays as it is.

        model = ib.wrap(model, memory_budget="8GiB")
        criterion(model(images), labels).backward()

    The module returned is an instance of `model`'s class, too, and shares its state: optimizers,
    hooks, `state_dict` and checkpoints see the same names, methods and attributes are the same.
    `unwrap` returns `model`. Of a module that is wrapped already the inner one is wrapped, with the
    options given now; a wrapped module inside of `model`, or of another one that `VirtualBatch` and
    its like compute in micro-batches, runs plainly as a part of it. Forward takes any nested structure: every
    tensor is split along its first dimension (the option `batch_dim`, and `shared` and `batch_dim`
    around an argument, say otherwise); tensors of
    dimension 0 and whatever is no tensor are seen whole. With DistributedDataParallel the order is
    DDP(ib.wrap(model, process_group=torch.distributed.group.WORLD)).

    BatchNorm in training mode and other ops of the whole batch see all samples, and running
    statistics are written once in each call. Forward goes from one such layer to the next with all
    micro-batches; what each of them was given waits until backward, which goes the same way back,
    and may be offloaded to host or disk meanwhile.
    The first call runs the forward of its first micro-batch up to four times to make sure that this
    is exact.

    With a budget, which is "auto" where nothing else is given, the fastest micro-batch size that
    fits is found by trying sizes in the first forward with a new kind of batch, which is undone;
    as many samples as fit keep their graph and need no second forward. What the loss needs is
    seen in the first step, which leaves half of the room for it. Several calls before backward
    share the budget. Without gradients (no_grad) only the forward has to fit. The limit is enforced
    on the CPU, during forward and during backward. `last_report` of the module returned says what
    the last call did.

    Several threads may call the module where nothing but a size was given, and no `offload="always"`;
    one at a time runs backward through the outputs, and any other raises StateError, for gradients
    end where the parameters are. With a budget, and offloaded, forward is for one thread at a time
    too. Transforms of torch.func and forward-mode AD see nothing of micro-batches: Unsupported.

    Whatever is no tensor has to mean the same for all samples: a list with one entry for each of
    them raises BatchError rather than be seen whole (see `shared`), and so does a number among the
    outputs that is not the same for every micro-batch.

    What forward leaves beside its outputs (features in an attribute, what a hook keeps) is that of
    the whole batch to read, where it has a row for each sample, and an error in backward. Warns
    (LeftTensorNotice, IB102) of what cannot be joined like that: whoever reads it finds the last
    micro-batch's alone; and of a cache of a language model among the outputs, which is left out
    (DroppedCacheNotice, IB104).

    Args:
        model: a torch.nn.Module.
        memory_budget: what tensors may occupy on the model's device, in bytes or as "512MiB", 0.8
            (of the device) or "auto", what is live and nine tenths of what is free. What is
            allocated between forward and backward, by the loss above all, counts as what is there.
            A size given beside it is kept to, or BudgetExceeded is raised.
        micro_batch_size: samples that are computed at once; the last micro-batch may be smaller.
            Without `memory_budget` nothing else limits memory, and a batch of one micro-batch runs
            natively.
        micro_batch_tokens: with `trim`, the positions that are computed at once: a micro-batch has as
            many rows as fit at the length of the longest of them, and a longer row stands alone.
            Beside it `micro_batch_size` is the most rows. Skips planning.
        trim: how padding is marked (see `trim_padding`; a list of them for sequences that are padded
            apart). Rows are sorted by length, and each micro-batch is computed at the length of its
            longest row; outputs have the caller's order and their full length, with zeros where
            padding was cut off. In the first step of a kind some rows are compared with themselves in full.
        batch_dim: along which dimension samples lie in the arguments that are not marked themselves
            (`batch_dim`, `shared`); without it along the first. An int is for every tensor of which
            that dimension has the batch's size, which the first tensor tells: hidden states of
            [layers, batch, features] are split, masks of [time, time] are shared, and what is not
            clear raises BatchError. A dict is by argument, {"source": 1, "mask": None} or {0: 1},
            where None is `shared` and all others have their samples first.
        retained_micro_batches: with a given `micro_batch_size`, how many micro-batches, the last
            ones, keep their graph until backward and need no second forward: none where layers see
            the whole batch. A plan for a `memory_budget` keeps as many as fit.
        use_tapes: whether forwards are recorded, so that second forwards replay them. False runs the
            model again, which gives the same gradient; where layers see the whole batch recordings
            are replayed all the same.
        batch_coupling: "exact" lets layers that combine the samples of a batch (BatchNorm in training,
            `across_batch`) see the whole of it, and raises CouplingError where that is not
            possible, or where ordinary ops are seen to combine samples (x - x.mean(0));
            "per_micro_batch" lets each micro-batch be a batch of its own.
        match_native_rng: whether dropout, rand, randn and their like give the numbers that the whole
            batch's own forward draws, whatever the sizes of micro-batches, and leave generators
            where it leaves them: as `VirtualBatch` does it, with the same limits. Models that draw
            go from draw to draw, as they do from one BatchNorm to the next.
        static_graph: you promise that what forward does depends on shapes only, as in DDP: it is
            recorded once for each number of rows, checked on a second micro-batch, and then its tape
            is used again, in later calls too: your code, hooks on modules and Python's random
            numbers are skipped. A forward that is another program raises Unsupported, as far as it
            runs at all. Batches of one micro-batch run natively, where nothing but a size was given.
        offload: what leaves the device while it waits for BatchNorm and its like, and for backward:
            "auto" (where no size fits the budget otherwise), "always", "never" (BudgetExceeded), or
            an `Offload`, which says where to as well; all calls share it. Of other models the graphs
            of `retained_micro_batches` leave; with "always" a plan for a `memory_budget` keeps all
            graphs away from the device, in place of second forwards, as long as there is room for
            them. Copies run while others compute where nothing but a size was given, or where the
            budget has room; else in turn. With it one thread at a time may use the module.
        on_micro_batch: called with a MicroBatch, whose targets are None, after each micro-batch's
            forward; where a call begins again it is called again for micro-batches that are computed
            again.
        reduce: what an output that is one number for each micro-batch is: a "sum" or a "mean" over
            samples. A cross entropy that forward returns as it is need not be said: its mean is joined
            by the targets that count, whatever is ignored. Without it other such outputs raise
            BatchError, unless they are the same for any samples (a temperature, a penalty): these
            stand once, as natively, whatever `reduce` says.
        output_batch_dim: the dimension of outputs along which samples lie, where several could be
            it (by default the one whose size follows the micro-batch's).
        methods: names of more methods that are computed as forward is, ("encode",): on the whole
            batch in micro-batches, with a plan and knowledge of their own. Other methods run on the
            module returned, so that `self(x)` in them is computed in micro-batches; one that calls
            submodules instead runs natively, and warns once (UnwrappedMethodNotice, IB105).
        process_group: whose ranks meet in front of each forward with gradients, and at the end of
            each backward before DistributedDataParallel sees a gradient. Where forward, loss or
            backward failed on one, that one raises its error and the others StateError, and none
            waits. All ranks have to run both equally often: evaluate under no_grad. Copies and
            pickles of the module have none.

    Raises:
        InvalidType: for anything but a module.
        InvalidArgument: for options out of range, or that contradict each other.

        From forward: BatchError, CouplingError, Unsupported as VirtualBatch.backward, BudgetExceeded
        where no size stays inside the budget, and whatever the model raises; buffers and random
        state are as before then. From both: OffloadError where host and disk have no room for what
        is offloaded. From backward: StateError where parameters or inputs were changed in place since
        forward; Unsupported for create_graph=True in several micro-batches, or where forward cannot be
        repeated; BudgetExceeded where the loss has left too little, or has itself passed the budget
        while no graph was kept: gradients are as before then.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InvalidType(
            f"model is the class {model.__name__} itself; give an instance: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}")
    options = _options.checked(locals())
    agreement = None if process_group is None else Agreement(process_group)
    names = _methods_of(model, methods)
    if isinstance(model, Wrapped):  # a notebook's cell that is run once more, say
        names = tuple(sorted({*names, *model._infinitybatch.methods}))
    module = make(inner_to_wrap(model), options, names, agreement)
    take_hooks(module, model)
    return module


def make(
    model: nn.Module,
    options: dict[str, Any],
    methods: tuple[str, ...],
    agreement: Agreement | None,
) -> Wrapped:
    """A wrapped module of checked options."""
    dropped, returned = Dropped(), Returned()
    all_methods = [getattr(model, name) for name in ("forward", *methods)]
    _batch_dim.check_arguments(options["batch_dim"], all_methods)

    def runs(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            outputs = method(*arguments, **keywords)
            returned.note(outputs, arguments, keywords)
            if type(outputs) is torch.Tensor or _C._sees_all():
                return outputs
            keep_longest(outputs, (*arguments, *keywords.values()))
            return dropped.out_of(outputs)

        return run

    def late(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(model, name)(*args, **kwargs)

    view = ModelView(model, options["batch_coupling"] == "exact")

    def step_of(name: str, forward: Callable[..., Any]) -> _C.Wrap:
        own = _batch_dim.by_argument(options["batch_dim"], getattr(model, name))
        trim = _trim.for_forward(options["trim"], getattr(model, name), wrapped=True)
        return _C.Wrap(view, forward, agreement, **{**options, "batch_dim": own, "trim": trim})

    steps = {name: step_of(name, runs(late(name))) for name in methods}
    steps["forward"] = step_of("forward", runs(model))
    return wrapped(model, options, methods, agreement, view, steps, dropped, returned)


def _methods_of(model: nn.Module, methods: Any) -> tuple[str, ...]:
    if not isinstance(methods, (tuple, list)) or not all(isinstance(n, str) for n in methods):
        raise InvalidType(f'methods must be a tuple of names, ("encode",), not {methods!r}')
    for name in methods:
        if not callable(getattr(type(model), name, None)) or hasattr(nn.Module, name):
            raise InvalidArgument(
                f"methods names {name!r}, which is no method that {type(model).__name__} has "
                f"beside forward and those of nn.Module"
            )
    return tuple(sorted(set(methods)))


__all__ = ["Wrapped", "unwrap", "wrap"]
