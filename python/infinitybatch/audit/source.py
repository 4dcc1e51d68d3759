"""What a loop was given, its loader's batches or the batch of `ib.audit`, and which step they are of."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import _random_state
from ..errors import StateError
from .batches import Given, Join, Loader, join, rows_of
from .calls import Call, Calls
from .losses import Loss
from .matching import Seen, compare
from .rows import Batch
from .step_batches import Groups, StepBatches, consumed, of_calls, of_loader
from .trace import Trace


class Source:
    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        join: Join | None,
        calls: Calls,
        trace: Trace,
        loader: Loader | None,
        batch: Any,
        rows: Batch | None,
    ) -> None:
        self._model = model
        self._loss = loss
        self._join = join
        self._calls = calls
        self._trace = trace
        self._loader = loader
        #: The batch of `ib.audit`, and its rows.
        self._batch = batch
        self._rows = rows

    @property
    def has_loss(self) -> bool:
        """Whether the loss of what was given is known, whatever the model was called with."""
        return self._loss is not None and (self._batch is not None or self._loader is not None)

    @property
    def count(self) -> int:
        """Samples of the batch that ib.audit was given."""
        return 0 if self._batch is None else rows_of(self._batch) or 0

    def missed(self, groups: Groups) -> int:
        """Samples of it which the step never called the model on."""
        seen = sum(call.rows or self.count for group in groups for call in group)
        return max(0, self.count - seen) if all(groups) else 0

    def batches(self, begin: int, groups: Groups, unseen: bool) -> StepBatches:
        """Of the step whose first batch of the loader is number `begin`.

        Args:
            unseen: with the loader's batches that were passed over.
        """
        joined = self._join or join
        if self._loss is None or not self.has_loss:
            return of_calls(groups, self._model, self._loss, joined)
        if self._batch is not None:
            given = [Given(self._batch, _random_state.capture(), 0)]
        else:
            given = self._given(begin, groups, unseen)
            if not given:
                raise StateError(self._no_batch())
        return of_loader(given, groups, self._loss, joined, self.seen(begin, groups, unseen))

    def seen(self, begin: int, groups: Groups, unseen: bool) -> Seen | None:
        """Which rows of the batch the model was called on."""
        if self._rows is not None:
            batches = [self._rows]
        else:
            given = [] if self._loader is None else self._given(begin, groups, unseen)
            batches = [one.rows for one in given if one.rows is not None]
        return compare(batches, [call.columns() for group in groups for call in group])

    def unseen_rows(self, begin: int, groups: Groups) -> Tensor | None:
        """The samples of the loader's batches that were passed over in this step."""
        if self._loader is None or not all(groups):
            return None
        places = self._places(groups)
        unseen = self._passed_over(begin, groups, places) if places else []
        rows = [self._loader.given[place].rows for place in unseen]
        each = [
            torch.arange(r.first, r.first + r.count, device="cpu") for r in rows if r is not None
        ]
        return torch.cat(each) if each else None

    def end(self, begin: int, groups: Groups) -> int:
        """The number of the loader's first batch that belongs to the next step."""
        if self._loader is None:
            return 0
        places = self._places(groups)
        if places:
            return max(begin, self._loader.first + places[-1] + 1)
        end = begin + len(self._given(begin, groups, False)) + self._trace.skipped
        for one in self._loader.given[: max(0, end - self._loader.first)]:
            one.used = True  # rows cannot be followed
        return end

    def note_used(self) -> None:
        """Remembers which batches were used, before calls are forgotten."""
        numbers = _numbers(self._calls.calls)
        for one in self._loader.given if self._loader is not None else ():
            one.used = one.used or _has(one, numbers)

    def _given(self, begin: int, groups: Groups, unseen: bool) -> list[Given]:
        assert self._loader is not None
        places = self._places(groups)
        if places:
            more = self._passed_over(begin, groups, places) if unseen else []
            return [self._loader.given[place] for place in sorted([*places, *more])]
        given = self._loader.given[max(0, begin - self._loader.first) :]
        return consumed(given, groups, self._trace.skipped)

    def _places(self, groups: Groups) -> list[int]:
        """The loader's batches that these calls are known to have rows of."""
        assert self._loader is not None
        numbers = _numbers([call for group in groups for call in group])
        return [p for p, one in enumerate(self._loader.given) if _has(one, numbers)]

    def _passed_over(self, begin: int, groups: Groups, places: list[int]) -> list[int]:
        """The loader's batches of this step that no call has seen, where rows can be followed.

        Those after the last one are read ahead, unless the loop uses the others again in their place.
        """
        assert self._loader is not None
        given = self._loader.given
        used = _numbers(self._calls.calls)
        begin = max(0, begin - self._loader.first)
        apart = torch.cat([_numbers(group).unique() for group in groups])
        is_again = len(apart) > len(apart.unique()) or places[0] < begin
        return [
            p
            for p in range(begin, len(given) if is_again else places[-1])
            if given[p].rows
            and not given[p].used
            and not _has(given[p], used)
            and given[p].epoch >= given[places[0]].epoch
        ]

    def _no_batch(self) -> str:
        assert self._loader is not None
        kind = type(self._loader.loader).__name__
        if self._loader.sees_the_own_loop:
            return (
                f"the loop took no batch out of this {kind}: watch the loader that it iterates over"
            )
        return (
            f"a loop over a {kind} cannot be seen: iterate over the watch's own loader, "
            f"`with ib.audit.watch(...) as watched: for batch in watched.loader:`"
        )


def _numbers(calls: list[Call]) -> Tensor:
    """The samples that these calls are known to have seen, over all of the loader's batches."""
    rows = []
    for call in calls:
        known = [o.rows.reshape(-1) for o in call.origins if o is not None and o.rows is not None]
        rows += known[:1]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device="cpu")


def _has(given: Given, numbers: Tensor) -> bool:
    if given.rows is None:
        return False
    end = given.rows.first + given.rows.count
    return bool(((numbers >= given.rows.first) & (numbers < end)).any())
