"""The accumulation loops of accelerate and lightning. Both give None where not installed."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
from harness.clock import Sample, Stopwatch
from torch import nn
from torch.nn import functional


def accelerate_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    size: int,
) -> Callable[[], object] | None:
    """One logical batch as accelerate's guide to gradient accumulation shows it."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    from accelerate import Accelerator

    count = -(-len(inputs) // size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=count)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return step


class Windows:
    """Micro-batches for a Trainer, which owns its loop. Each time a window of `in_a_row` logical
    batches of `count` is done its clock is read and the others have their turn, so that samples pair.
    """

    def __init__(
        self, size: int, count: int, in_a_row: int, rounds: int, between: Callable[[int], None]
    ) -> None:
        inputs = torch.randn(size * count, 64)
        targets = torch.randint(10, (size * count,))
        self.batches = in_a_row * list(zip(inputs.split(size), targets.split(size), strict=True))
        self.rounds, self.between = rounds, between
        self.samples: list[Sample] = []

    def __len__(self) -> int:
        return len(self.batches) * self.rounds + 1

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for turn in range(self.rounds):
            with torch.enable_grad():
                self.between(turn)
            watch = Stopwatch()
            yield from self.batches
            # Reached when the next window's first batch is asked for: the step has been taken.
            self.samples.append(watch.read())
        yield self.batches[0]  # so that it is asked for


def lightning_fit(
    make_model: Callable[[], nn.Module],
    size: int,
    count: int,
    in_a_row: int,
    rounds: int,
    between: Callable[[int], None],
) -> list[Sample] | None:
    """One epoch of `rounds` times `in_a_row` logical batches; before each round, `between(round)`
    runs off the clock.
    """
    if importlib.util.find_spec("lightning") is None:
        return None
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model = make_model()

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
            return functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    windows = Windows(size, count, in_a_row, rounds, between)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=count,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), windows)
    return windows.samples
