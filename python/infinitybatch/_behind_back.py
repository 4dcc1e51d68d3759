"""What others did to a trainer's model and optimizer between its epochs."""

import warnings
from typing import Any

import torch

from ._coupled import first_frame_outside
from .errors import InvalidArgument, MovedModelNotice, StateError


class Watch:
    """Remembers a model's parameters as the optimizer knows them."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model  # another one where the trainer is given one
        self._optimizer = optimizer
        named = list(model.named_parameters())
        wanted = [(n, p) for n, p in named if p.requires_grad]
        owned = self._owned()
        if wanted and not any(id(p) in owned for _, p in wanted):
            raise InvalidArgument(
                f"the optimizer has none of the model's {len(wanted)} parameters that want a "
                f"gradient; make it of them: torch.optim.Adam(model.parameters())"
            )
        if not wanted:
            raise InvalidArgument(
                f"none of the model's {len(named)} parameters wants a gradient; there is nothing "
                f"to train: parameter.requires_grad_()"
            )
        self._free = {n for n, p in named if id(p) not in owned}  # not trained from the beginning
        self._places = self._places_now()

    def look(self) -> None:
        """Raises StateError where the optimizer would train something else than the model; where
        parameters moved, moves the optimizer's state after them."""
        owned = self._owned()
        lost = [
            name
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in owned and name not in self._free
        ]
        if lost:
            shown = ", ".join(f"'{name}'" for name in lost[:3]) + (", …" if len(lost) > 3 else "")
            raise StateError(
                f"{len(lost)} of the model's parameters are no longer the optimizer's ({shown}): "
                f"they were replaced, or the optimizer was rebuilt; make it anew, "
                f"trainer.optimizer = torch.optim.Adam(trainer.model.parameters())"
            )
        now = self._places_now()
        # Parameters that joined (add_param_group) or left have not moved.
        gone = [(old, now[key]) for key, old in self._places.items() if now.get(key, old) != old]
        if not gone:
            self._places = now
            return
        moved = 0
        for parameter, state in self._optimizer.state.items():
            old = self._places.get(id(parameter))
            if old is None or old == (parameter.device, parameter.dtype):
                continue
            for key, value in state.items():
                # A count of steps stays on the host, as torch.optim has it.
                if key == "step":
                    continue
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    dtype = parameter.dtype if value.dtype == old[1] else value.dtype
                    state[key] = value.to(device=parameter.device, dtype=dtype)
                    moved += 1
        before, after = gone[0]
        self._places = now
        warnings.warn(
            f"IB106: the model was moved from {_place(before)} to {_place(after)} between two "
            f"epochs; {moved} tensors of the optimizer's state followed. Call model.to(...) before "
            f"ib.Trainer(...) and nothing has to follow.",
            MovedModelNotice,
            stacklevel=first_frame_outside(),
        )

    def _owned(self) -> set[int]:
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def _places_now(self) -> dict[int, tuple[torch.device, torch.dtype]]:
        return {
            id(p): (p.device, p.dtype)
            for group in self._optimizer.param_groups
            for p in group["params"]
        }


def _place(place: tuple[torch.device, torch.dtype]) -> str:
    return f"{place[0]} in {str(place[1]).removeprefix('torch.')}"
