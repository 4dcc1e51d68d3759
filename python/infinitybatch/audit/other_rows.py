"""Whether the micro-batches were the batch that was given: its rows, each as often as the others."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from .. import _tree
from . import causes
from .calls import Call
from .causes import cause
from .diagnosis import Examination, Right
from .experiment import Micro
from .gradients import error
from .matching import Seen, repeats
from .report import AuditReport, Cause

#: Causes that are seen to happen, whatever the rows.
_EVIDENT = {c[0] for c in (causes.STALE, causes.ZEROED, causes.CLIPPED, causes.CHANGED)}


def judge(
    report: AuditReport,
    examination: Examination,
    seen: Seen | None,
    groups: list[list[Call]],
    is_given: bool,
) -> tuple[AuditReport, AuditReport | None]:
    """The report on what the model saw, corrected where that is not the batch; and what it says
    instead if the step was early and the other rows come later.

    Args:
        is_given: whether the report already compares with the loss of the batch as it was given.
    """
    calls = [call for group in groups for call in group]
    if report.ok and len({call.conditions.modes for call in calls}) > 1:
        return _undecided(examination, report, _MODES), None
    if seen is None:
        count = repeats([call.columns() for call in calls]) if report.ok and len(calls) > 1 else 0
        if count:
            return _undecided(examination, report, _REPEATED), None
        return (replace(report, notes=(*report.notes, _NO_BATCH)) if report.ok else report), None
    if not seen.is_known:
        return (_undecided(examination, report, _UNKNOWN) if report.ok else report), None
    found = _Rows(seen, calls, examination)
    if report.ok and (why := found.doubt()):
        return _undecided(examination, report, why), None
    if seen.is_whole and not (is_given and seen.unlike_inputs):
        changes = "" if is_given else found.changes()
        if changes == "apart" and report.ok:
            return _undecided(examination, report, _APART), None
        if changes != "combined":
            return report, None
        what = [cause(causes.MODEL_COUPLES, module=_LOOP, sizes=causes.brief(_sizes(seen)))]
        early = False
    else:
        what = [found.cause()]
        early = bool(seen.missing) and not (seen.repeated or seen.foreign or seen.mispaired)
    if is_given:
        kept = [c for c in report.causes if c.code in _EVIDENT]
        return _both(examination, report, what, kept, early, seen)
    right = found.whole()
    if right is None:
        if report.ok:
            return _undecided(examination, report, f"{what[0].says}; {_UNBUILT}"), None
        return examination.report("wrong", examination.right, [*what, *report.causes]), None
    if error(examination.window.reached, right.gradient) <= right.allowed:
        return examination.report("right", right), None
    kept = [c for c in report.causes if c.code not in ("unknown", causes.EARLY[0])]
    examination.right = right
    return _both(examination, report, what, kept, early, seen)


_LOOP = "what your loop does to its batch before it calls the model"
_UNKNOWN = (
    "none of the rows that the model saw is in the batch that was given, so it is not known whether "
    "they are its rows: give loss=, which is computed on the batch itself"
)
_MODES = (
    "modules were in training mode for some micro-batches and in evaluation mode for others, which "
    "no whole batch is: call model.train() once, before the first one"
)
_MIXED = (
    "your loop makes each row that the model sees of several samples (mixup), so what the whole batch "
    "would be is not known: give loss="
)
_APART = (
    "what your loop does to its slices before it calls the model hangs on numbers that are other ones "
    "for each slice, as a mean of its own is: compute them once, or give loss="
)
_UNLIKE = (
    "{count} rows have an input of another sample beside the first one (negatives?), so what the whole "
    "batch would be is not known: give loss="
)
_LOST_TARGET = (
    "the targets are neither the batch's nor made of them by torch's operations, so it is not known "
    "whose they are: give loss=, which is computed on the batch itself"
)
_NO_BATCH = (
    "rows were not compared with a batch, for no loader or batch of tensors was given: the whole batch "
    "is what the model was called with"
)
_REPEATED = (
    "the model saw the same rows in several micro-batches, and no batch was given to compare with: "
    "give the loader, watch(model, optimizer, loader), or the batch, ib.audit(step, model, batch)"
)
_UNBUILT = (
    "the whole batch's gradient cannot be computed from what was given: give loss=, which is "
    "computed on the batch itself"
)


def _sizes(seen: Seen) -> list[int]:
    return [0 if call is None else len(call) for call in seen.calls]


def _undecided(examination: Examination, report: AuditReport, why: str) -> AuditReport:
    examination.notes.append(why)
    return examination.report("undecided", examination.right)


def _both(
    examination: Examination,
    report: AuditReport,
    what: list[Cause],
    kept: list[Cause],
    early: bool,
    seen: Seen,
) -> tuple[AuditReport, AuditReport | None]:
    result = examination.report("wrong", examination.right, [*what, *kept])
    if not early:
        return result, None
    rows = len(seen.numbers)
    stepped = cause(causes.EARLY, seen=rows - len(seen.missing), rows=rows)
    return result, examination.report("wrong", examination.right, [stepped, *kept])


class _Rows:
    """The batch as the model would have seen it in one piece."""

    def __init__(self, seen: Seen, calls: list[Call], examination: Examination) -> None:
        self.seen = seen
        self.calls = calls
        self.examination = examination

    def doubt(self) -> str:
        """What keeps a sum that is right for what the model saw from being known as right."""
        origins = [o for c in self.calls for o in (*c.origins, *(t.origin for t in c.criteria))]
        if any(o is not None and o.mixed for o in origins):
            return _MIXED
        if self.seen.unlike_inputs:
            return _UNLIKE.format(count=self.seen.unlike_inputs)
        return _LOST_TARGET if self.seen.lost_target else ""

    def cause(self) -> Cause:
        seen, told = self.seen, []
        if seen.missing:
            told.append(f"{_samples(seen.missing)} never seen")
        if seen.repeated:
            told.append(
                f"{_samples(seen.repeated)} seen more often than others, up to {seen.most} times"
            )
        if seen.foreign:
            told.append(f"{seen.foreign} rows are of no sample of it")
        if seen.mispaired:
            told.append(f"{seen.mispaired} rows have another sample's target")
        if seen.unlike_inputs:
            told.append(f"{seen.unlike_inputs} rows have an input of another sample")
        return cause(causes.OTHER_ROWS, rows=len(seen.numbers), told="; ".join(told))

    def changes(self) -> str:
        """What the loop did to its slices, done to the whole batch, gives: the same rows (""), others
        ("combined"), or what hangs on numbers that were other ones in each slice ("apart")."""
        found, firsts = "", {}
        for call, rows in zip(self.calls, self.seen.calls, strict=True):
            if rows is None or bool((rows < 0).any()):
                return found
            part = {n: column[rows] for n, column in self.seen.whole.items()}
            leaves = _tree.flatten((call.args, call.kwargs))[0]
            own = [
                (f"input{i}", *each)
                for i, each in enumerate(zip(leaves, call.origins, strict=True))
            ]
            own += [(f"target{i}", c.target, c.origin) for i, c in enumerate(call.criteria)]
            for place, leaf, origin in own:
                if origin is None or origin.same or origin.remake is None or origin.single:
                    continue
                once = _made(origin.remake, self.seen.whole)
                again = _made(origin.remake, part)
                if once is None or again is None or len(once) != len(self.seen.numbers):
                    continue
                if not _near(again, leaf):
                    continue  # random, or not as it was
                if not _near(once[rows], leaf):
                    return "combined"
                if not _near(firsts.setdefault(place, once)[rows], leaf):
                    found = "apart"
        return found

    def whole(self) -> Right | None:
        """Its gradient; None where it cannot be made."""
        batch = self._batch()
        if batch is None:
            return None
        examination, conditions = self.examination, self.calls[0].conditions
        experiment = examination.experiment
        gradient = experiment.whole(Micro(batch, conditions))
        allowed = examination.loose()
        if not experiment.drew:
            return Right(gradient, None, allowed)
        # Under the loop's own random numbers there is no such gradient: without any.
        still = {"quiet": True, "evaluated": (_DropoutNd,)}
        one = experiment.whole(Micro(batch, conditions), **still)
        other = experiment.whole(examination.window.whole, **still)
        if not experiment.drew and error(other, one) <= allowed:
            return examination.right
        return Right(gradient, None, allowed)

    def _batch(self) -> Any:
        first = self.calls[0]
        if len(first.criteria) > 1:
            return None
        leaves, _, _, spec = _tree.flatten((first.args, first.kwargs))
        made = []
        for i, leaf in enumerate(leaves):
            has_rows = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == first.rows
            made.append(self._column(f"input{i}", leaf) if has_rows else leaf)
        targets = [self._column(f"target{j}", c.target) for j, c in enumerate(first.criteria)]
        if any(m is None and leaf is not None for m, leaf in zip(made, leaves, strict=True)):
            return None
        if any(t is None for t in targets):
            return None
        args, kwargs = _tree.unflatten(made, spec)
        named = {n: v for n, v in kwargs.items() if n != "num_items_in_batch"}
        return {"args": args, "kwargs": named, "targets": targets}

    def _column(self, place: str, like: Tensor) -> Tensor | None:
        origin = self.seen.origins.get(place)
        if origin is None or origin.remake is None:
            return None
        made = _made(origin.remake, self.seen.whole)
        if made is None or made.shape[1:] != like.shape[1:]:
            return None
        return made.to(like.dtype).detach().requires_grad_(like.requires_grad)


def _made(remake: Any, columns: dict[str, Tensor]) -> Tensor | None:
    try:
        with torch.no_grad():
            return remake(columns)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError):
        return None


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    eps = torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0
    size = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one.to(other.device) - other).abs() <= 1e3 * eps * max(size, 1e-300)).all())


def _samples(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{len(numbers)} samples ([{shown}])"
