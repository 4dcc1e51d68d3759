"""Train with any batch on any device.

The gradient is the one that the whole batch would have given on a device with unlimited memory, and
the peak stays inside the bytes that you allow.

    import infinitybatch as ib

    batch = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), memory_budget="8GiB")
    for images, labels in loader:
        optimizer.zero_grad()
        report = batch.backward(images, labels)
        optimizer.step()
"""

# ruff: isort: off
from . import _torch_check as _torch_check  # first: another torch could not even load the module
from . import errors, losses, memory, tape
from ._C import (
    BatchSource,
    BenchReport,
    Candidate,
    Instruction,
    Plan,
    StepReport,
    VerifyReport,
    WrapReport,
    across_batch,
    batch_dim,
    shared,
)
from ._build import VERSION as __version__
from ._model import make_model
from .bench import bench
from .errors import (
    BatchError,
    BudgetExceeded,
    CoupledLossNotice,
    CouplingError,
    DroppedCacheNotice,
    Error,
    InvalidArgument,
    InvalidType,
    LeftTensorNotice,
    OffloadError,
    StateError,
    UncompiledNotice,
    Unsupported,
    UnwrappedMethodNotice,
)
from ._offload import Offload
from .sources import from_batches, from_dataset
from .verify import verify
from .virtual_batch import MicroBatch, VirtualBatch
from .windows import Windows, windows
from .wrap import Wrapped, unwrap, wrap

__all__ = [
    "BatchError",
    "BatchSource",
    "BenchReport",
    "BudgetExceeded",
    "Candidate",
    "CoupledLossNotice",
    "CouplingError",
    "DroppedCacheNotice",
    "Error",
    "Instruction",
    "InvalidArgument",
    "InvalidType",
    "LeftTensorNotice",
    "MicroBatch",
    "Offload",
    "OffloadError",
    "Plan",
    "StateError",
    "UncompiledNotice",
    "StepReport",
    "Unsupported",
    "UnwrappedMethodNotice",
    "VerifyReport",
    "VirtualBatch",
    "Windows",
    "WrapReport",
    "Wrapped",
    "__version__",
    "across_batch",
    "batch_dim",
    "bench",
    "errors",
    "from_batches",
    "from_dataset",
    "losses",
    "make_model",
    "memory",
    "shared",
    "tape",
    "unwrap",
    "verify",
    "windows",
    "wrap",
]
