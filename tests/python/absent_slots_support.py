"""Models whose buffers, parameters or flags hold nothing until the first batch, and models whose
buffers lie in each other's memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 6


class Base(nn.Module):
    """Linear, `between`, tanh, linear."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        if norm:
            self.norm = nn.BatchNorm1d(WIDTH)
        self.normalises = norm
        self.double()
        self.make()

    def make(self) -> None:
        pass

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if self.normalises:
            h = self.norm(h)
        return self.head(torch.tanh(self.between(h)))


def line(begin: float = 0.5, end: float = 1.0) -> torch.Tensor:
    return torch.linspace(begin, end, WIDTH, dtype=torch.float64)


# What the first batch makes: each is another thing for other rows.


class NoneBuffer(Base):
    def make(self) -> None:
        self.register_buffer("mean", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = h.detach().abs().mean(0)
        return h - self.mean


class LateBuffer(Base):
    """Not even its name is there."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", h.detach().abs().mean(0))
        return h - self.mean


class ActNorm(Base):
    """Its flag is a buffer."""

    def make(self) -> None:
        self.shift, self.scale = nn.Parameter(line()), nn.Parameter(line())
        self.register_buffer("ready", torch.tensor(0, dtype=torch.uint8))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.ready.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-h.abs().mean(0))
                self.scale.copy_(1 / (h.std(0) + 1e-6))
                self.ready.fill_(1)
        return (h + self.shift) * self.scale


class ActNormOfPython(Base):
    """Its flag is a bool, and its parameters get other memory."""

    def make(self) -> None:
        self.shift, self.scale = nn.Parameter(line()), nn.Parameter(line())
        self.ready = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.shift.data = -h.detach().abs().mean(0)
            self.scale.data = 1 / (h.detach().std(0) + 1e-6)
            self.ready = True
        return (h + self.shift) * self.scale


class WeightNorm(Base):
    """Data-dependent initialisation of a normed weight."""

    def make(self) -> None:
        self.v, self.g = nn.Parameter(torch.randn(WIDTH, WIDTH).double()), nn.Parameter(line())
        self.ready = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        weight = self.v / self.v.norm(dim=1, keepdim=True)
        if not self.ready:
            with torch.no_grad():
                self.g.copy_(1 / (h @ weight.t()).std(0))
            self.ready = True
        return (h @ weight.t()) * self.g


class Codebook(Base):
    def make(self) -> None:
        self.register_buffer("codes", torch.zeros(3, WIDTH).double())
        self.register_buffer("ready", torch.tensor(False))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.codes.data.copy_(h.detach()[torch.arange(3) % len(h)])
            self.ready.data.fill_(True)
        return h + torch.softmax(h @ self.codes.t(), 1) @ self.codes


class NoneCodebook(Base):
    """As many codes as there are samples."""

    def make(self) -> None:
        self.register_buffer("codes", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.codes is None:
            self.codes = h.detach()[::2].clone()
        return h + torch.softmax(h @ self.codes.t(), 1) @ self.codes


class FlagAndNone(Base):
    """Neither is of use without the other."""

    def make(self) -> None:
        self.register_buffer("mean", None)
        self.ready = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.mean, self.ready = h.detach().abs().mean(0), True
        return h - self.mean


class NoneParameter(Base):
    def make(self) -> None:
        self.register_parameter("scale", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(h.detach().abs().mean(0))
        return h * self.scale


class NoneAttribute(Base):
    def make(self) -> None:
        self.mean: Any = None

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean = h.detach().abs().mean(0)
        return h - self.mean


FROM_THE_FIRST_BATCH: list[Callable[..., Base]] = [
    NoneBuffer,
    LateBuffer,
    ActNorm,
    ActNormOfPython,
    WeightNorm,
    Codebook,
    NoneCodebook,
    FlagAndNone,
    NoneParameter,
    NoneAttribute,
]

# What each call makes: of other rows another thing, or a place for the gradient of those alone.


class NoneThenAverage(Base):
    def make(self) -> None:
        self.register_buffer("mean", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        now = h.detach().abs().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return h - self.mean


class ReplacedParameter(Base):
    def make(self) -> None:
        self.scale = nn.Parameter(line())

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.scale = nn.Parameter(self.scale.detach() * 0.9)
        return h * self.scale


class ParameterOfEachCall(Base):
    def make(self) -> None:
        self.register_parameter("scale", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.scale = nn.Parameter(line().to(h.device))
        return h * self.scale


OF_EACH_CALL: list[Callable[..., Base]] = [
    NoneThenAverage,
    ReplacedParameter,
    ParameterOfEachCall,
]

# What does not depend on the rows: micro-batches are exact.


class NoneMask(Base):
    def make(self) -> None:
        self.register_buffer("mask", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = line()
        return h * self.mask


class FlagAndMask(Base):
    def make(self) -> None:
        self.register_buffer("mask", None)
        self.ready = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.mask, self.ready = line(), True
        return h * self.mask


class UsedOnce(Base):
    """A tensor, and then none."""

    def make(self) -> None:
        self.register_buffer("once", line())

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.once is not None:
            h, self.once = h + self.once, None
        return h


class DeletedBuffer(Base):
    def make(self) -> None:
        self.register_buffer("once", line())

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "once"):
            h = h + self.once
            del self.once
        return h


class MadeAliases(Base):
    """A buffer and a view of it."""

    def make(self) -> None:
        self.register_buffer("base", None)
        self.register_buffer("view", None)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.base is None:
            self.base = line()
            self.view = self.base[:3]
        self.base.mul_(0.7)
        return h * torch.cat([self.view, self.view])


ALIKE: list[Callable[..., Base]] = [NoneMask, FlagAndMask, UsedOnce, DeletedBuffer, MadeAliases]

# Buffers that lie in one memory.


class WrittenBase(Base):
    """Writes the base, reads the view."""

    def make(self) -> None:
        self.register_buffer("base", line())
        self.register_buffer("view", self.base[:3])

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.base.mul_(0.7)
        return h * torch.cat([self.view, self.view])


class WrittenView(WrittenBase):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.view.mul_(0.7)
        return h * self.base


class UnseenView(WrittenBase):
    """The view has a version of its own."""

    def make(self) -> None:
        self.register_buffer("base", line())
        self.register_buffer("view", self.base.data[:3])


class ReadBefore(WrittenBase):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h * torch.cat([self.view, self.view])
        self.base.mul_(0.7)
        return h * self.base


class WrittenParameter(Base):
    """A buffer that lies in a parameter's memory."""

    def make(self) -> None:
        self.scale = nn.Parameter(line())
        self.register_buffer("view", self.scale.data[:3])

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.view.mul_(0.7)
        return h * self.scale


class ThroughData(Base):
    """No second name: `.data` is another tensor in the same memory."""

    def make(self) -> None:
        self.register_buffer("base", line())

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.base.data.mul_(0.7)
        return h * self.base


class AttributeView(Base):
    """A plain attribute that is a view of a buffer."""

    def make(self) -> None:
        self.register_buffer("base", line())
        self.view = self.base[:3]

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.base.mul_(0.7)
        return h * torch.cat([self.view, self.view])


class SharedStatistics(Base):
    """Two layers of the whole batch whose running statistics lie in one memory."""

    def make(self) -> None:
        self.first, self.second = (nn.BatchNorm1d(WIDTH).double() for _ in range(2))
        self.second.running_mean = self.first.running_mean.view(WIDTH)
        self.second.running_var = self.first.running_var.view(WIDTH)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(h)))


ALIASED: list[Callable[..., Base]] = [
    WrittenBase,
    WrittenView,
    UnseenView,
    ReadBefore,
    WrittenParameter,
    ThroughData,
    AttributeView,
]
