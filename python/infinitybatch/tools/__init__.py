"""Helpers around training: memory snapshots, reproducible runs, comparisons of networks.

from infinitybatch import tools

history = tools.MemoryHistory()
history.append("before", "cpu")
...
print(history)
"""

from .comparisons import (
    Comparison,
    compare_networks,
    compare_tensors,
    is_equal_network,
    is_equal_with_error,
)
from .determinism import Determinism, determinize
from .snapshots import CudaHistory, CudaMemorySnapShot, MemoryHistory, MemorySnapShot

__all__ = [
    "Comparison",
    "CudaHistory",
    "CudaMemorySnapShot",
    "Determinism",
    "MemoryHistory",
    "MemorySnapShot",
    "compare_networks",
    "compare_tensors",
    "determinize",
    "is_equal_network",
    "is_equal_with_error",
]
