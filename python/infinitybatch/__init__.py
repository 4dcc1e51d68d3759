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

from importlib import import_module
from pathlib import Path
from typing import Any

# ruff: isort: off
from . import _torch_check as _torch_check  # first: another torch could not even load the module
from . import errors, losses, memory, tape
from . import callbacks
from .callbacks import Callback
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
from .audit import AuditReport, audit
from .bench import bench
from .errors import (
    AccumulationNotice,
    AuditError,
    BatchError,
    BudgetExceeded,
    CoupledLossNotice,
    CouplingError,
    DroppedCacheNotice,
    Error,
    InvalidArgument,
    InvalidType,
    LeftTensorNotice,
    MovedModelNotice,
    OffloadError,
    StateError,
    UncompiledNotice,
    Unsupported,
    UnwrappedMethodNotice,
)
from ._offload import Offload
from ._trim import TrimPadding, trim_padding
from .sources import from_batches, from_dataset
from .trainer import EpochSummary, EvaluationResult, Trainer
from .verify import verify
from .virtual_batch import MicroBatch, VirtualBatch
from .windows import Windows, windows
from .wrap import Wrapped, unwrap, wrap

#: For CMake, as torch.utils.cmake_prefix_path: with it in CMAKE_PREFIX_PATH find_package(infinitybatch)
#: finds the installed package. Of a checkout use add_subdirectory.
cmake_prefix_path = str(Path(__file__).parent / "share" / "cmake")

#: Imported when first used: name and the module that has it ("" is a module itself).
_LATER = {
    "InfinityBatch": "infinity_batch",
    "InfinityBatchError": "infinity_batch",
    "InfinityBatchWarning": "infinity_batch",
    "Progress": "progress",
    "histories": "",
    "lightning": "",
    "progress": "",
    "statistics": "",
    "tools": "",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _LATER[name]
    found = import_module(f".{module or name}", __name__)
    globals()[name] = value = getattr(found, name) if module else found
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


__all__ = [
    "AccumulationNotice",
    "AuditError",
    "AuditReport",
    "BatchError",
    "BatchSource",
    "BenchReport",
    "BudgetExceeded",
    "Callback",
    "Candidate",
    "CoupledLossNotice",
    "CouplingError",
    "DroppedCacheNotice",
    "EpochSummary",
    "Error",
    "EvaluationResult",
    "InfinityBatch",
    "InfinityBatchError",
    "InfinityBatchWarning",
    "Instruction",
    "InvalidArgument",
    "InvalidType",
    "LeftTensorNotice",
    "MicroBatch",
    "MovedModelNotice",
    "Offload",
    "OffloadError",
    "Plan",
    "Progress",
    "StateError",
    "UncompiledNotice",
    "StepReport",
    "Trainer",
    "TrimPadding",
    "Unsupported",
    "UnwrappedMethodNotice",
    "VerifyReport",
    "VirtualBatch",
    "Windows",
    "WrapReport",
    "Wrapped",
    "__version__",
    "across_batch",
    "audit",
    "batch_dim",
    "bench",
    "callbacks",
    "cmake_prefix_path",
    "errors",
    "from_batches",
    "from_dataset",
    "histories",
    "losses",
    "make_model",
    "memory",
    "progress",
    "shared",
    "statistics",
    "tape",
    "tools",
    "trim_padding",
    "unwrap",
    "verify",
    "windows",
    "wrap",
]
