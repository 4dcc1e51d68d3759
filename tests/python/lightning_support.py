"""LightningModules for the tests of `infinitybatch.lightning`, and a quiet Trainer."""

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from adapter_support import MICRO_BATCH, STEPS, encoder, loss_of
from infinitybatch import lightning as adapter
from support import Log
from torch import nn
from wrap_support import contrastive

pl = adapter._package()
for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)


class Contrastive(pl.LightningModule):
    """Automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = encoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return loss_of(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("validation", contrastive(self(batch[0])))

    def predict_step(self, batch: Any, _: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Adversarial(pl.LightningModule):
    """Manual optimization: two networks in turn, one of them called twice before a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = encoder()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: Any, _: int) -> None:
        generating, judging = self.optimizers()
        real, fake = batch[0][:, :4], self.generator(batch[0]).detach()
        self._step(judging, (self.critic(fake).square() + (self.critic(real) - 1).square()).mean())
        self._step(generating, (self.critic(self.generator(batch[0])) - 1).square().mean())
        for schedule in self.lr_schedulers():
            schedule.step()

    def _step(self, optimizer: Any, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        both = (self.generator, self.critic)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5) for m in both]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.99) for o in optimizers]


def trainer_of(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    wanted = {"max_steps": 2, "enable_checkpointing": False, "limit_val_batches": 0, **settings}
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=list(callbacks),
        **wanted,
    )


def infinity(**options: Any) -> Any:
    return adapter.InfinityBatch(**{"micro_batch_size": MICRO_BATCH, **options})


def rows_seen(layer: nn.Module) -> Log:
    """How many rows `layer` is given, call by call, those calls included that do not count."""
    seen = Log()
    layer.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def go_on(trainer: Any, model: Any, data: Any, path: Path) -> None:
    """Fits from a checkpoint that holds more than weights."""
    more = {"weights_only": False}  # of newer versions; older ones have no such argument
    known = inspect.signature(trainer.fit).parameters
    trainer.fit(model, data, ckpt_path=str(path), **{k: v for k, v in more.items() if k in known})
