"""Histories of a training: bounded containers that a trainer fills as it runs.

history = ib.histories.History(outputs=ib.histories.last(8), where="host")
trainer = ib.Trainer(..., callbacks=history)
trainer(200)
value, samples = history.losses[199][-1]
"""

import os
from functools import partial
from typing import Any, Literal

from . import _stores
from ._C import BatchSource
from ._containers import Container, Epoch
from ._join_outputs import Piece, PieceStore, whole
from ._selection import Selection, every, everything, last, reservoir
from .callbacks import BatchBegin, BatchEnd, Callback, EvaluationEnd, MicroBatch
from .errors import InvalidType, Unsupported

__all__ = [
    "Container",
    "Epoch",
    "History",
    "Selection",
    "every",
    "everything",
    "last",
    "reservoir",
]

Where = Literal["device", "host", "disk", "none"]


class History(Callback):
    """Keeps losses, metrics, outputs, inputs and targets of logical batches: `losses[epoch][batch]`.

    Nothing grows beyond what is asked for here. Histories that keep other things elsewhere are
    composed by `+`.

    Args:
        losses: which are kept: `last(n)`, `every(n, at_most=m)`, `reservoir(n, seed=0)`,
            `everything()`, or None for none. An entry is a pair (value, samples), of numbers.
        metrics: of evaluations. `metrics[epochs done][i]` is a dict with "loss" and the metrics'
            names.
        outputs, inputs, targets: likewise; an entry is a whole logical batch, detached. Outputs are
            taken from the step's report where it has them (`keep_outputs=True`), else collected from
            micro-batches.
        where: outputs, inputs and targets wait on the "device" where they are, in "host" memory, on
            "disk", or nowhere ("none"). A memory budget has to have room for those on its device,
            which for a model on the CPU is the host.
        folder: for where="disk"; a temporary one, unless given. A given folder keeps its files.

    Raises:
        InvalidType, InvalidArgument: what cannot be a selection or a place.
    """

    def __init__(
        self,
        *,
        losses: Selection | None = last(1000),  # noqa: B008  frozen
        metrics: Selection | None = last(1000),  # noqa: B008
        outputs: Selection | None = None,
        inputs: Selection | None = None,
        targets: Selection | None = None,
        where: Where = "host",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        numbers = _stores.Store()
        self._losses = _container("losses", losses, numbers)
        self._metrics = _container("metrics", metrics, numbers)
        rows = {"outputs": outputs, "inputs": inputs, "targets": targets}
        stores = {
            name: _stores.make(name, where, folder) if keep else None for name, keep in rows.items()
        }
        self._output_store = PieceStore(stores["outputs"] or numbers)
        if stores["outputs"]:
            stores["outputs"] = self._output_store
        self._rows = {name: _container(name, keep, stores[name]) for name, keep in rows.items()}
        self._collect = _stores.DeviceStore() if where == "device" else _stores.HostStore()
        self._waiting: dict[str, Any] = {}
        self._pieces: list[Piece] = []
        self._reach = 0  # the largest end of a piece
        self._evaluations = (-1, 0)  # in which epoch, and how many there

    @property
    def losses(self) -> Container:
        """`losses[epoch][batch]` is (value, samples)."""
        return self._losses

    @property
    def metrics(self) -> Container:
        """`metrics[epochs done][i]` is what the i-th evaluation then gave."""
        return self._metrics

    @property
    def outputs(self) -> Container:
        """`outputs[epoch][batch]` is what the model gave for the whole logical batch."""
        return self._rows["outputs"]

    @property
    def inputs(self) -> Container:
        """`inputs[epoch][batch]` is what the loader gave."""
        return self._rows["inputs"]

    @property
    def targets(self) -> Container:
        """`targets[epoch][batch]` is what the loader gave."""
        return self._rows["targets"]

    def clear(self) -> None:
        """Empties all containers."""
        for container in (self._losses, self._metrics, *self._rows.values()):
            container.clear()
        self._drop()

    def _drop(self) -> None:
        """Of a batch that did not end."""
        self._waiting = {}
        pieces, self._pieces, self._reach = self._pieces, [], 0
        self._output_store.drop(pieces)

    def listens(self, method: str) -> bool:
        if method == "on_micro_batch" and not self.outputs.stores:
            return False
        return super().listens(method)

    def on_batch_begin(self, event: BatchBegin) -> None:
        self._drop()
        for name in ("inputs", "targets"):
            if self._rows[name].wants:  # a copy before forward could write into it
                self._waiting[name] = self._collect.put(_read(getattr(event, name)))

    def on_micro_batch(self, event: MicroBatch) -> None:
        if not self.outputs.wants:
            return
        begin, end = event.begin, event.end
        if event.samples is not None and not isinstance(event.samples, range):
            if event.trainer._options["keep_outputs"]:
                return
            raise Unsupported(
                "trim= sorts rows by length, and a history joins outputs of micro-batches as they "
                "come; give keep_outputs=True, which returns them in the batch's order"
            )
        if begin < self._reach:
            # After a restart the same rows come again, otherwise split perhaps.
            again = [piece for piece in self._pieces if piece.begin < end and piece.end > begin]
            self._pieces = [piece for piece in self._pieces if piece not in again]
            self._output_store.drop(again)
        self._reach = max(self._reach, end)
        self._pieces.append(self._output_store.piece(begin, end, event.outputs))

    def on_batch_end(self, event: BatchEnd) -> None:
        place = event.epoch, event.batch
        self._losses.add(*place, lambda: (float(event.loss), int(event.samples)))
        for name in ("inputs", "targets"):
            self._rows[name].add(*place, partial(self._waiting.pop, name), is_copy=True)
        given = event.report.outputs if self.outputs.wants and event.report else None
        if given is not None:
            self.outputs.add(*place, lambda: given)
        else:
            self.outputs.add(*place, lambda: self._take_pieces(event.samples), is_copy=True)
        self._drop()

    def _take_pieces(self, samples: int) -> list[Piece]:
        pieces = whole(self._pieces, samples)
        self._pieces = []
        return pieces

    def on_failure(self, event: Any) -> None:
        self._drop()

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        epoch, count = self._evaluations
        count = count + 1 if epoch == event.epoch else 0
        self._evaluations = event.epoch, count
        self._metrics.add(
            event.epoch,
            count,
            lambda: {"loss": float(event.loss), **_stores.HostStore().put(dict(event.metrics))},
        )

    def state_dict(self) -> dict[str, Any]:
        """Losses and metrics; outputs, inputs and targets stay where they are."""
        return {
            "losses": self._losses.state_dict(),
            "metrics": self._metrics.state_dict(),
            "evaluations": list(self._evaluations),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self._losses.load_state_dict(state["losses"])
        self._metrics.load_state_dict(state["metrics"])
        self._evaluations = tuple(state["evaluations"])

    def __repr__(self) -> str:
        all = (self._losses, self._metrics, *self._rows.values())
        return f"History({'; '.join(repr(one) for one in all if one.stores)})"


def _container(name: str, keep: Any, store: _stores.Store | None) -> Container:
    if keep is not None and not isinstance(keep, Selection):
        raise InvalidType(
            f"{name} is {keep!r}, which does not say which entries are kept: "
            f"{name}=ib.histories.last(100)"
        )
    return Container(name, keep or last(1), store if keep else None)


def _read(value: Any) -> Any:
    return value.rows(0, len(value)) if isinstance(value, BatchSource) else value
