"""Options that are none: each mistake with its error and what the message says."""

import infinitybatch as ib
import pytest
from misuse_support import X, check, step
from support import mlp

MISUSES = {
    "micro_batch_size 0": (lambda: step(micro_batch_size=0), ib.InvalidArgument, "1 or more"),
    "micro_batch_size below 0": (
        lambda: step(micro_batch_size=-4),
        ib.InvalidArgument,
        "1 or more",
    ),
    "micro_batch_size a fraction": (
        lambda: step(micro_batch_size=2.5),
        ib.InvalidType,
        "whole number",
    ),
    "micro_batch_size true": (lambda: step(micro_batch_size=True), ib.InvalidType, "whole number"),
    "a budget of nonsense": (
        lambda: step(memory_budget="lots"),
        ib.InvalidArgument,
        "lots",
    ),
    "a budget of 0": (lambda: step(memory_budget=0), ib.InvalidArgument, "0"),
    "a budget below 0": (lambda: step(memory_budget=-1), ib.InvalidArgument, "-1"),
    "a budget of more than all": (lambda: step(memory_budget=1.5), ib.InvalidArgument, "1.5"),
    "a budget of another type": (
        lambda: step(memory_budget=[1]),
        ib.InvalidType,
        "memory_budget must be a number of bytes.*not list",
    ),
    "a budget that is true": (lambda: step(memory_budget=True), ib.InvalidType, "not bool"),
    "a budget that is not a number": (
        lambda: step(memory_budget=float("nan")),
        ib.InvalidArgument,
        'memory_budget is nan.*"512MiB"',
    ),
    "a budget of infinity": (
        lambda: step(memory_budget=float("inf")),
        ib.InvalidArgument,
        "memory_budget is inf",
    ),
    "a budget in percent": (lambda: step(memory_budget="150%"), ib.InvalidArgument, '"150%"'),
    "a budget of no text": (lambda: step(memory_budget=""), ib.InvalidArgument, 'budget is ""'),
    "a wrapped model's budget that is true": (
        lambda: ib.wrap(mlp(), memory_budget=True),
        ib.InvalidType,
        "not bool",
    ),
    "a size in words": (
        lambda: step(micro_batch_size="4"),
        ib.InvalidType,
        "micro_batch_size must be a whole number of samples, not str",
    ),
    "an unknown batch_coupling": (
        lambda: step(batch_coupling="off"),
        ib.InvalidArgument,
        "per_micro_batch",
    ),
    "a callback that is none": (
        lambda: step(on_micro_batch=3),
        ib.InvalidType,
        "on_micro_batch must be callable",
    ),
    "a grad_scaler that is none": (lambda: step(grad_scaler=3), ib.InvalidType, "grad_scaler"),
    "a truth value in words": (
        lambda: step(static_graph="False", micro_batch_size=4),
        ib.InvalidType,
        "static_graph is 'False'; it is True or False",
    ),
    "a truth value that is a number": (lambda: step(use_tapes=0), ib.InvalidType, "use_tapes is 0"),
    "a truth value of wrap": (
        lambda: ib.wrap(mlp(), match_native_rng=None),
        ib.InvalidType,
        "match_native_rng is None",
    ),
    "a bandwidth below 0": (
        lambda: step(offload=ib.Offload(host_bandwidth=-1)),
        ib.InvalidArgument,
        "is -1",
    ),
    "a bandwidth that is no number": (
        lambda: ib.wrap(mlp(), offload=ib.Offload(host_bandwidth=float("nan"))),
        ib.InvalidArgument,
        "host_bandwidth is nan",
    ),
    "a bandwidth in words": (
        lambda: step(offload=ib.Offload(host_bandwidth="fast")),
        ib.InvalidType,
        "host_bandwidth must be a number of bytes per second, not 'fast'",
    ),
    "a directory that is a number": (
        lambda: step(offload=ib.Offload(directory=3)),
        ib.InvalidType,
        "a path",
    ),
    "retained_micro_batches without a size": (
        lambda: step(retained_micro_batches=2),
        ib.InvalidArgument,
        "retained_micro_batches is 2 without micro_batch_size",
    ),
    "retained_micro_batches None": (
        lambda: step(retained_micro_batches=None),
        ib.InvalidType,
        "whole number of micro-batches, not NoneType",
    ),
    "micro_batch_size of more than 64 bits": (
        lambda: step(micro_batch_size=10**30),
        ib.InvalidArgument,
        r"micro_batch_size is 1e\+30",
    ),
    "a budget of more than 64 bits": (
        lambda: step(memory_budget=10**30),
        ib.InvalidArgument,
        "memory_budget is a whole number of more than 64 bits",
    ),
    "a host budget of nonsense": (
        lambda: step(offload=ib.Offload(host_budget="nope")),
        ib.InvalidArgument,
        "host_budget is .nope",
    ),
    "a limit of nonsense": (lambda: ib.memory.limit("lots"), ib.InvalidArgument, "the limit is"),
    "a device that is not there": (lambda: ib.memory.stats(99), ib.Error, "99"),
    "a device that is none": (
        lambda: ib.memory.reset_peak([1]),
        ib.InvalidType,
        "device must be a torch.device",
    ),
    "an output_batch_dim below 0": (
        lambda: ib.wrap(mlp(), output_batch_dim=-1),
        ib.InvalidArgument,
        "output_batch_dim is -1; count dimensions from the front",
    ),
    "an output_batch_dim that no output has": (
        lambda: ib.wrap(mlp(), micro_batch_size=4, output_batch_dim=7)(X),
        ib.InvalidArgument,
        "output_batch_dim is 7, but outputs have at most 2 dimensions",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    check(*MISUSES[name])
