"""Ops that fail where no dispatch mode could see them: below Python, so that forwards are cut and
offloaded as they always are."""

import ctypes
import os
import pathlib
from collections.abc import Iterator

import pytest

_root = pathlib.Path(__file__).parents[2]
_build = pathlib.Path(os.environ.get("INFINITYBATCH_BUILD_DIR", _root / "build" / "release"))
_faults = ctypes.CDLL(str(_build / "lib" / "libinfinitybatch_faults.so"))
_faults.faults_begin.argtypes = [ctypes.c_int64]
_faults.faults_seen.restype = ctypes.c_int64
_faults.faults_last.restype = ctypes.c_char_p


@pytest.fixture
def kernels() -> Iterator[None]:
    """Ops of this test are counted, from its first step on: recordings know under which dispatch
    keys their ops ran."""
    _faults.faults_begin(0)
    _faults.faults_count(1)
    yield
    _faults.faults_count(0)


class FailingKernel:
    """Lets the n-th op fail with NotImplementedError; 0 only counts."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def __enter__(self) -> "FailingKernel":
        _faults.faults_begin(self.place)
        return self

    def __exit__(self, *exception: object) -> None:
        self.seen = _faults.faults_seen()
        self.failed = 0 < self.place <= self.seen
        _faults.faults_begin(0)

    @property
    def name(self) -> str:
        """Of the op that failed."""
        return _faults.faults_last().decode()
