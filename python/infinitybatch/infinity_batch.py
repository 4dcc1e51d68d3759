"""The names and uses of the first infinitybatch, over `Trainer`."""

import difflib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_leaves, tree_map

from . import _checks
from ._containers import Container
from ._infinity_parts import Containers, OwnLoop, Switch
from ._trainer_options import TrainerOptions
from ._updates import schedule_step
from .errors import Error, InvalidArgument, InvalidType, StateError
from .histories import History, last
from .progress import Progress
from .trainer import EvaluationResult, Trainer

__all__ = ["InfinityBatch", "InfinityBatchError", "InfinityBatchWarning"]

#: What an InfinityBatch raises.
InfinityBatchError = Error


class InfinityBatchWarning(UserWarning):
    """IB110: a call of an InfinityBatch that has no effect, or a model that was moved.

    Comes for a second model, optimizer or criterion, which is ignored, for a call between stages
    that changes nothing, and for a model that was moved.

    Way out: make a new `ib.InfinityBatch()`; move the model first.
    """


class InfinityBatch:
    """A training manager: give it a model, an optimizer, a criterion and a loader, and call it.

        ib = infinitybatch.InfinityBatch()
        ib.model = Net().to(device)
        ib.criterion = nn.CrossEntropyLoss()
        ib.optimizer = torch.optim.Adam(ib.model.parameters())
        ib.dataloader = loader
        ib(200)                                 # or ib.epoch() in a loop of your own

    Each batch of the loader is one logical batch: one exact gradient inside the memory budget, one
    step; after a run gradients are clear. In a loop of your own, which needs no dataloader:
    `outputs = ib.batch_(inputs)`, `criterion(outputs, targets).backward()`, `ib.step()`,
    `ib.zero_grad()`. `trainer` is the Trainer behind it.

    Args:
        model, optimizer, criterion: set once, here or later; another one is ignored with a warning.
        dataloader: gives logical batches as pairs (inputs, targets); may be another one later.
        backward_device: where `batch_` leaves outputs, for a loss there; None: the model's device.
        verbose: whether progress is shown.
        keep: arguments of `histories.History`: which losses, outputs, inputs and targets are kept,
            and where. By default the last 10,000 losses.
        options: of `Trainer`: `memory_budget="8GiB"`, `micro_batch_size`, `schedule`, ...

    Raises:
        InvalidType, InvalidArgument: parts and options that cannot be used.
        StateError: a call that needs a part which is not set.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        backward_device: torch.device | str | int | None = None,
        verbose: bool = True,
        *,
        keep: Mapping[str, Any] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._parts: dict[str, Any] = dict.fromkeys(("model", "optimizer", "criterion"))
        self._dataloader: Any = None
        known = inspect.signature(Trainer.__init__).parameters
        for name in options:
            if name not in known:
                raise InvalidArgument(f"{name}= is no option of InfinityBatch nor of Trainer")
        self._options: dict[str, Any] = dict(options)
        self._trainer: Trainer | None = None
        unknown = (keep or {}).keys() - inspect.signature(History.__init__).parameters.keys()
        if unknown:
            raise InvalidArgument(
                f"keep has {sorted(unknown)[0]!r}; what can be kept are losses, metrics, outputs, "
                f"inputs and targets, and where="
            )
        self._containers = Containers(**{"losses": last(10_000), **(keep or {})})
        self._own = OwnLoop()
        self._switch = Switch()
        self._forward_device: torch.device | None = None
        self._backward_device: torch.device | None = None
        self.verbose_mode = verbose
        self.backward_device = backward_device
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion
        self.dataloader = dataloader

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not isinstance(getattr(type(self), name, None), property):
            near = difflib.get_close_matches(name, dir(type(self)), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise AttributeError(f"an InfinityBatch has no {name}{hint}", name=name, obj=self)
        super().__setattr__(name, value)

    # Parts

    def _set_once(self, name: str, value: Any) -> bool:
        if value is None:
            return False
        if self._parts[name] is not None:
            _warn(f"{name} is set already and stays: make another InfinityBatch for another {name}")
            return False
        self._parts[name] = value
        return True

    @property
    def model(self) -> nn.Module | None:
        return self._parts["model"]

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            given = model.__name__ if isinstance(model, type) else None
            raise InvalidType(
                f"model must be a torch.nn.Module, not the class {given}: {given}()"
                if given
                else f"model must be a torch.nn.Module, not {type(model).__name__}"
            )
        if self._set_once("model", model):
            self.updateforwarddevice()
            self.checkdevices_()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self._parts["optimizer"]

    @optimizer.setter
    def optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._set_once("optimizer", optimizer)

    @property
    def criterion(self) -> Any:
        return self._parts["criterion"]

    @criterion.setter
    def criterion(self, criterion: Any) -> None:
        self._set_once("criterion", criterion)

    @property
    def dataloader(self) -> Any:
        return self._dataloader

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        if self._trainer is not None:
            self._trainer.loader = _no_dataloader if dataloader is None else dataloader
        self._dataloader = dataloader

    @property
    def backward_device(self) -> torch.device | None:
        """Where `batch_` leaves outputs; the model's device unless set."""
        return self._backward_device or self._forward_device

    @backward_device.setter
    def backward_device(self, device: torch.device | str | int | None) -> None:
        self._backward_device = (
            None if device is None else _checks.device("backward_device", device)
        )
        self.checkdevices_()

    @property
    def forward_device(self) -> torch.device | None:
        """The model's device when it was set, moved by `changemodeldevice` or updated."""
        return self._forward_device

    @property
    def verbose_mode(self) -> bool:
        return self._switch.on

    @verbose_mode.setter
    def verbose_mode(self, mode: bool) -> None:
        self._switch.on = _checks.truth("verbose_mode", mode)

    @property
    def losses(self) -> Container:
        """`losses[epoch][batch]` is (value, samples)."""
        return self._containers.losses

    @property
    def outputs(self) -> Container:
        """`outputs[epoch][batch]`, where `keep` says so."""
        return self._containers.outputs

    @property
    def inputs(self) -> Container:
        """`inputs[epoch][batch]`, where `keep` says so."""
        return self._containers.inputs

    @property
    def targets(self) -> Container:
        """`targets[epoch][batch]`, where `keep` says so."""
        return self._containers.targets

    @property
    def trainer(self) -> Trainer:
        """The Trainer that does the work; made when first used. Raises StateError before model,
        criterion and optimizer are set; its runs do before the dataloader is."""
        if self._trainer is None:
            for name, part in self._parts.items():
                if part is None:
                    raise _lacks(name)
            options = dict(self._options)
            given = options.pop("callbacks", None) or []
            given = list(given) if isinstance(given, list | tuple) else [given]
            self._trainer = Trainer(
                self.model,
                self.criterion,
                self.optimizer,
                _no_dataloader if self._dataloader is None else self._dataloader,
                callbacks=[self._containers, Progress(file=self._switch), *given],
                **options,
            )
        return self._trainer

    # Training

    def __call__(self, num_epochs: int) -> None:
        """As `train`."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Trains so many epochs, from empty containers. Raises what `Trainer` does."""
        trainer = self._trainer_to_run()
        self.clearcontainers_()
        trainer(num_epochs)

    def epoch(self) -> None:
        """Trains one epoch. Raises what `Trainer` does."""
        self._trainer_to_run().epoch()

    def _trainer_to_run(self) -> Trainer:
        trainer = self.trainer
        if self._dataloader is None:
            raise _lacks("dataloader")
        self._look_at_device()
        if not trainer.running:
            self._end_own_epoch()
            self._own.in_epoch = False
        return trainer

    def eval(self, dataloader: Any, metrics: Any = None) -> EvaluationResult:
        """Loss and metrics over a loader of any kind: `Trainer.evaluate`."""
        return self.trainer.evaluate(dataloader, metrics)

    # Loops of one's own

    def batch_(self, inputs: Any) -> Any:
        """The model's outputs for a whole logical batch, on `backward_device`; any loss of them can
        run backward."""
        trainer = self.trainer
        self._look_at_device()
        if self._own.stepped and self._has_gradients():
            _warn("the last step's gradients are still there and add up: ib.zero_grad() after step")
        self._own.stepped = False
        self._own.drop()  # the graph before it must not wait beside this one
        outputs = trainer.forward(inputs)
        if self._backward_device is not None:
            outputs = _moved(outputs, self._backward_device)
        self._own.outputs, self._own.inputs = outputs, inputs
        self._own.samples = _samples(inputs)
        return outputs

    def loss(self, targets: Any) -> Tensor:
        """The criterion of the last `batch_` and its targets; goes into `losses`.

        Raises:
            StateError: before `batch_`.
        """
        own = self._own
        if own.outputs is None:
            raise StateError("there are no outputs to compare yet: outputs = ib.batch_(inputs)")
        targets = _moved(targets, self.backward_device)
        own.loss = self.trainer.loss(own.outputs, targets)
        own.count(own.loss)
        outputs, inputs, loss = own.outputs, own.inputs, own.loss
        place = own.epoch, own.batch
        own.batch += 1
        containers = self._containers
        samples = _samples(inputs)
        containers.losses.add(*place, lambda: (float(loss.detach()), samples))
        containers.outputs.add(*place, lambda: outputs)
        containers.inputs.add(*place, lambda: inputs)
        containers.targets.add(*place, lambda: targets)
        own.outputs = own.inputs = None
        return loss

    def backward(self, loss: Tensor | None = None) -> None:
        """Runs the last `loss` backward, or the one given, scaled where there is a grad_scaler;
        without one it warns."""
        own, self._own.loss = self._own.loss, None
        loss = own if loss is None else loss
        if loss is None:
            _warn("there is no loss to run backward: call ib.loss(targets) first")
        else:
            self.trainer.backward(loss)

    def step(self, loss: Tensor | float | None = None) -> None:
        """The optimizer's step, and a schedule's that goes by steps; ReduceLROnPlateau reads
        `loss`, or the last `ib.loss(targets)`.

        Raises:
            StateError: there is no gradient; a schedule that reads a loss has none; a grad_scaler,
                and the loss ran backward unscaled, not by `ib.backward`.
        """
        trainer, own = self.trainer, self._own
        if all(one.grad is None for one in trainer.model.parameters()):
            raise StateError(
                "there is no gradient to step with: ib.criterion(outputs, targets).backward() first"
            )
        trainer.step(own.last if loss is None else loss)
        if loss is not None and own.last is None:
            own.count(loss)
        own.drop()
        own.steps += 1
        own.stepped = True

    def zero_grad(self) -> None:
        """Clears gradients."""
        self.trainer.zero_grad()

    # Devices and containers

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Moves the model, and the optimizer's state after it."""
        if self.model is None:
            raise StateError("this InfinityBatch has no model yet: ib.model = Net()")
        self.model.to(_checks.device("device", device))
        self.updateforwarddevice()
        self.checkdevices_()
        if self.optimizer is None:
            return
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # to where parameters are now
        if self._trainer is not None:  # which need not warn of it
            schedule = self._trainer.schedule
            self._trainer.optimizer = self.optimizer
            self._trainer.schedule = schedule

    def updateforwarddevice(self) -> None:
        """Takes notice of where the model is, after it was moved from outside. Warns where it has no
        parameter that wants a gradient."""
        self._forward_device = self._model_device()
        if self.model is not None and self._forward_device is None:
            _warn("the model has no parameter that wants a gradient: parameter.requires_grad_()")

    def checkdevices_(self) -> None:
        """Warns where `backward_device` was set to the device that the model is on."""
        if self._backward_device is not None and self._backward_device == self._forward_device:
            _warn(
                f"backward_device is {self._backward_device}, where the model is already: it saves no "
                f"memory; memory_budget= does"
            )

    def clearcontainers_(self) -> None:
        """Empties losses, outputs, inputs and targets; epochs are counted from 0 again."""
        self._containers.clear()
        self._containers.first = 0 if self._trainer is None else self._trainer.epochs_done
        own = self._own
        own.epoch = own.batch = 0
        own.stepped = False
        own.drop()

    def epochstart_(self) -> None:
        """In a loop of your own: an epoch begins. What follows belongs to it in the containers, and
        after steps of one before a `schedule` by epochs goes on, ReduceLROnPlateau with the mean of
        its losses.

        Raises:
            StateError: ReduceLROnPlateau, and no loss was computed by `ib.loss` or given to `step`.
        """
        own = self._own
        self._end_own_epoch()
        own.in_epoch = True
        if own.batch:
            own.epoch, own.batch = own.epoch + 1, 0

    def _end_own_epoch(self) -> None:
        own, trainer = self._own, self._trainer
        if trainer is not None and own.in_epoch and own.steps:
            if trainer.schedule is not None and self._options.get("schedule_by") != "step":
                is_read = isinstance(trainer.schedule, lr_scheduler.ReduceLROnPlateau)
                if is_read and not own.counted:
                    raise StateError(
                        "ReduceLROnPlateau reads the epoch's loss, and there is none: compute it "
                        "by ib.loss(targets), or give it to ib.step(loss)"
                    )
                schedule_step(trainer.schedule, float(own.sum) / max(own.counted, 1))
        own.steps = own.counted = 0
        own.sum = 0.0

    def _has_gradients(self) -> bool:
        parameters = self.model.parameters() if self.model is not None else ()
        gradients = (one.grad for one in parameters if one.grad is not None)
        return any(bool(gradient.any()) for gradient in gradients)

    def _model_device(self) -> torch.device | None:
        parameters = self.model.parameters() if self.model is not None else ()
        return next((one.device for one in parameters if one.requires_grad), None)

    def _look_at_device(self) -> None:
        now = self._model_device()
        if now != self._forward_device:
            _warn(
                f"the model was moved from {self._forward_device} to {now} since; call "
                f"ib.updateforwarddevice() after moving it, or ib.changemodeldevice({str(now)!r})"
            )
            self.updateforwarddevice()


_EXAMPLES = {
    "model": "Net()",
    "criterion": "torch.nn.CrossEntropyLoss()",
    "optimizer": "torch.optim.Adam(ib.model.parameters())",
    "dataloader": "loader",
}


def _lacks(name: str) -> StateError:
    return StateError(f"this InfinityBatch has no {name} yet: ib.{name} = {_EXAMPLES[name]}")


def _no_dataloader() -> Any:
    raise _lacks("dataloader")


def _moved(value: Any, device: torch.device | None) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _samples(inputs: Any) -> int:
    leaves = (leaf for leaf in tree_leaves(inputs) if len(getattr(leaf, "shape", ())) > 0)
    return next((len(leaf) for leaf in leaves), 1)


def _warn(text: str) -> None:
    warnings.warn(f"IB110: {text}", InfinityBatchWarning, stacklevel=3)
