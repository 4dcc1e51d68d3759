"""The optimizer steps of a Trainer with `infinitybatch.transformers.TrainerMixin`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import nn

from . import losses
from ._C import shared
from ._model_losses import ITEMS, Shares
from ._window_pieces import padded_alike
from .errors import BatchError, CouplingError, InvalidArgument, Unsupported
from .sources import join_pieces
from .virtual_batch import VirtualBatch
from .wrap import Wrapped, wrap

#: Of the options of a Trainer those that say something of a forward alone.
_FOR_EVALUATION = ("memory_budget", "micro_batch_size")


class Steps:
    """What a Trainer with the mixin does in place of its own steps."""

    def __init__(self, trainer: Any, options: dict[str, Any], stream_loss: bool | None) -> None:
        _refuse(trainer)
        self._trainer = trainer
        self._options = options
        own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
        self._streams = (
            not (own or trainer.compute_loss_func) if stream_loss is None else stream_loss
        )
        self._promised = bool(stream_loss)
        self._of_outputs = own or trainer.compute_loss_func or trainer.label_smoother is not None
        self._pieces: list[Any] = []
        self._expected = 1
        self._shares: Shares | None = None
        self._no_mean: Unsupported | None = None  # what the model's own loss turned out to be
        self._batch: VirtualBatch | None = None
        self._wrapped: dict[str, tuple[nn.Module, Any]] = {}
        self.report: Any = None

    def begin(self, pieces: int) -> None:
        """An optimizer step of so many batches."""
        self._pieces, self._expected = [], pieces

    def step(self, model: nn.Module, inputs: Any, items: Any) -> torch.Tensor:
        """The loss of the whole batch with its last piece, 0 with each before."""
        trainer = self._trainer
        self._pieces.append(trainer._prepare_inputs(inputs))
        if len(self._pieces) < self._expected:
            return torch.zeros((), device=trainer.args.device)
        pieces, self._pieces = self._pieces, []
        model.train()
        if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers
            trainer.optimizer.train()
        padded = padded_alike(
            pieces,
            _pad_token_id(trainer),
            getattr(trainer.processing_class, "padding_side", "right"),
        )
        if items is not None:
            items = torch.as_tensor(items, device=trainer.args.device)
        if not self._streams:
            return self._whole(model, padded, items)
        try:
            if self._no_mean is None:
                more = self._shares_in(model).prepare(padded, items)
        except Unsupported as error:
            if self._promised:
                raise
            self._no_mean = error
        if self._no_mean is None:
            return self._streamed(padded, more)
        return _as_one(lambda: self._whole(model, padded, items), self._no_mean)

    def _shares_in(self, model: nn.Module) -> Shares:
        if self._batch is None or self._shares is None or self._shares.model is not model:
            self._shares = self._shares_of(model)
            own = losses.separable(lambda share, _: share, None)
            scaler = self._trainer.accelerator.scaler
            self._batch = VirtualBatch(self._shares, own, grad_scaler=scaler, **self._options)
        self._shares.train()
        return self._shares

    def _streamed(self, pieces: list[Any], more: dict[str, Any]) -> torch.Tensor:
        marked = [
            {name: _marked(value) for name, value in {**piece, **more}.items()} for piece in pieces
        ]
        assert self._batch is not None
        self.report = self._batch.backward(join_pieces(marked))
        return self.report.loss.to(self._trainer.args.device)

    def _whole(self, model: nn.Module, pieces: list[Any], items: Any) -> torch.Tensor:
        trainer = self._trainer
        wrapped = self._wrapped_of("training", model, self._options)
        whole = pieces[0]
        if len(pieces) > 1:
            whole = {name: _joined([piece[name] for piece in pieces]) for name in whole}
        before = wrapped.last_report
        try:
            with self._offered(wrapped), trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(wrapped, whole, num_items_in_batch=items)
        except BatchError as error:
            if "reduce=" not in str(error):
                raise
            raise BatchError(
                f"{type(trainer).__name__} computes its loss from a number that the model gives for a "
                f"whole batch (outputs.loss): compute it from outputs with one row for each sample, or "
                f"give stream_loss=True where it is a sum or a mean over samples"
            ) from error
        if wrapped.last_report is before:
            raise Unsupported(
                f"{type(trainer).__name__}.compute_loss does not call the model that it is given, so "
                f"nothing keeps the memory budget: compute outputs = model(**inputs) in it"
            )
        trainer.accelerator.backward(loss)
        self.report = wrapped.last_report
        return loss.detach()

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module, inputs: Any) -> Iterator[nn.Module]:
        """A model for the Trainer's own `prediction_step`, computed in micro-batches."""
        names = self._trainer.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        options = {n: self._options[n] for n in _FOR_EVALUATION if n in self._options}
        use = "outputs" if self._of_outputs or not has_labels else "own loss"
        wrapped = self._wrapped_of(use, model, options)
        with self._offered(wrapped):
            yield wrapped

    @contextlib.contextmanager
    def _offered(self, wrapped: nn.Module) -> Iterator[None]:
        """sentence-transformers puts the Trainer's `model_wrapped` into losses that hold a model."""
        trainer = self._trainer
        before, trainer.model_wrapped = trainer.model_wrapped, wrapped
        try:
            yield
        finally:
            trainer.model_wrapped = before

    def _shares_of(self, model: nn.Module) -> Shares:
        half = (torch.float16, torch.bfloat16)
        rough = self._trainer.accelerator.mixed_precision != "no"
        rough = rough or any(parameter.dtype in half for parameter in model.parameters())
        return Shares(model, self._trainer.compute_loss, rough)

    def _wrapped_of(self, use: str, model: nn.Module, options: dict[str, Any]) -> Any:
        known, wrapped = self._wrapped.get(use, (None, None))
        if known is not model:
            if use == "own loss":
                wrapped = _Evaluation(self._shares_of(model), wrap(model, **options), options)
            else:
                wrapped = wrap(model, **options)
            self._wrapped[use] = (model, wrapped)
        return wrapped


