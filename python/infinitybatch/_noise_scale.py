"""How large a batch is worth its samples; public as a member of `infinitybatch.callbacks`."""

from typing import Any

from . import _C
from .callbacks import BatchBegin, BatchEnd, Callback, Failure
from .errors import InvalidArgument, InvalidType, Unsupported


class NoiseScale(Callback):
    """Measures the gradient noise scale (McCandlish et al. 2018, the "simple" one) while a trainer
    trains, from the gradients that micro-batches add: no further pass, no copy of a gradient.

        noise = ib.callbacks.NoiseScale()
        trainer = ib.Trainer(..., micro_batch_size=64, callbacks=noise)
        trainer(3)
        noise.largest_useful_batch()        # in samples

    For losses that are sums over samples, of models that do not couple samples. Steps of a single
    micro-batch say nothing and are not counted.

    Args:
        decay: of the averages over steps.

    Raises:
        InvalidArgument: unless 0 <= decay < 1.
        Unsupported: given to a trainer, or at its first step, where samples are coupled.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float):
            raise InvalidType(f"decay must be a number, not {type(decay).__name__}")
        self._meter = _C.NoiseScale(decay)
        self._scale = 1.0  # of a grad_scaler, in the step at work

    def _joined(self, trainer: Any) -> None:
        if isinstance(trainer._batch._step_loss, _C.losses.CoupledLoss):
            raise Unsupported(
                f"NoiseScale needs a loss that is a sum over samples, and "
                f"{trainer._batch._step_loss.name} couples them; declare it with "
                f"ib.losses.separable(sum, denominator) if it is one, or train without NoiseScale"
            )
        if trainer._options["batch_coupling"] == "per_micro_batch":
            raise Unsupported(
                "batch_coupling='per_micro_batch' lets samples of a micro-batch change each other's "
                "gradient, so that NoiseScale would measure something else; train without one of them"
            )
        if trainer._options["trim"] is not None:
            raise Unsupported(
                "trim= sorts rows by length, so that micro-batches are no random samples, which "
                "NoiseScale takes them for; train without one of them"
            )

    @property
    def steps(self) -> int:
        """Steps that were measured."""
        return self._meter.steps

    @property
    def noise_scale(self) -> float:
        """In samples: the trace of the covariance of one sample's gradient over the squared norm of
        the true gradient. Infinite while the gradient cannot be told from noise. Raises StateError
        before the first step of several micro-batches."""
        return self._meter.noise_scale

    def largest_useful_batch(self, efficiency: float = 0.5) -> float:
        """The largest logical batch in which a sample is worth at least `efficiency` of what it is
        worth in a small batch: noise_scale * (1 / efficiency - 1). Raises InvalidArgument unless
        0 < efficiency < 1."""
        if isinstance(efficiency, bool) or not isinstance(efficiency, int | float):
            raise InvalidType(f"efficiency must be a number, not {type(efficiency).__name__}")
        return self._meter.largest_useful_batch(efficiency)

    def on_batch_begin(self, event: BatchBegin) -> None:
        scaler = event.trainer._updates.scaler
        # As the step will use it: a new scaler has no scale until it is asked to scale.
        self._scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._meter.begin()

    def on_batch_end(self, event: BatchEnd) -> None:
        self._meter.end(event.report, self._scale)

    def on_failure(self, event: Failure) -> None:
        self._meter.discard()

    def state_dict(self) -> dict[str, Any]:
        variance, square, steps = self._meter.state()
        return {"variance": variance, "square": square, "steps": steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self._meter.restore(state["variance"], state["square"], state["steps"])
        except (KeyError, TypeError):
            raise InvalidArgument("the state is not one of a NoiseScale") from None
