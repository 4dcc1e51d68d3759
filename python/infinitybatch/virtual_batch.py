"""The step over a logical batch of any size."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn

from . import _C, _batch_dim, _criteria, _options, _tree, _trim
from ._batch_dim import BatchDim
from ._C import BatchSource, Plan, StepReport
from ._C.losses import CoupledLoss, SeparableLoss
from ._model import CallableModel, ModelView
from ._offload import Offload, When
from ._options import MicroBatch
from ._rows import explain_lists, refuse_lists_of_samples
from ._trim import Trim
from .errors import BatchError, Error, InvalidType, Unsupported

#: What to call in place of methods that other steps have.
_INSTEAD = {
    "step": "call batch.backward(inputs, targets), then optimizer.step()",
    "zero_grad": "call optimizer.zero_grad()",
    "forward": "batch.backward(inputs, targets) runs it; keep_outputs=True gives report.outputs",
}


class VirtualBatchOptions(TypedDict, total=False):
    """The keywords of VirtualBatch, for those that pass them on."""

    memory_budget: int | float | str | None
    micro_batch_size: int | None
    micro_batch_tokens: int | None
    trim: Trim | None
    batch_dim: BatchDim | None
    retained_micro_batches: int
    use_tapes: bool
    static_graph: bool
    checkpoint_segments: int | None
    offload: When | Offload
    match_native_rng: bool
    batch_coupling: Literal["exact", "per_micro_batch"]
    keep_outputs: bool
    on_micro_batch: Callable[[MicroBatch], object] | None
    grad_scaler: Any


class VirtualBatch:
    """A training step over a logical batch of any size, inside a memory budget.

    The gradient is the one that the whole batch would have given at once. Your loop keeps
    `zero_grad`, unscaling, clipping and `step`.

        batch = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), memory_budget="8GiB")
        for images, labels in loader:
            optimizer.zero_grad()
            report = batch.backward(images, labels)
            optimizer.step()

    Args:
        model: a torch.nn.Module, or what `make_model` makes of any callable. Called as model(x) for
            one tensor, model(*inputs) for a tuple or list, model(**inputs) for a dict or other
            mapping; instances of any other registered pytree class (named tuples, dataclasses) are
            passed whole.
        loss: a criterion of torch.nn (an instance, or its function of torch.nn.functional, options
            in a functools.partial), called as criterion(*outputs, *targets); a loss of
            `infinitybatch.losses`; or any other callable, called as loss(outputs, targets), or
            loss(outputs), on the whole batch (see `infinitybatch.losses.coupled`).
        memory_budget: what tensors may occupy on the device during `backward`, everything that was
            there before included: bytes, "512MiB", a fraction of the device (0.8) or "auto" (what
            is live plus 90 % of what is free). "auto" if neither this nor `micro_batch_size` is
            given.
        micro_batch_size: samples that are computed at once; skips planning. The last micro-batch
            may be smaller.
        micro_batch_tokens: with `trim`, the positions that are computed at once: a micro-batch has as
            many rows as fit at the length of the longest of them, and a longer row stands alone.
            Beside it `micro_batch_size` is the most rows. Skips planning.
        trim: how padding is marked (see `trim_padding`; a list of them for sequences that are padded
            apart). Rows are sorted by length, and each micro-batch is computed at the length of its
            longest row; losses see the caller's order, and outputs at full length, with zeros where
            padding was cut off. In the first step of a kind some rows are compared with themselves in full.
        batch_dim: along which dimension samples lie in inputs and targets that are not marked
            themselves (`batch_dim`, `shared`); without it along the first. An int is for every
            tensor of which that dimension has the batch's size, so that time-first loops need
            `batch_dim=1` and no more; a dict is by argument, {"source": 1, "mask": None} or
            {0: 1, "targets": 1}, where None is `shared` and all others have their samples first.
            Targets may be [time, batch] flattened, where outputs are.
        retained_micro_batches: with a fixed `micro_batch_size` and a coupled loss or BatchNorm, how
            many micro-batches keep their graph from the first pass and need no second one. Any
            other loss has one pass, and nothing to keep.
        use_tapes: with a coupled loss, whether forwards are recorded, so that the second pass replays
            them. False runs the model again, which gives the same gradient.
        static_graph: you promise that what forward does depends on shapes only, as in DDP: it is
            recorded once for each number of rows, checked on a second micro-batch, and then the
            recording is used again, in later steps too. User code, hooks on modules and Python's
            random numbers are skipped.
        checkpoint_segments: with a fixed `micro_batch_size`, for any loss: the graph of a
            micro-batch is never there as a whole; its recording, or each stretch of it between two
            layers that see the whole batch (BatchNorm), is cut into about as many segments (2 or
            more), which are played again one after the other, last first. A plan for a
            `memory_budget` does so by itself where one sample does not fit.
        offload: what leaves the device while it waits: "auto" (where no plan fits otherwise),
            "always", "never" (one sample that does not fit computes it again instead, in time that
            grows with the square of its depth; of a whole batch some of what waits is computed
            again, one forward more at most), or an `Offload`, which says where to as well. It is
            for what waits at the cuts of recordings (BatchNorm and its like, or one sample that does
            not fit), for outputs that wait for a coupled loss and their gradients after it, and for
            the graphs of `retained_micro_batches`. Under a budget "auto" computes again what waits
            in front of BatchNorm if rehearsals find that faster. With "always" a plan keeps all
            graphs of a coupled loss away from the device, or none, whichever takes less time. Copies
            run while others compute where the budget has room for what two more micro-batches leave
            at a cut, else in turn.
        match_native_rng: whether dropout, rand, randn and their like give the numbers that the whole
            batch's run would draw from the same generator (after the same torch.manual_seed), which
            is left where that run leaves it. What draws in a way whose numbers for the whole batch
            are not known (a fused op, a permutation of the batch) raises CouplingError. Without it
            each micro-batch draws as a batch of its own.
        batch_coupling: "exact" gives layers that combine the samples of a batch (BatchNorm in training)
            the whole batch, or raises CouplingError, as it does where ordinary ops are seen to mix
            samples (x - x.mean(0)); "per_micro_batch" lets each micro-batch be a batch of its own,
            as gradient accumulation does, which is another gradient.
        keep_outputs: return what the model gave for all samples in the report.
        on_micro_batch: called with a MicroBatch after each micro-batch's loss, for metrics that need
            outputs; after a restart it is called again for micro-batches that are computed again.
        grad_scaler: a torch.amp.GradScaler whose scale multiplies the gradients (not the reported
            loss). Call its `step` and `update` as always.

    Raises:
        InvalidType: for a model or loss that cannot be used.
        InvalidArgument: for options out of range.
    """

    @_options.of_virtual_batch
    def __init__(
        self,
        model: nn.Module | CallableModel,
        loss: Any,
        *,
        memory_budget: int | float | str | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        trim: Trim | None = None,
        batch_dim: BatchDim | None = None,
        retained_micro_batches: int = 0,
        use_tapes: bool = True,
        static_graph: bool = False,
        checkpoint_segments: int | None = None,
        offload: When | Offload = "auto",
        match_native_rng: bool = False,
        batch_coupling: Literal["exact", "per_micro_batch"] = "exact",
        keep_outputs: bool = False,
        on_micro_batch: Callable[[MicroBatch], object] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        self._options = _options.checked(locals())
        if isinstance(model, nn.modules.loss._Loss) and isinstance(loss, nn.Module):
            if any(True for _ in loss.parameters()):
                raise InvalidType(
                    f"model is a {type(model).__name__} and loss a {type(loss).__name__} with "
                    f"parameters: they stand the other way round, VirtualBatch(model, loss)"
                )
        self._model = model
        self._loss = loss
        self._view = ModelView(model, batch_coupling == "exact")
        self._step = self._make_step()

    def backward(self, inputs: Any, targets: Any = None) -> StepReport:
        """Adds the gradient of the loss over the whole logical batch to `.grad` of every parameter.

        If anything fails, parameters, `.grad`, buffers and random state are as they were.

        Args:
            inputs: a tensor, a NumPy array, any nested structure of them, or a BatchSource; the
                first dimension is the batch (the option `batch_dim`, and `shared` and
                `batch_dim` around a part of it, say otherwise). It may live on the host with the model on another device.
            targets: likewise, with the same number of samples; None for losses without targets. A
                loss of all outputs is given all of them, which need no rows then: boxes of all
                images [M, 6], a list with a dict for each image.

        Raises:
            BatchError: inputs and targets that cannot be split alike.
            CouplingError: a layer that combines samples, or a buffer that depends on them.
            BudgetExceeded: no plan stays inside the budget.
            StateError: under no_grad; while another step runs on the same model.
            Unsupported: tensor subclasses, inference tensors, models that shard themselves; a coupled
                loss that reads what forward has left on the module, past the outputs.

            And whatever the model, the loss, a hook or a callback raises, as the same object.
        """
        try:
            return self._current_step().backward(_readable(inputs), _readable(targets))
        except BatchError as error:
            refuse_lists_of_samples(error, inputs, targets)
            raise
        except (Error, torch.OutOfMemoryError) as error:
            if self._view.runs_uncompiled_after(error):
                return self.backward(inputs, targets)
            raise
        except Exception as error:
            explain_lists(error, inputs)
            raise

    def plan(self, inputs: Any, targets: Any = None) -> Plan:
        """The plan that `backward` would follow for such a batch.

        Runs micro-batches to measure where none is known yet, and leaves gradients, buffers and
        random state as they were. Takes and raises what `backward` does.
        """
        return self._current_step().plan(_readable(inputs), _readable(targets))

    def _verify(self, inputs: Any, targets: Any, native: Any) -> _C.VerifyReport:
        """See `infinitybatch.verify`."""
        return self._current_step().verify(_readable(inputs), _readable(targets), native)

    def _bench(
        self, inputs: Any, targets: Any, native: Any, rounds: int, seconds: float
    ) -> _C.BenchReport:
        """See `infinitybatch.bench`."""
        batch = (_readable(inputs), _readable(targets))
        return self._current_step().bench(*batch, native, rounds, seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        # So that a model that holds its VirtualBatch can be copied and saved; plans are made anew.
        if isinstance(self._loss, (SeparableLoss, CoupledLoss)):
            raise Unsupported(
                "a VirtualBatch whose loss is made by infinitybatch.losses cannot be copied or "
                "pickled: the loss may hold functions and tensors of the model that it was made "
                "for. Make a VirtualBatch for the copy; with a criterion of torch.nn, or a function "
                "of your own, it can be copied"
            )
        return _rebuild, (self._model, self._loss, self._options)

    if not TYPE_CHECKING:  # which knows what a VirtualBatch has

        def __getattr__(self, name: str) -> Any:
            of_model = not name.startswith("_") and hasattr(nn.Module, name)
            way_out = _INSTEAD.get(name, f"it is the model's, model.{name}" if of_model else "")
            text = f"VirtualBatch has no attribute {name!r}" + (way_out and f": {way_out}")
            raise AttributeError(text, name=name, obj=self)

        def __call__(self, *inputs: Any, **_: Any) -> Any:
            raise InvalidType("a VirtualBatch is not called: write batch.backward(inputs, targets)")

    def __repr__(self) -> str:
        shown = ["memory_budget", "micro_batch_size"]
        options = [f"{k}={self._options[k]!r}" for k in shown if self._options[k] is not None]
        if self._options["batch_coupling"] != "exact":
            options.append("batch_coupling='per_micro_batch'")
        described = ", ".join([type(self._model).__name__, self._step_loss.name, *options])
        return f"VirtualBatch({described})"

    def _make_step(self) -> _C.VirtualBatch:
        self._step_loss = _criteria.resolve(self._loss)
        self._loss_options = _criteria.options_of(self._loss)
        options = dict(self._options)
        scaler = options.pop("grad_scaler")
        options["batch_dim"] = batch_dim_for(self._model, options["batch_dim"])
        options["trim"] = _trim.for_forward(options["trim"], forward_of(self._model), wrapped=False)
        options["loss_scale"] = None if scaler is None else self._scale_of(scaler)
        return _C.VirtualBatch(self._view, self._step_loss, **options)

    def _current_step(self) -> _C.VirtualBatch:
        # A criterion's attributes may change between steps (its weights moved to a device).
        now = _criteria.options_of(self._loss)
        if now is None or all(map(operator.is_, now, self._loss_options or ())):
            return self._step
        if any(
            a is not b and (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b)
            for a, b in zip(now, self._loss_options or (), strict=True)
        ):
            self._step = self._make_step()
        return self._step

    def _scale_of(self, grad_scaler: Any) -> Callable[[], torch.Tensor]:
        # By way of `scale`, so that the scaler makes its tensors where the model is.
        named_parameters = self._model.named_parameters

        def scale() -> torch.Tensor:
            device = next((p.device for _, p in named_parameters()), torch.device("cpu"))
            return grad_scaler.scale(torch.ones((), device=device))

        return scale


def batch_dim_for(model: Any, given: BatchDim | None) -> Any:
    """As C++ takes it, for steps with targets."""
    forward = forward_of(model)
    _batch_dim.check_arguments(given, [forward], also=("targets",))
    return _batch_dim.by_argument(given, forward)


def forward_of(model: Any) -> Any:
    function = model._forward if isinstance(model, CallableModel) else model
    return function.forward if isinstance(function, nn.Module) else function


def _rebuild(model: Any, loss: Any, options: dict[str, Any]) -> VirtualBatch:
    return VirtualBatch(model, loss, **options)


def _readable(value: Any) -> Any:
    """Anything else with a length and slices, as a BatchSource that slices it."""
    kind = type(value)
    if kind in (torch.Tensor, tuple, list, dict) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (torch.Tensor, BatchSource)) or _tree.is_node(value):
        return value
    if _tree.as_tensor(value) is not None:
        return value
    if isinstance(value, torch.utils.data.Dataset):
        raise InvalidType(
            f"{kind.__name__} is a Dataset of single samples; read inputs and targets from it with "
            f"infinitybatch.from_dataset(dataset)"
        )
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return BatchSource(len(value), lambda begin, end: value[begin:end])
    if hasattr(value, "__iter__"):
        raise InvalidType(
            f"{kind.__name__} can be read only from begin to end; make a logical batch of what it "
            f"gives with infinitybatch.from_batches(...)"
        )
    return value
