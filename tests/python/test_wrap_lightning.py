"""A wrapped LightningModule in Lightning's Trainer, which asks for the class and calls methods of it."""

import copy

import infinitybatch as ib
import pytest
import torch
from support import mlp
from torch import nn
from wrap_support import close

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(pl.LightningModule):
    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("validation", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.rate)


class PastForward(Classifier):
    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


def fit(model, folder):
    x = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = torch.utils.data.TensorDataset(x, torch.arange(24) % 5)
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(model, loader, loader)
    return trainer


def test_it_trains_as_natively(tmp_path):
    native = Classifier()
    inner = copy.deepcopy(native)
    wrapped = ib.wrap(inner, micro_batch_size=3)
    assert isinstance(wrapped, pl.LightningModule)
    wanted, found = fit(native, tmp_path / "native"), fit(wrapped, tmp_path / "wrapped")
    assert wrapped.last_report.micro_batch_sizes == [3, 3, 2]
    close(inner.state_dict(), native.state_dict())
    close(found.callback_metrics, wanted.callback_metrics)
    path = found.checkpoint_callback.best_model_path
    loaded = type(wrapped).load_from_checkpoint(path, weights_only=False)
    assert type(loaded) is Classifier
    close(loaded.state_dict(), inner.state_dict())


def test_a_step_past_forward(tmp_path):
    native = PastForward()
    told, named = copy.deepcopy(native), copy.deepcopy(native)
    fit(native, tmp_path)
    with pytest.warns(ib.UnwrappedMethodNotice, match="IB105: PastForward.training_step"):
        fit(ib.wrap(told, micro_batch_size=3), tmp_path)
    close(told.state_dict(), native.state_dict())
    options = {"micro_batch_size": 4, "reduce": "mean", "methods": ("training_step",)}
    wrapped = ib.wrap(named, **options)
    fit(wrapped, tmp_path)
    close(named.state_dict(), native.state_dict())
