"""Exports scikit-learn's handwritten digits as IDX files, the command line's default data.

    python scripts/export_digits.py [data/digits]

1,797 grey images of 8 by 8 pixels (values 0 to 16) of the digits 0 to 9. Every fifth image is held
out, so the split is the same on every machine: 1,438 to train, 359 held out. The files have the names
and the format of MNIST, so that one reader serves both.
"""

import argparse
import os
import pathlib
import struct
import sys
import tempfile

HELD_OUT_EVERY = 5
UNSIGNED_BYTE = 0x08


def idx_bytes(array) -> bytes:
    """`array` (unsigned bytes, any number of dimensions) in the IDX format: big-endian header, C order."""
    header = struct.pack(">BBBB", 0, 0, UNSIGNED_BYTE, array.ndim)
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_if_changed(path: pathlib.Path, content: bytes) -> bool:
    """Writes through a temporary file, so that nobody reads half a file. Returns whether it wrote."""
    if path.exists() and path.read_bytes() == content:
        return False
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return True


def export(folder: pathlib.Path) -> None:
    try:
        import numpy
        from sklearn.datasets import load_digits
    except ImportError as error:
        sys.exit(f"export_digits: {error}; install it with: python -m pip install scikit-learn")

    digits = load_digits()
    images = digits.images.astype(numpy.uint8)
    labels = digits.target.astype(numpy.uint8)
    held_out = numpy.arange(len(images)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1

    folder.mkdir(parents=True, exist_ok=True)
    wrote = [
        write_if_changed(folder / name, idx_bytes(array))
        for name, array in (
            ("train-images-idx3-ubyte", images[~held_out]),
            ("train-labels-idx1-ubyte", labels[~held_out]),
            ("t10k-images-idx3-ubyte", images[held_out]),
            ("t10k-labels-idx1-ubyte", labels[held_out]),
        )
    ]
    state = "wrote" if any(wrote) else "is up to date:"
    train, rest = int((~held_out).sum()), int(held_out.sum())
    print(f"{folder} {state} {train} digits to train, {rest} held out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="data/digits", type=pathlib.Path)
    export(parser.parse_args().folder)
