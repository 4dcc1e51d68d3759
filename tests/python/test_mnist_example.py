"""examples/mnist.py: the first infinitybatch's example, and its method, beside native.

INFINITYBATCH_LONG_TESTS=1 runs it as it stands, where MNIST is there (scripts/fetch_mnist.py).
"""

import copy
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG

ROOT = Path(__file__).resolve().parents[2]
MNIST = Path(os.environ.get("INFINITYBATCH_DATA", ROOT / "data")) / "mnist"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_mnist", ROOT / "examples/mnist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 1, 28, 28, dtype=torch.float64, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def trained(example: Any, images: Any, labels: Any, size: int, channels: int = 32) -> None:
    batches = list(zip(images.split(size), labels.split(size), strict=True))
    torch.manual_seed(1)
    one = example.Net(channels).double()
    before, other = copy.deepcopy(one), copy.deepcopy(one)
    torch.manual_seed(2)
    whole = example.native(one, batches)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    budget = whole // 2
    peak, losses = example.ours(other, batches, budget)
    assert peak <= budget < whole
    found = ib.tools.compare_networks(one, other, tolerance=1e-12)
    assert found, found
    assert not ib.tools.is_equal_network(one, before)
    assert torch.equal(torch.get_rng_state(), after)  # as many numbers were drawn
    assert len(losses) == 2 * len(batches)


def test_weights_are_native_inside_a_budget_below_its_peak(example: Any) -> None:
    trained(example, *data(240), size=120, channels=4)


@pytest.mark.skipif(not LONG, reason="INFINITYBATCH_LONG_TESTS runs it on 6,000 images")
@pytest.mark.skipif(not MNIST.exists(), reason="scripts/fetch_mnist.py fetches MNIST")
def test_six_thousand_images_of_mnist(example: Any) -> None:
    trained(example, *example.mnist(), size=1000)


def test_the_first_ones_peak_grows_with_the_batch_and_ours_does_not(example: Any) -> None:
    kept, ours = [], []
    for count in (50, 100, 200):
        images, labels = data(count)
        torch.manual_seed(1)
        net = example.Net(4).double()
        kept.append(example.all_graphs_kept(net, images, labels, size=10))
        batch = ib.VirtualBatch(net, torch.nn.NLLLoss(), micro_batch_size=10)
        net.zero_grad()
        with ib.memory.peak() as memory:
            batch.backward(images, labels)
        ours.append(memory.peak - images.nbytes)
    assert kept[1] - kept[0] > 4 * 2**20 and kept[2] - kept[1] > 8 * 2**20
    assert max(ours) - min(ours) < 2**20
