"""200 steps of Lightning's Trainer with `InfinityBatch`, in fp64, beside the same without it: clipping,
schedules, a moving average, a step that GradScaler skips, an end in the middle, loaders' workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_support import BATCH, MICRO_BATCH, STEPS, loader, moved_away, same_weights
from lightning_support import (
    Adversarial,
    Contrastive,
    go_on,
    infinity,
    pl,
    rows_seen,
    trainer_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")
#: Where the training ends and goes on in another Trainer: in the middle of an epoch.
MIDDLE = 110
SCALE = 2.0**20


class Average(pl.Callback):
    """An exponential moving average of the weights."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        swa = torch.optim.swa_utils
        self.model = swa.AveragedModel(module.encoder, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.model.update_parameters(module.encoder)


def automatic(folder: Path, *callbacks: Any) -> dict[str, Any]:
    model, average = Contrastive(), Average()
    rows, path = rows_seen(model.encoder[0]), folder / "middle.ckpt"
    for steps in (MIDDLE, STEPS):
        # Trainer(precision="16-mixed") alone has a GradScaler on accelerators only.
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        settings = {
            "gradient_clip_val": 0.5,
            "plugins": [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)],
        }
        trainer = trainer_of(folder, average, *callbacks, max_steps=steps, **settings)
        if steps == MIDDLE:
            trainer.fit(model, loader(overflows=True))
        else:
            go_on(trainer, model, loader(0, overflows=True), path)
        trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    return {
        "weights": model.state_dict(),
        "saved": saved,
        "average": average.model.state_dict(),
        "rows": set(rows),
        "scale": scaler.get_scale(),
    }


def manual(folder: Path, *callbacks: Any) -> dict[str, Any]:
    model = Adversarial()
    rows = rows_seen(model.generator[0])
    path = folder / "middle.ckpt"
    for steps in (2 * MIDDLE, 2 * STEPS):  # of two optimizers
        trainer = trainer_of(folder, *callbacks, max_steps=steps)
        if steps == 2 * MIDDLE:
            trainer.fit(model, loader())
        else:
            go_on(trainer, model, loader(0), path)
        trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["state_dict"]
    return {"weights": model.state_dict(), "saved": saved, "rows": set(rows)}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    torch.set_num_threads(1)
    return {way: way(tmp_path_factory.mktemp(way.__name__)) for way in (automatic, manual)}


@pytest.mark.parametrize(
    ("way", "module"),
    [(automatic, "encoder"), (automatic, None), (manual, ("generator", "critic"))],
)
def test_200_steps(native: Any, way: Any, module: Any, tmp_path: Path) -> None:
    wanted, found = native[way], way(tmp_path, infinity(module=module))
    assert wanted["rows"] == {BATCH} and MICRO_BATCH in found["rows"]
    start = (Contrastive if way is automatic else Adversarial)().state_dict()
    for name in ("weights", "saved", "average"):
        if name in wanted:
            same_weights(found[name], wanted[name])
    moved_away(wanted["weights"], start)
    # One step was skipped in each half, or more: a sample of each epoch overflows.
    assert found.get("scale") == wanted.get("scale")
    assert way is manual or found["scale"] < SCALE
