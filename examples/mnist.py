"""The example of the first infinitybatch, in which it promised to train with any batch on any device.

Its network (two convolutions, two dropouts), Adadelta and StepLR on 6,000 images of MNIST, two epochs,
one step for each 1,000. In double precision, and with the random numbers of the whole batch, weights
end as those of a native loop, inside a budget that the native loop does not fit in. Beside it the way
the first infinitybatch took: each part runs forward by itself and all graphs wait for one loss.

    python scripts/fetch_mnist.py && python examples/mnist.py
"""

import copy
import os
from pathlib import Path

import infinitybatch as ib
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

ROOT = Path(__file__).resolve().parent.parent


class Net(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, 1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(288 * channels, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def read(name, dims):
    folder = Path(os.environ.get("INFINITYBATCH_DATA", ROOT / "data")) / "mnist"
    (path,) = folder.glob(f"{name}?idx{dims}-ubyte")
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    sizes = [int.from_bytes(bytes(content[4 + 4 * i : 8 + 4 * i])) for i in range(dims)]
    return content[4 + 4 * dims :].view(sizes)


def mnist(count=6000, dtype=torch.float64):
    """The images' usual scale: mean 0.1307, deviation 0.3081."""
    images = read("train-images", 3)[:count, None].to(dtype).div(255).sub(0.1307).div(0.3081)
    return images, read("train-labels", 1)[:count].long()


def make(net):
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    return optimizer, StepLR(optimizer, step_size=1, gamma=0.7)


def native(net, batches, epochs=2):
    optimizer, schedule = make(net)
    with ib.memory.peak() as memory:
        for _ in range(epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                F.nll_loss(net(images), labels).backward()
                optimizer.step()
            schedule.step()
    return memory.peak


def ours(net, batches, budget, epochs=2):
    manager = ib.InfinityBatch(verbose=False, memory_budget=budget, match_native_rng=True)
    manager.model = net
    manager.optimizer, schedule = make(net)
    manager.criterion = nn.NLLLoss()
    manager.dataloader = batches
    with ib.memory.peak() as memory:
        for _ in range(epochs):
            manager.epoch()
            schedule.step()
    return memory.peak, [value for epoch in manager.losses for value, _ in epoch]


def all_graphs_kept(net, images, labels, size=100):
    """One gradient as the first infinitybatch made it; its peak grows with the number of images."""
    net.zero_grad()
    with ib.memory.peak() as memory:
        outputs = torch.cat([net(part) for part in images.split(size)])
        F.nll_loss(outputs, labels).backward()
    return memory.peak


def main():
    images, labels = mnist()
    batches = list(zip(images.split(1000), labels.split(1000), strict=True))
    torch.manual_seed(1)
    one = Net().double()
    other = copy.deepcopy(one)

    torch.manual_seed(2)
    whole = native(one, batches)
    print(f"native: peak {whole / 2**20:.0f} MiB")
    torch.manual_seed(2)
    peak, losses = ours(other, batches, budget=whole // 4)
    found = ib.tools.compare_networks(one, other)
    print(f"within {whole / 2**20 / 4:.0f} MiB: peak {peak / 2**20:.0f} MiB, loss {losses[-1]:.4f}")
    print(f"largest difference of weights: {found.largest_error:.1e}")
    for count in (250, 500, 1000):
        kept = all_graphs_kept(other, images[:count], labels[:count])
        print(f"all graphs kept, {count} images: peak {kept / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
