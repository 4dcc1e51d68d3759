"""Every differentiable operator of torch's own database, as function, method, in place and with
`out=`: recorded and replayed, outputs and gradients bit for bit those of a plain run beside it.

INFINITYBATCH_LONG_TESTS=1 takes every sample; else the first few of each operator. Which calls are
made stands in tests/results/op_db.json, so that none falls out unnoticed:

    INFINITYBATCH_WRITE=1 python -m pytest tests/python/test_tape_ops.py
"""

import collections
import itertools
import json
import os
import warnings
from pathlib import Path

import infinitybatch as ib
import pytest
import torch
from tape_support import gradients, same_bits
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

LONG = os.environ.get("INFINITYBATCH_LONG_TESTS", "0") != "0"
SAMPLES = 100 if LONG else 3
CALLS = Path(__file__).resolve().parents[1] / "results" / "op_db.json"

# Torch's own kernel gives other bits when it is called twice in a row: gelsy's depend on where its
# workspace lies, and the `out=` of these transforms is left unwritten where it is resized.
UNREPEATABLE = {
    ("linalg.lstsq", "function"),
    ("linalg.lstsq", "out"),
    ("linalg.lstsq.grad_oriented", "function"),
    ("fft.ihfft2", "out"),
    ("fft.ihfftn", "out"),
}


def operators():
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        types = op.supported_backward_dtypes("cpu") & op.supported_dtypes("cpu")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex128):
            if op.supports_autograd and dtype in types:
                yield op, dtype
                break


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def bits_equal(a, b):
    a, b = tree_leaves(a), tree_leaves(b)
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    return all(same_bits(x, y) if is_tensor(x) else x == y or x is y for x, y in pairs)


def results_with_gradients(outputs, wanted):
    kept = [t for t in tree_leaves(outputs) if is_tensor(t) and t.requires_grad]
    kept = [t for t in kept if t.layout == torch.strided]
    return gradients(kept, wanted)


def variants(op, sample):
    """(name, function of the arguments) for each way to call it."""
    yield "function", op.op
    if op.method_variant is not None:
        yield "method", op.method_variant
    if op.inplace_variant is not None and not sample.broadcasts_input:
        # A leaf that requires grad must not be written: a value of the function itself is.
        yield "inplace", lambda x, *a, **k: op.inplace_variant(tree_map(clone, x), *a, **k)
    if op.supports_out:

        def into(*args, **kwargs):
            with torch.no_grad():
                shaped = op.op(*args, **kwargs)
                out = tree_map(lambda t: torch.empty_like(t) if is_tensor(t) else t, shaped)
                return op.op(*args, **kwargs, out=out)

        yield "out", into


def clone(value):
    return value.clone() if is_tensor(value) else value


def attempt(function, args):
    """What became of one call: "replays", "wrong: …", why the tape is opaque or refused, what
    recording raised, or None where torch itself refuses the call."""
    leaves, spec = tree_flatten(args)
    tensors = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
    inputs = tuple(leaves[i] for i in tensors)

    def forward(*given):
        filled = list(leaves)
        for i, tensor in zip(tensors, given, strict=True):
            filled[i] = tensor
        a, k = tree_unflatten(filled, spec)
        outputs = function(*a, **k)
        return [t for t in tree_leaves(outputs) if is_tensor(t)]

    wanted = [t for t in inputs if t.requires_grad and t.is_leaf]
    start = [clone(t.detach()) for t in inputs]
    torch.manual_seed(0)
    try:
        native = forward(*inputs)
        expected = results_with_gradients(native, wanted)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
        return None
    with torch.no_grad():
        for tensor, value in zip(inputs, start, strict=True):
            if tensor._version > 0 and not same_bits(tensor, value):
                tensor.copy_(value)
    torch.manual_seed(0)
    try:
        outputs, tape = ib.tape.record(forward, inputs)
        recorded = results_with_gradients(outputs, wanted)
    except Exception as error:  # natively it runs
        return f"recording raises {type(error).__name__}: {str(error).splitlines()[0]}"
    if not bits_equal(outputs, native) or not bits_equal(recorded, expected):
        return "wrong: recorded otherwise than natively"
    if tape.refusal is not None:
        return "refused: " + tape.refusal
    if tape.opaque is not None:
        return tape.opaque
    again = tape.replay(*inputs)
    if not bits_equal(again, outputs):
        return "wrong: outputs"
    if not bits_equal(results_with_gradients(again, wanted), expected):
        return "wrong: gradients"
    return "replays"


def sweep(op, dtype):
    """What one operator does other than replay: {variant: [outcome, …]}."""
    found = collections.defaultdict(set)
    # Not sample_inputs(), which looks at the whole call stack for each sample.
    samples = op.sample_inputs_func(op, "cpu", dtype, True)
    for sample in itertools.islice(samples, SAMPLES):
        for name, function in variants(op, sample):
            args = ((sample.input, *sample.args), dict(sample.kwargs))
            outcome = attempt(function, copy_of(args))
            if outcome is not None:
                found[name].add(outcome)
    return {name: sorted(outcomes - {"replays"}) for name, outcomes in found.items()}


def listed(calls):
    """{operator: the ways in which it is called}, of (operator, way)."""
    found = collections.defaultdict(list)
    for name, variant in sorted(calls):
        found[name].append(variant)
    return dict(found)


def copy_of(args):
    """Samples share memory among themselves; each attempt gets tensors of its own."""

    def own(value):
        if isinstance(value, torch.Generator):
            return value
        if not is_tensor(value) or value.layout != torch.strided:
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tree_map(own, args)


def name_of(op):
    return op.name + ("." + op.variant_test_name if op.variant_test_name else "")


@pytest.fixture(scope="module")
def found():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name_of(op): sweep(op, dtype) for op, dtype in operators()}


def test_all_replay(found):
    calls = {
        (name, variant): reasons
        for name, outcome in found.items()
        for variant, reasons in outcome.items()
        if (name, variant) not in UNREPEATABLE
    }
    made = {"torch": torch.__version__.split("+")[0], "calls": listed(calls)}
    if os.environ.get("INFINITYBATCH_WRITE") == "1":
        text = json.dumps(made, indent=0).replace("\n]", "]").replace("[\n", "[")
        CALLS.write_text(text.replace('",\n"', '", "') + "\n")
    committed = json.loads(CALLS.read_text())
    assert len(committed["calls"]) > 500
    if made["torch"] == committed["torch"]:
        assert made["calls"] == committed["calls"]
    # Not one wrong, and not one that a tape cannot replay either.
    assert {call: reasons for call, reasons in calls.items() if reasons} == {}
