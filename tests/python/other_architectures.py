"""Networks over graphs, fields, sets and pairs; gradients, solvers and functions of their own in
forward."""

from typing import Any

import torch
from architecture_kinds import Made, Makers, N, architecture
from support import Calls
from torch import nn
from torch.nn import functional as F

OTHERS: Makers = {}


@architecture(OTHERS)
def graph_network() -> Made:
    """Messages along one graph's edges, summed at their ends by index_add."""

    def forward(self: Any, nodes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sent = layer(torch.cat([nodes[:, self.start], nodes[:, self.end]], -1)).relu()
            nodes = torch.zeros_like(nodes).index_add(1, self.end, sent) / 2 + nodes
        return self.head(nodes.amax(1))

    layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
    start, end = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    model = Calls(forward, layers=layers, head=nn.Linear(4, 5), start=start, end=end)
    return model, torch.randn(N, 5, 4)


@architecture(OTHERS)
def graph_attention_of_each_sample() -> Made:
    """Each sample has a graph of its own, given by its edges."""

    def forward(self: Any, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        a, b = edges[:, 0], edges[:, 1]
        wide = lambda index: index[..., None].expand(-1, -1, nodes.shape[-1])  # noqa: E731
        x = self.layer(nodes)
        sender, taker = x.gather(1, wide(a)), x.gather(1, wide(b))
        score = F.leaky_relu(self.score(torch.cat([sender, taker], -1))).exp()
        total = torch.zeros(*x.shape[:2], 1, dtype=x.dtype).scatter_add(1, b[..., None], score)
        mixed = torch.zeros_like(x).scatter_add(1, wide(b), score * sender)
        return self.head((mixed / (total + 1e-3)).mean(1))

    model = Calls(forward, layer=nn.Linear(4, 4), score=nn.Linear(8, 1), head=nn.Linear(4, 5))
    return model, (torch.randn(N, 5, 4), torch.randint(5, (N, 2, 9)))


@architecture(OTHERS)
def capsules() -> Made:
    def squash(x: torch.Tensor) -> torch.Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-8).sqrt()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        votes = torch.einsum("nif,icfd->nicd", squash(x), self.weight)
        fixed, agree = votes.detach(), torch.zeros(votes.shape[:3], dtype=x.dtype)
        for turn in range(3):
            of = votes if turn == 2 else fixed
            found = squash((agree.softmax(2)[..., None] * of).sum(1))
            agree = agree + (fixed * found.detach()[:, None]).sum(-1)
        return found.norm(dim=-1)

    return Calls(forward, weight=nn.Parameter(torch.randn(6, 5, 4, 3))), torch.randn(N, 6, 4)


@architecture(OTHERS)
def neural_ode() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        step = 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + step / 2 * a)
            c = self.field(x + step / 2 * b)
            x = x + step / 6 * (a + 2 * b + 2 * c + self.field(x + step * c))
        return self.head(x)

    field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return Calls(forward, field=field, head=nn.Linear(4, 5)), torch.randn(N, 4)


@architecture(OTHERS)
def fourier_operator() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lift(x[..., None])
        modes = torch.fft.rfft(y, dim=1)
        kept = torch.einsum("nkc,kcd->nkd", modes[:, :3], torch.view_as_complex(self.weight))
        rest = torch.zeros_like(modes[:, 3:])
        y = F.gelu(torch.fft.irfft(torch.cat([kept, rest], 1), n=x.shape[1], dim=1) + self.local(y))
        return self.head(y).squeeze(-1)

    return Calls(
        forward,
        lift=nn.Linear(1, 4),
        weight=nn.Parameter(torch.randn(3, 4, 4, 2)),
        local=nn.Linear(4, 4),
        head=nn.Linear(4, 1),
    ), torch.randn(N, 8)


@architecture(OTHERS)
def hypernetwork() -> Made:
    def forward(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        weight = self.makes(z).view(len(z), 6, 4)
        scale, shift = self.film(z).chunk(2, -1)
        return self.head(F.relu(torch.bmm(weight, x[..., None]).squeeze(-1) * scale + shift))

    model = Calls(forward, makes=nn.Linear(3, 24), film=nn.Linear(3, 12), head=nn.Linear(6, 5))
    return model, (torch.randn(N, 4), torch.randn(N, 3))


@architecture(OTHERS)
def splines() -> Made:
    """A KAN's layer: piecewise linear functions whose pieces are found by their arguments."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clamp(-1.9, 1.9)
        piece = torch.bucketize(y.detach(), self.knots) - 1
        along = y - self.knots[piece]
        inputs = torch.arange(x.shape[1])
        left, right = self.values[inputs, piece], self.values[inputs, piece + 1]
        return (left + (right - left) * along[..., None]).sum(1)

    knots = torch.linspace(-2, 2, 5)
    return Calls(forward, values=nn.Parameter(torch.randn(4, 5, 3)), knots=knots), torch.randn(N, 4)


@architecture(OTHERS)
def critic_with_gradient_penalty() -> Made:
    """WGAN-GP: the penalty's gradient is taken inside of forward."""

    def forward(self: Any, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> Any:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        slope = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)[0]
        score = self.net(fake) - self.net(real)
        return score + 10 * (slope.norm(dim=1, keepdim=True) - 1).square()

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return Calls(forward, net=net), (torch.randn(N, 4), torch.randn(N, 4), torch.rand(N, 1))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@architecture(OTHERS)
def vector_quantizer() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = StraightThrough.apply(4 * self.encode(x)) / 4
        nearest = torch.cdist(z.detach(), self.codes.detach()).argmin(1)
        code = self.codes[nearest]
        out = self.decode(z + (code - z).detach() + (code - code.detach()))
        return torch.cat([out, (code - z).square()], 1)

    codes = nn.Parameter(torch.randn(6, 3))
    return Calls(forward, encode=nn.Linear(4, 3), codes=codes, decode=nn.Linear(3, 4)), torch.randn(
        N, 4
    )


@architecture(OTHERS)
def equilibrium() -> Made:
    """Iterates without gradients to a fixed point, and differentiates the last step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        step = lambda z: torch.tanh(self.cell(z) / 4 + self.enter(x))  # noqa: E731
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = step(z)
        return self.head(step(z))

    cell, enter = nn.Linear(4, 4), nn.Linear(4, 4)
    return Calls(forward, cell=cell, enter=enter, head=nn.Linear(4, 5)), torch.randn(N, 4)


@architecture(OTHERS)
def per_sample_jacobian() -> Made:
    """An energy model whose forces are its gradient, by torch.func."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        energy = lambda r: self.net((r[self.a] - r[self.b]).norm(dim=1)).sum()  # noqa: E731
        return torch.stack([torch.func.grad(energy)(r) for r in x])

    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    a, b = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    return Calls(forward, net=net, a=a, b=b), torch.randn(N, 3, 2)


@architecture(OTHERS)
def siamese_in_place() -> Made:
    def forward(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        u, v = self.net(a), self.net(b)
        u -= v
        u.abs_().add_(1e-3).sqrt_()
        return self.head(u)

    net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 6))
    return Calls(forward, net=net, head=nn.Linear(6, 5)), (torch.randn(N, 4), torch.randn(N, 4))