class _Evaluation(nn.Module):
    """A model that returns its own loss, in micro-batches; for batches that come one by one."""

    def __init__(self, shares: Shares, whole: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        shares.with_outputs = True
        self._shares = shares.eval()
        self._wrapped = wrap(shares, reduce="sum", **options)
        self._whole = whole

    def forward(self, **inputs: Any) -> Any:
        items = inputs.pop(ITEMS, None)
        try:
            more = self._shares.prepare([inputs], items)
        except Unsupported as error:
            if items is not None:
                inputs[ITEMS] = items
            return _as_one(lambda: self._whole(**inputs), error)
        return self._wrapped(**inputs, **more)


def _as_one(run: Callable[[], Any], no_mean: Unsupported) -> Any:
    """A loss that cannot be divided is native's where the batch is one micro-batch."""
    try:
        return run()
    except (BatchError, CouplingError, Unsupported) as error:
        raise no_mean from error


def _marked(value: Any) -> Any:
    """Numbers in tensors are of the whole batch."""
    return shared(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _joined(values: list[Any]) -> Any:
    is_rows = isinstance(values[0], torch.Tensor) and values[0].dim()
    return torch.cat(values) if is_rows else values[0]


def _refuse(trainer: Any) -> None:
    """What would not be exact, or has not been tried."""
    args = trainer.args
    if isinstance(trainer.model, Wrapped):
        raise InvalidArgument(
            "model is wrapped already: Trainer(ib.unwrap(model), ..., memory_budget=...), or "
            "transformers.Trainer(model, ...)"
        )
    if args.world_size > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise Unsupported(
            f"infinitybatch's Trainer works in one process, without DeepSpeed or FSDP, and finds "
            f"{args.world_size}: use transformers.Trainer(ib.wrap(model), ...)"
        )
    if args.n_gpu > 1:
        raise Unsupported(
            f"infinitybatch's Trainer works on one device, and finds {args.n_gpu}: "
            f"set CUDA_VISIBLE_DEVICES=0"
        )
    if "lomo" in args.optim:
        raise Unsupported(
            f"optim={str(args.optim.value)!r} steps during backward, before the gradient of the whole "
            f'batch is there: use another, optim="adafactor" for little memory'
        )


def _pad_token_id(trainer: Any) -> int | None:
    places = (trainer.processing_class, getattr(trainer.model, "config", None))
    return next((p for x in places if (p := getattr(x, "pad_token_id", None)) is not None), None)


__all__ = ["Steps"]
