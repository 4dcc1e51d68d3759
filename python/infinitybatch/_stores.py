"""Where a container keeps its entries: on the device, in host memory, on disk, nowhere."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from . import _checks
from .errors import OffloadError

Handle = Any


class Store:
    """Keeps what it is given as it is. What it returns from `put` is what `get` and `drop` take;
    others keep any nested structure of tensors."""

    def put(self, value: Any) -> Handle:
        return value

    def take(self, value: Any) -> Handle:
        """As `put`, for what is a copy already."""
        return value

    def get(self, handle: Handle) -> Any:
        return handle

    def drop(self, handle: Handle) -> None:
        """Frees what only this entry needs."""


class DeviceStore(Store):
    """Copies without a graph where the tensors are: a view would hold all of what it looks into."""

    def put(self, value: Any) -> Handle:
        return map_leaves(lambda tensor: tensor.detach().clone(), value)


class HostStore(Store):
    def put(self, value: Any) -> Handle:
        return map_leaves(lambda tensor: tensor.detach().to("cpu", copy=True), value)


class DiskStore(Store):
    """One file an entry; read anew each time that it is asked for.

    A folder of the user's own keeps its files when the run ends; without one a temporary folder
    lives as long as the store.
    """

    def __init__(self, name: str, folder: str | os.PathLike[str] | None) -> None:
        self._name = name
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="infinitybatch-")
            folder = self._temporary.name
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count = 0

    def put(self, value: Any) -> Handle:
        return self.take(HostStore().put(value))

    def take(self, value: Any) -> Handle:
        leaves, layout = _pytree.tree_flatten(value)
        tensors = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        path = self._free_path()
        try:
            torch.save(tensors, path)
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            needed = sum(tensor.nbytes for tensor in tensors.values())
            raise OffloadError(
                f"{self._name} of a history cannot be written to {self._folder} ({needed:,} bytes): "
                f'{error}. Keep fewer, or elsewhere: where="host"',
                needed=needed,
            ) from error
        return path, layout, others

    def _free_path(self) -> Path:
        while True:
            path = self._folder / f"{self._name}-{self._count:08d}.pt"
            self._count += 1
            if not path.exists():  # an earlier run's, in a folder of the user's own
                return path

    def get(self, handle: Handle) -> Any:
        path, layout, others = handle
        leaves = list(others)
        for at, tensor in torch.load(path, map_location="cpu", weights_only=True).items():
            leaves[at] = tensor
        return _pytree.tree_unflatten(leaves, layout)

    def drop(self, handle: Handle) -> None:
        handle[0].unlink(missing_ok=True)


def make(name: str, where: str, folder: str | os.PathLike[str] | None) -> Store | None:
    """None for a store that keeps nothing."""
    _checks.one_of("where", where, "device", "host", "disk", "none")
    if where == "disk":
        return DiskStore(name, folder)
    return {"device": DeviceStore(), "host": HostStore(), "none": None}[where]


def map_leaves(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Changes tensors; copies NumPy's arrays; leaves all else."""

    def leaf(one: Any) -> Any:
        if isinstance(one, Tensor):
            return change(one)
        return one.copy() if type(one).__module__ == "numpy" else one

    return _pytree.tree_map(leaf, value)
