"""Hugging Face's Trainer with whole optimizer batches inside a memory budget.

    from infinitybatch.transformers import Trainer

    trainer = Trainer(model, arguments, train_dataset=data, memory_budget="8GiB")
    trainer.train()

Needs transformers: `pip install infinitybatch[transformers]`. See docs/recipes/transformers.md.
"""

from typing import Any

import torch
import transformers
from torch import nn

from . import losses
from ._C import shared
from ._model_losses import ITEMS, Shares
from ._window_pieces import padded_alike
from .errors import InvalidArgument, Unsupported
from .sources import join_pieces
from .virtual_batch import VirtualBatch, VirtualBatchOptions
from .wrap import Wrapped, wrap

_FOR_EVALUATION = ("memory_budget", "micro_batch_size")
_OPTIONS = [
    n for n in VirtualBatchOptions.__annotations__ if n not in ("grad_scaler", "keep_outputs")
]


class TrainerMixin:
    """Makes one logical batch of the batches of an optimizer step; stands before a Trainer class.

        class MyTrainer(TrainerMixin, transformers.Seq2SeqTrainer): ...

    The gradient is the one that the Trainer itself computes with gradient_accumulation_steps=1 and
    all samples in one batch. Clipping, schedules, mixed precision, logs and checkpoints stay the
    Trainer's. Evaluation runs under the same budget.

    Args:
        stream_loss: whether `compute_loss` gives a sum over samples divided by `num_items_in_batch`,
            or a mean over samples or labels, so that each micro-batch can compute its share. None:
            yes for a model's own loss and for label smoothing, no for `compute_loss_func` and a
            `compute_loss` of your own, which see the outputs of the whole batch.
        memory_budget, micro_batch_size, ...: options of `VirtualBatch`.

    Raises:
        InvalidArgument, InvalidType: options that cannot be used; a wrapped model.
        Unsupported: several processes or devices, LOMO; and when training begins, a model whose own
            loss is no sum or mean over samples.
        BatchError: batches of one step that cannot be joined.
    """

    def __init__(self, *args: Any, stream_loss: bool | None = None, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        VirtualBatch(nn.Identity(), nn.MSELoss(), **options)  # raises for what is no option
        super().__init__(*args, **kwargs)
        self._infinitybatch = _Steps(self, options, stream_loss)

    @property
    def last_report(self) -> Any:
        """What the last optimizer batch did, a StepReport or WrapReport; None before."""
        return self._infinitybatch.report

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._infinitybatch.begin(len(found[0]))
        return found

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, *_: Any
    ) -> torch.Tensor:
        return self._infinitybatch.step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        model = self._infinitybatch.evaluating(model, inputs)
        return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with whole optimizer batches inside a memory budget. See TrainerMixin."""


class _Steps:
    """What a Trainer with the mixin does instead."""

    def __init__(self, trainer: Any, options: dict[str, Any], stream_loss: bool | None) -> None:
        _refuse(trainer)
        self._trainer = trainer
        self._options = options
        own = type(trainer).compute_loss is not transformers.Trainer.compute_loss
        self._streams = (
            not (own or trainer.compute_loss_func) if stream_loss is None else stream_loss
        )
        self._of_outputs = own or trainer.compute_loss_func or trainer.label_smoother is not None
        self._pieces: list[Any] = []
        self._expected = 1
        self._shares: Shares | None = None
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
        return (
            self._streamed(model, padded, items)
            if self._streams
            else self._whole(model, padded, items)
        )

    def _streamed(self, model: nn.Module, pieces: list[Any], items: Any) -> torch.Tensor:
        accelerator = self._trainer.accelerator
        if self._batch is None or self._shares is None or self._shares.model is not model:
            self._shares = self._shares_of(model)
            own = losses.separable(lambda share, _: share, None)
            self._batch = VirtualBatch(
                self._shares, own, grad_scaler=accelerator.scaler, **self._options
            )
        self._shares.train()
        more = self._shares.prepare(pieces, items)
        marked = [
            {name: _marked(value) for name, value in {**piece, **more}.items()} for piece in pieces
        ]
        self.report = self._batch.backward(join_pieces(marked))
        return self.report.loss.to(self._trainer.args.device)

    def _whole(self, model: nn.Module, pieces: list[Any], items: Any) -> torch.Tensor:
        trainer = self._trainer
        wrapped = self._wrapped_of("training", model, self._options)
        whole = pieces[0]
        if len(pieces) > 1:
            whole = {name: _joined([piece[name] for piece in pieces]) for name in whole}
        before, native = wrapped.last_report, trainer.model_wrapped
        trainer.model_wrapped = wrapped  # sentence-transformers puts this one into its losses
        try:
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(wrapped, whole, num_items_in_batch=items)
        finally:
            trainer.model_wrapped = native
        if wrapped.last_report is before:
            raise Unsupported(
                f"{type(trainer).__name__}.compute_loss does not call the model that it is given, so "
                f"nothing keeps the memory budget: compute outputs = model(**inputs) in it"
            )
        trainer.accelerator.backward(loss)
        self.report = wrapped.last_report
        return loss.detach()

    def evaluating(self, model: nn.Module, inputs: Any) -> nn.Module:
        """A model for the Trainer's own `prediction_step`, computed in micro-batches."""
        names = self._trainer.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        options = {n: self._options[n] for n in _FOR_EVALUATION if n in self._options}
        if self._of_outputs or not has_labels:
            return self._wrapped_of("outputs", model, options)
        return self._wrapped_of("own loss", model, options)

    def _shares_of(self, model: nn.Module) -> Shares:
        half = (torch.float16, torch.bfloat16)
        rough = self._trainer.accelerator.mixed_precision != "no"
        rough = rough or any(parameter.dtype in half for parameter in model.parameters())
        return Shares(model, self._trainer.compute_loss, rough)

    def _wrapped_of(self, use: str, model: nn.Module, options: dict[str, Any]) -> Any:
        known, wrapped = self._wrapped.get(use, (None, None))
        if known is not model:
            if use == "own loss":
                wrapped = _Evaluation(self._shares_of(model), options)
            else:
                wrapped = wrap(model, **options)
            self._wrapped[use] = (model, wrapped)
        return wrapped


class _Evaluation(nn.Module):
    """A model that returns its own loss, in micro-batches; for batches that come one by one."""

    def __init__(self, shares: Shares, options: dict[str, Any]) -> None:
        super().__init__()
        shares.with_outputs = True
        self._shares = shares.eval()
        self._wrapped = wrap(shares, reduce="sum", **options)

    def forward(self, **inputs: Any) -> Any:
        items = inputs.pop(ITEMS, None)
        return self._wrapped(**inputs, **self._shares.prepare([inputs], items))


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
    if (
        args.world_size > 1
        or args.n_gpu > 1
        or trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
    ):
        raise Unsupported(
            f"infinitybatch's Trainer works on one device in one process, and finds "
            f"{args.world_size} processes of {args.n_gpu} devices each: use "
            f"transformers.Trainer(ib.wrap(model), ...), or set CUDA_VISIBLE_DEVICES=0"
        )
    if "lomo" in args.optim:
        raise Unsupported(
            f"optim={str(args.optim.value)!r} steps during backward, before the gradient of the whole batch is "
            f'there: use another, optim="adafactor" for little memory'
        )


def _pad_token_id(trainer: Any) -> int | None:
    places = (trainer.processing_class, getattr(trainer.model, "config", None))
    return next((p for x in places if (p := getattr(x, "pad_token_id", None)) is not None), None)
