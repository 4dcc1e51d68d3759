"""Damaged data files: each has its message."""

import re
import struct

import numpy
import pytest
from command_line_tools import ERROR, idx, run


def npy(
    header: str, data: bytes = b"\0" * 64, version: int = 1, length: int | None = None
) -> bytes:
    size = len(header) if length is None else length
    packed = struct.pack("<H" if version == 1 else "<I", size)
    return b"\x93NUMPY" + bytes([version, 0]) + packed + header.encode() + data


def header(descr="'<f4'", order="False", shape="(4, 4)") -> str:
    # Padded so that the data begin at a multiple of 64 bytes, as NumPy does.
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    return text + " " * (-(10 + len(text) + 1) % 64) + "\n"


DAMAGED = {
    "npy empty": (b"", "is empty"),
    "npy magic": (b"PK\3\4 not an array", "no NumPy .npy file"),
    "npy version": (npy(header(), version=9), "version 9"),
    "npy cut in header": (npy(header(), length=60000), "ends inside its header"),
    "npy cut in data": (
        npy(header(), b"\0" * 63),
        "holds 63 bytes of data where its header promises 64",
    ),
    "npy too long": (npy(header(), b"\0" * 65), "holds 65 bytes"),
    "npy fortran cut": (npy(header(order="True"), b"\0" * 63), "holds 63 bytes"),
    "npy big-endian cut": (npy(header("'>f4'"), b"\0" * 63), "holds 63 bytes"),
    "npy unsigned cut": (npy(header("'<u4'"), b"\0" * 60), "holds 60 bytes"),
    "npy long doubles": (npy(header("'<f16'")), r"type '<f16'.*astype\('float32'\)"),
    "npy complex": (npy(header("'<c8'")), r"type '<c8'.*astype\('float32'\)"),
    "npy no byte order": (npy(header("'f4'")), "type 'f4'"),
    "npy no type": (npy(header("''")), "type ''"),
    "npy big-endian overflow": (
        npy(header("'>f4'", shape="(4294967296, 4294967296)")),
        "shape is impossible",
    ),
    "npy objects": (npy(header("'|O'")), r"type '\|O'"),
    "npy structured": (npy(header("[('a', '<f4')]")), "structured array"),
    "npy overflow": (npy(header(shape="(4294967296, 4294967296)")), "shape is impossible"),
    "npy huge number": (npy(header(shape="(99999999999999999999,)")), "a number is too large"),
    "npy negative": (npy(header(shape="(-4, 4)")), "expected a number"),
    "npy code": (npy(header(shape="__import__('os')")), "expected '\\('"),
    "npy unknown key": (npy("{'descr': '<f4', 'evil': 1}\n"), "unknown key 'evil'"),
    "npy no shape": (npy("{'descr': '<f4', 'fortran_order': False}\n"), "shape are needed"),
    "npy not closed": (npy("{'descr': '<f4"), "a string does not end"),
    "npy unaligned": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4)}"),
        "not aligned",
    ),
    "npy scalar": (npy(header(shape="()"), b"\0" * 4), "has 0 dimensions"),
    "npy no samples": (npy(header(shape="(0, 4)"), b""), "holds no samples"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_npy(case, folder, tmp_path):
    content, message = DAMAGED[case]
    (tmp_path / "x.npy").write_bytes(content)
    result = run("train", "--data", "x.npy", "--labels", folder / "y.npy", cwd=tmp_path)
    assert result.returncode == ERROR, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("infinitybatch: x.npy: ")
    assert re.search(message, result.stderr), result.stderr


GOOD_IDX = idx(numpy.zeros((6, 8, 8)))
DAMAGED_IDX = {
    "cut": (GOOD_IDX[:-1], "holds 383 bytes of data where its header promises 384"),
    "cut in header": (GOOD_IDX[:9], "with a whole header"),
    "gzip": (
        b"\x1f\x8b\x08\0\0\0\0\0",
        "is compressed; unpack it with: mv .*-ubyte .*-ubyte.gz && gunzip .*-ubyte.gz",
    ),
    "not idx": (b"\x89PNG....", "is no IDX file"),
    "floats": (b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", "IDX element type 13"),
    "dimensions": (b"\0\0\x08\x09" + bytes(36), "says it has 9 dimensions"),
    "overflow": (b"\0\0\x08\x04" + b"\xff" * 16, "shape is impossible"),
    "other count": (
        idx(numpy.zeros((5, 8, 8))),
        "has 5 samples but .* has 6 labels; give files that are a pair",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_IDX)
def test_damaged_idx(case, tmp_path):
    content, message = DAMAGED_IDX[case]
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(numpy.arange(6) % 2))
    result = run("train", "--data", tmp_path)
    assert result.returncode == ERROR, result.stderr
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr), result.stderr


def test_values_that_are_not_finite(folder, samples, tmp_path):
    images = samples[0].astype(numpy.float32)
    images[7, 0, 0] = numpy.nan
    numpy.save(tmp_path / "x.npy", images)
    result = run("train", "--data", tmp_path / "x.npy", "--labels", folder / "y.npy")
    assert result.returncode == ERROR and "not finite" in result.stderr


@pytest.mark.parametrize("label", [-1, 70000])
def test_labels_that_are_no_classes(folder, samples, tmp_path, label):
    labels = samples[1].astype(numpy.int64)
    labels[3] = label
    numpy.save(tmp_path / "y.npy", labels)
    result = run("train", "--data", folder / "x.npy", "--labels", tmp_path / "y.npy")
    assert result.returncode == ERROR
    assert f"label {label} of sample 3 is no class" in result.stderr
