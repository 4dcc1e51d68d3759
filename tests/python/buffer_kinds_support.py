"""Models with a buffer, or a plain attribute, of any kind of tensor, beside native."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import torch
from torch import nn

WIDTH = 6
ROWS = 8


class Tagged(torch.Tensor):
    """A subclass that answers nothing itself."""


def _numbers() -> torch.Tensor:
    return torch.linspace(-0.9, 0.8, WIDTH * 2, dtype=torch.float64).view(WIDTH, 2)


def _square() -> torch.Tensor:
    values = torch.linspace(-0.7, 0.9, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
    return values * (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 3 == 0)


def _quantized(values: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(values.float(), 0.05, 2, torch.qint8)


def _by_channel(values: torch.Tensor) -> torch.Tensor:
    scales = torch.linspace(0.02, 0.07, WIDTH)
    return torch.quantize_per_channel(
        values.float(), scales, torch.zeros(WIDTH, dtype=torch.int64), 0, torch.qint8
    )


def _nested(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([values[:2].clone(), values[2:].clone()])


@dataclass(frozen=True)
class Kind:
    make: Callable[[], torch.Tensor]
    #: Its numbers, in fp64.
    read: Callable[[torch.Tensor], torch.Tensor]
    #: Writes it in place, where torch has an operator for that.
    write: Callable[[torch.Tensor], Any] | None = None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64).reshape(-1)


def _halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(0.5)


KINDS = {
    "quantized": Kind(
        lambda: _quantized(_numbers()),
        lambda t: _plain(t.dequantize()),
        lambda t: t.copy_(_quantized(_numbers() * 0.5)),
    ),
    "quantized, another scale": Kind(
        lambda: _quantized(_numbers()),
        lambda t: _plain(t.dequantize()),
        lambda t: t.copy_(torch.quantize_per_tensor(_numbers().float(), 0.1, 0, torch.qint8)),
    ),
    "quantized by channel": Kind(
        lambda: _by_channel(_numbers()),
        lambda t: _plain(t.dequantize()),
        lambda t: t.copy_(_by_channel(_numbers() * 0.5)),
    ),
    "COO": Kind(lambda: _square().to_sparse(), lambda t: _plain(t.to_dense()), _halve),
    "COO, other places": Kind(
        lambda: _square().to_sparse(),
        lambda t: _plain(t.to_dense()),
        lambda t: t.add_(torch.eye(WIDTH, dtype=torch.float64).to_sparse()),
    ),
    "CSR": Kind(lambda: _square().to_sparse_csr(), lambda t: _plain(t.to_dense()), _halve),
    "CSC": Kind(lambda: _square().to_sparse_csc(), lambda t: _plain(t.to_dense())),
    "BSR": Kind(lambda: _square().to_sparse_bsr((2, 2)), lambda t: _plain(t.to_dense())),
    "nested": Kind(
        lambda: _nested(_numbers()),
        lambda t: torch.cat([_plain(part) for part in t.unbind()]),
        _halve,
    ),
    "MKL-DNN": Kind(lambda: _numbers().float().to_mkldnn(), lambda t: _plain(t.to_dense()), _halve),
    "expanded": Kind(lambda: torch.full((1,), 0.3, dtype=torch.float64).expand(5), _plain),
    "expanded rows": Kind(lambda: _numbers()[:, :1].expand(WIDTH, 4), _plain),
    "a view": Kind(lambda: _numbers()[1:4], _plain, _halve),
    "transposed": Kind(lambda: _numbers().t(), _plain, _halve),
    "every other": Kind(lambda: _numbers()[::2], _plain, _halve),
    "complex": Kind(
        lambda: torch.complex(_numbers(), -_numbers()),
        lambda t: _plain(torch.view_as_real(t)),
        _halve,
    ),
    "conjugated": Kind(
        lambda: torch.complex(_numbers(), -_numbers()).conj(),
        lambda t: _plain(torch.view_as_real(t.resolve_conj())),
        _halve,
    ),
    "bool": Kind(lambda: _numbers() > 0, _plain, lambda t: t.logical_not_()),
    "uint8": Kind(lambda: torch.arange(7, dtype=torch.uint8), _plain, lambda t: t.fill_(3)),
    "bfloat16": Kind(lambda: _numbers().bfloat16(), _plain, _halve),
    "empty": Kind(lambda: torch.zeros(0, 3, dtype=torch.float64), _plain, _halve),
    "one number": Kind(lambda: torch.tensor(0.7, dtype=torch.float64), _plain, _halve),
    "a subclass": Kind(lambda: _numbers().as_subclass(Tagged), _plain, _halve),
}


class Net(nn.Module):
    """Reads a tensor of a kind, and writes it where told to."""

    def __init__(self, kind: Kind, place: str, writes: bool, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.writes = kind, writes
        self.first = nn.Linear(5, WIDTH).double()
        self.layer = layer
        self.last = nn.Linear(WIDTH, 3).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # prototypes, and what is deprecated
            kept = kind.make()
        if place == "buffer":
            self.register_buffer("kept", kept)
        else:
            self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.as_tensor(self.kind.read(self.kept)).as_subclass(torch.Tensor)
        places = torch.arange(1, read.numel() + 1, dtype=torch.float64)
        hidden = self.first(x).tanh() * (1 + (read * places).sum())
        if self.writes:
            assert self.kind.write is not None
            with torch.no_grad():
                self.kind.write(self.kept)
        return self.last(self.layer(hidden).tanh())

    def numbers(self) -> torch.Tensor:
        return self.kind.read(self.kept).clone()


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each sample's loss depends on the others' outputs."""
    return (outputs @ outputs.T).logsumexp(1).mean() + mean_square(outputs, targets)


