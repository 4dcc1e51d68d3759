"""What ranks of `wrap(process_group=)` tell each other, so that none waits for one that has failed."""

import contextlib
import os
from collections.abc import Callable
from enum import IntEnum

import torch
from torch import distributed, nn

from .errors import InvalidType, StateError, Unsupported


class _Stage(IntEnum):
    """Where a rank is when it meets the others."""

    begins_in_one = 1  # a forward: its batch is one micro-batch
    begins = 2
    ended = 3  # a backward
    backward_failed = 4
    forward_failed = 5


_BEGINS = (_Stage.begins_in_one, _Stage.begins)


class Agreement:
    """Ranks meet in front of each forward that may go back, and at the end of each backward or of a
    forward that fails: whoever comes to the wrong meeting finds out, and none is missing."""

    def __init__(self, group: "distributed.ProcessGroup") -> None:
        if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
            raise InvalidType(
                f"process_group must be a torch.distributed.ProcessGroup (group.WORLD is the one of "
                f"all ranks), not {type(group).__name__}"
            )
        self._group = group
        self._stages: torch.Tensor | None = None
        self._in_one: bool | None = None  # once the call has begun: whether all ranks' batches are

    def prepare(self, model: nn.Module) -> None:
        """A call comes: makes now what must not fail for want of memory when something else has."""
        # Where gradients are is where the group can reduce.
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if self._stages is None or self._stages.device != device:
            ranks = distributed.get_world_size(self._group)
            self._stages = torch.zeros(ranks, dtype=torch.int32, device=device)
        self._in_one = None

    def begin(self, in_one: bool) -> bool:
        """Waits for the forwards of all ranks; whether each computes its batch in one micro-batch."""
        own = _Stage.begins_in_one if in_one else _Stage.begins
        while self._in_one is None:
            stages = self._meet(own)
            # Others are still in the call before, which this rank has ended otherwise.
            if all(stage in _BEGINS for stage in stages):
                self._in_one = all(stage == _Stage.begins_in_one for stage in stages)
        return self._in_one

    def __call__(self, failed: bool) -> None:
        """Ends a backward. Raises StateError where another rank has not come to the end of its own."""
        stages = self._meet(_Stage.backward_failed if failed else _Stage.ended)
        if failed:
            return
        without = self._ranks(stages, _BEGINS.__contains__)
        wrong = self._ranks(stages, lambda s: s in (_Stage.backward_failed, _Stage.forward_failed))
        where = "forward" if _Stage.forward_failed in stages else "backward"
        if wrong:
            raise StateError(
                f"{where} of the wrapped model failed on {wrong} of {len(stages)}, so no rank hands "
                f"out gradients; see the error raised there, and skip this step on all ranks: "
                f"except ib.Error: optimizer.zero_grad()"
            )
        if without:
            raise StateError(
                f"{without} of {len(stages)} called the wrapped model again without the backward "
                f"that this rank is in (its loss failed, or its loop has skipped it), so no rank "
                f"hands out gradients; run backward equally often on all ranks, or call the model "
                f"under torch.no_grad() where none follows"
            )

    def end_failed(self) -> None:
        """Ends a forward that has failed: others learn of it in their backward."""
        with contextlib.suppress(StateError):  # the forward's own error matters
            self.begin(False)
            self._meet(_Stage.forward_failed)

    def _meet(self, own: _Stage) -> list[int]:
        stages = self._stages
        assert stages is not None
        with torch.no_grad():
            stages.zero_()
            stages[distributed.get_rank(self._group)] = int(own)
            try:
                distributed.all_reduce(stages, group=self._group)
            except RuntimeError as error:
                raise StateError(f"another rank of process_group has gone: {error}") from error
            return stages.tolist()

    @staticmethod
    def _ranks(stages: list[int], which: Callable[[int], bool]) -> str:
        return "rank " * any(map(which, stages)) + ", ".join(
            str(rank) for rank, stage in enumerate(stages) if which(stage)
        )


def refuse_other_ranks(who: str) -> None:
    """Of what trains in one process: each rank would train a replica of its own."""
    together = distributed.is_available() and distributed.is_initialized()
    given = os.environ.get("WORLD_SIZE", "1")
    ranks = distributed.get_world_size() if together else int(given) if given.isdigit() else 1
    if ranks > 1:
        raise Unsupported(
            f"{who} works in one process, and there are {ranks} "
            f"({'torch.distributed' if together else 'WORLD_SIZE'}): each would train a model of "
            f"its own and write the same files. Run one without torchrun (env -u WORLD_SIZE), or "
            f"train with your own loop: "
            f"DDP(ib.wrap(model, process_group=torch.distributed.group.WORLD))"
        )


__all__ = ["Agreement", "refuse_other_ranks"]
