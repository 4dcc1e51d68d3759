"""Recording, replaying and comparing bit for bit."""

from collections.abc import Callable, Sequence
from typing import Any

import infinitybatch as ib
import torch
from torch.utils._pytree import tree_leaves


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.layout, a.device) != (b.shape, b.dtype, b.layout, b.device):
        return False
    if a.layout == torch.sparse_coo:
        a, b = a.detach(), b.detach()
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    if a.layout != torch.strided:
        return same_bits(a.detach().to_dense(), b.detach().to_dense())
    if a.is_quantized:
        return same_bits(a.int_repr(), b.int_repr())

    def raw(t: torch.Tensor) -> torch.Tensor:
        t = t.detach().resolve_conj().resolve_neg().flatten()
        return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return torch.equal(raw(a), raw(b))


def gradients(outputs: Any, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of a fixed weighting of every output that has a graph."""
    roots, seeds = [], []
    for output in tree_leaves(outputs):
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            continue
        generator = torch.Generator().manual_seed(len(roots))
        seed = torch.rand(output.shape, dtype=torch.float64, generator=generator) + 0.5
        roots.append(output)
        seeds.append(seed.to(output.dtype))
    if not roots or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad(roots, wanted, seeds, allow_unused=True, retain_graph=True))


def assert_same(found: Any, expected: Any, what: str) -> None:
    found, expected = tree_leaves(found), tree_leaves(expected)
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            assert same_bits(a, b), f"{what} {i} differs: {a} {b}"
            if a is not None:
                assert a.requires_grad == b.requires_grad, f"{what} {i}: requires_grad differs"
        else:
            assert a == b or a is b, f"{what} {i}: {a!r} is not {b!r}"


def replays(
    function: Callable[..., Any],
    *inputs: Any,
    wanted: Sequence[torch.Tensor] = (),
    buffers: Sequence[torch.Tensor] = (),
) -> ib.tape.Tape:
    """`function` replays: outputs, their requires_grad and the gradients of `wanted` (and of inputs
    that require grad) have the bits of the recording, twice."""
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args)

    wanted = [*wanted, *(t for t in tree_leaves(inputs) if requires_grad(t))]
    outputs, tape = ib.tape.record(counted, inputs, buffers=list(buffers))
    assert tape.refusal is None, tape.refusal
    assert tape.opaque is None, tape.opaque
    generators = torch.get_rng_state()
    replayed = [tape.replay(*inputs) for _ in range(2)]
    assert torch.equal(generators, torch.get_rng_state())
    for again in replayed:
        assert_same(again, outputs, "output")
    expected = gradients(outputs, wanted)
    for again in replayed:
        assert_same(gradients(again, wanted), expected, "gradient")
    assert calls == 1
    return tape


def requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def opaque(
    function: Callable[..., Any],
    *inputs: Any,
    reason: str,
    refusal: str | None = None,
    buffers: Sequence[torch.Tensor] = (),
) -> ib.tape.Tape:
    """No tape can tell what `function` does, and the recording says so, naming the cause."""
    _, tape = ib.tape.record(function, inputs, buffers=list(buffers))
    assert tape.opaque is not None, f"replays:\n{tape}"
    assert reason in tape.opaque, tape.opaque
    if refusal is None:
        assert tape.refusal is None, tape.refusal
    else:
        assert tape.refusal is not None and refusal in tape.refusal, tape.refusal
    return tape
