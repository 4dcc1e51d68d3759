"""Files of rows, each of which is there as a whole or not at all, whenever the process ends."""

import csv
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Row = Mapping[str, Any]


class LineFile:
    """Appends whole lines, each handed to the system at once. Opened by its first line.

    What a killed process or a full disk left of a line in an earlier run is cut off first.
    """

    def __init__(self, path: Path, append: bool) -> None:
        self.path = path
        self._append = append
        self._file: int | None = None

    def open(self) -> int:
        """Cuts off what an earlier run left of a line, or all of it."""
        if self._file is None:
            self._file = self._open()
        return self._file

    def write(self, line: str) -> None:
        file = self.open()
        rest = memoryview((line + "\n").encode())
        whole = os.fstat(file).st_size
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except BaseException:  # a full disk, Ctrl-C between two parts
            os.ftruncate(file, whole)
            raise

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(file, _whole_lines(file) if self._append else 0)
        self._append = True  # closed and opened again, it goes on
        return file

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _whole_lines(file: int) -> int:
    """Bytes up to the last line that ends."""
    end = os.fstat(file).st_size
    while end:
        begin = max(0, end - 4096)
        at = os.pread(file, end - begin, begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


class JsonRows:
    """One JSON object a line. What is no finite number stands as "NaN", "Infinity", "-Infinity"."""

    def __init__(self, path: Path, append: bool) -> None:
        self._lines = LineFile(path, append)

    def write(self, row: Row) -> None:
        self._lines.write(json.dumps({name: _json(plain(value)) for name, value in row.items()}))

    def close(self) -> None:
        self._lines.close()


class CsvRows:
    """Comma separated values under one line of names. A row with a name that has no column yet
    widens the table: the file is written anew beside itself, and takes its place at once."""

    def __init__(self, path: Path, append: bool) -> None:
        self._lines = LineFile(path, append)
        self._names: list[str] | None = [] if not append else None

    def write(self, row: Row) -> None:
        if self._names is None:
            self._names = self._names_in_file()
        new = [name for name in row if name not in self._names]
        if new and self._names:
            self._widen(self._names + new)
        elif new:
            self._names = new
            self._lines.write(_csv(new))
        self._lines.write(_csv([plain(row.get(name)) for name in self._names]))

    def _names_in_file(self) -> list[str]:
        self._lines.open()  # whole lines from here on
        with self._lines.path.open(newline="") as file:
            first = file.readline()
        return next(csv.reader([first])) if first.endswith("\n") else []

    def _widen(self, names: list[str]) -> None:
        self._lines.close()
        path = self._lines.path
        beside = path.with_name(path.name + ".new")
        with path.open(newline="") as old, beside.open("w", newline="") as new:
            reader = csv.reader(old)
            next(reader)
            table = csv.writer(new, lineterminator="\n")
            table.writerow(names)
            table.writerows(row + [""] * (len(names) - len(row)) for row in reader)
        os.replace(beside, path)
        self._names = names

    def close(self) -> None:
        self._lines.close()


def _csv(cells: list[Any]) -> str:
    text = io.StringIO()
    lines = [" ".join(cell.splitlines()) if isinstance(cell, str) else cell for cell in cells]
    csv.writer(text, lineterminator="").writerow(lines)
    return text.getvalue()


def plain(value: Any) -> Any:
    """Numbers of torch and NumPy as Python's."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
    if isinstance(value, torch.Tensor) or type(value).__module__ == "numpy":
        return value.item() if math.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, torch.device | torch.dtype | Path):
        return str(value)
    return value


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _json(plain(one)) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(plain(one)) for one in value]
    return value if isinstance(value, str | int | float | None) else str(value)