#: Options, and whether the loss is coupled and the model has BatchNorm.
WAYS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "one micro-batch": ({"micro_batch_size": ROWS}, False, False),
    "separable": ({"micro_batch_size": 3}, False, False),
    "coupled": ({"micro_batch_size": 3}, True, False),
    "BatchNorm": ({"micro_batch_size": 3}, False, True),
    "segments": ({"micro_batch_size": 2, "checkpoint_segments": 2}, True, False),
    "native numbers": ({"micro_batch_size": 3, "match_native_rng": True}, True, False),
    "static": ({"micro_batch_size": 4, "static_graph": True}, False, False),
    "static and coupled": ({"micro_batch_size": 4, "static_graph": True}, True, False),
    "offload": (
        {"micro_batch_size": 3, "offload": "always", "retained_micro_batches": 9},
        True,
        False,
    ),
    "budget": ({"memory_budget": 24 << 10}, True, False),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return (
        torch.randn(ROWS, 5, dtype=torch.float64, generator=generator),
        torch.randn(ROWS, 3, dtype=torch.float64, generator=generator),
    )


def net_for(way: str, kind: str, place: str, writes: bool) -> Net:
    normalises = WAYS[way][2] if way in WAYS else False
    return Net(
        KINDS[kind], place, writes, nn.BatchNorm1d(WIDTH).double() if normalises else nn.Identity()
    )


def gradients_of(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


def native(net: Net, coupled: bool) -> None:
    x, y = data()
    (spread if coupled else mean_square)(net(x), y).backward()


def options_of(way: str) -> tuple[dict[str, Any], bool, bool]:
    """A budget is beside what the process holds already."""
    options, coupled, normalises = WAYS[way]
    options = {**options}
    if "memory_budget" in options:
        options["memory_budget"] += ib.memory.stats("cpu").live
    return options, coupled, normalises


def run_step(net: Net, way: str) -> None:
    options, coupled, _ = options_of(way)
    loss: Any = ib.losses.coupled(spread) if coupled else nn.MSELoss()
    ib.VirtualBatch(net, loss, **options).backward(*data())


def run_wrapped(net: Net, way: str) -> None:
    options, coupled, _ = options_of(way)
    if options.pop("checkpoint_segments", None) is not None:
        options["micro_batch_size"] = 1
    x, y = data()
    (spread if coupled else mean_square)(ib.wrap(net, **options)(x), y).backward()
