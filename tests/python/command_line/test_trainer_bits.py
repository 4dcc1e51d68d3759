"""The command line (C++'s Trainer) and Python's Trainer run one loop: the same bits on the same data."""

from collections.abc import Iterator
from typing import Any

import infinitybatch as ib
import numpy
import pytest
import torch
from command_line_tools import ROOT, epochs, run
from torch import nn

SEED, BATCH, MICRO, EPOCHS = 3, 300, 64, 3


def read(kind: str, name: str) -> numpy.ndarray:
    content = (ROOT / "data/digits" / f"{kind}-{name}-ubyte").read_bytes()
    dims = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dims)]
    return numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * dims).reshape(shape)


def digits() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """As the command line reads them: scaled by mean and deviation of the training images."""
    images = {kind: read(kind, "images-idx3").copy() for kind in ("train", "t10k")}
    values = images["train"].astype(numpy.float64)
    mean = values.sum() / values.size
    deviation = numpy.sqrt((values**2).sum() / values.size - mean * mean)
    return {
        kind: (
            torch.from_numpy(raw).float().sub_(float(mean)).div_(float(deviation)),
            torch.from_numpy(read(kind, "labels-idx1").copy()).long(),
        )
        for kind, raw in images.items()
    }


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, width), nn.Linear(width, width)])
        self.layers.append(nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


@pytest.mark.skipif(not (ROOT / "data/digits").exists(), reason="make setup fetches the digits")
def test_command_line_and_python_give_the_same_bits() -> None:
    theirs = epochs(
        run(
            *("train", "--data", "digits", "--model", "mlp", "--width", "32", "--depth", "2"),
            *("--optimizer", "sgd", "--seed", SEED, "--epochs", EPOCHS, "--json"),
            *("--batch-size", BATCH, "--micro-batch-size", MICRO),
        )
    )
    data = digits()
    images, labels = data["train"]

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + epoch + 1)
        for rows in torch.randperm(len(labels), generator=generator).split(BATCH):
            yield images[rows], labels[rows]

    torch.manual_seed(SEED)
    model = Mlp(32)
    held_out: list[Any] = []

    class Measures(ib.Callback):
        def on_epoch_end(self, event: Any) -> None:
            held_out.append(event.trainer.evaluate([data["t10k"]], accuracy))

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).double().mean()

    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss = nn.CrossEntropyLoss()
    ours = ib.Trainer(model, loss, sgd, batches, callbacks=Measures(), micro_batch_size=MICRO)(
        EPOCHS
    )
    assert [e.loss for e in ours] == [e["loss"] for e in theirs]
    assert [e.loss for e in held_out] == [e["held_out_loss"] for e in theirs]
    for found, said in zip(held_out, theirs, strict=True):
        assert found.metrics["accuracy"] == pytest.approx(said["held_out_accuracy"])
    assert ours[-1].loss < ours[0].loss
