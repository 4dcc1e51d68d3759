"""Real data as MNIST-format files, and larger data made of it."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / "build" / "benchmarks"  # not committed, made once
FARTHEST = 2  # pixels that an image is moved by, in each direction
CHUNK = 10_000  # rows made at once


def _made_by(script: str, folder: Path) -> Path:
    command = [sys.executable, str(ROOT / "scripts" / script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script}: {(done.stderr or done.stdout).strip()}")
    return folder


def mnist() -> Path:
    """60,000 images of 28 by 28 pixels and 10,000 held out, fetched where they are not there."""
    return _made_by("fetch_mnist.py", ROOT / "data" / "mnist")


def digits() -> Path:
    """1,438 images of 8 by 8 pixels and 359 held out, out of scikit-learn."""
    return _made_by("export_digits.py", MADE / "digits")


def part(folder: Path, name: str, dimensions: int) -> Path:
    """One of the four files, in either of the two spellings that they have had."""
    (found,) = folder.glob(f"{name}?idx{dimensions}-ubyte")
    return found


def read(path: Path) -> np.ndarray:
    """A file of bytes, mapped: a magic number that ends in the dimensions, then their sizes."""
    with path.open("rb") as file:
        dimensions = file.read(4)[3]
        shape = np.frombuffer(file.read(4 * dimensions), ">u4")
    return np.memmap(path, np.uint8, "r", 4 + 4 * dimensions, tuple(int(size) for size in shape))


def _create(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    header = np.array([0x0800 + len(shape), *shape], ">u4").tobytes()
    path.write_bytes(header)
    return np.memmap(path, np.uint8, "r+", len(header), shape)


def moved(images: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Each image moved by its own numbers of pixels, at most FARTHEST; black comes in."""
    count, height, width = images.shape
    padding = [(0, 0), (FARTHEST, FARTHEST), (FARTHEST, FARTHEST)]
    padded = np.pad(images, padding)
    rows = FARTHEST - down[:, None, None] + np.arange(height)[None, :, None]
    columns = FARTHEST - right[:, None, None] + np.arange(width)[None, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]


def enlarged(source: Path, count: int) -> Path:
    """`count` samples, those of `source` over and over, each moved anew. Held out: as they were."""
    folder = MADE / f"{source.name}-{count}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    images, labels = (
        read(part(source, f"train-{n}", d)) for n, d in (("images", 3), ("labels", 1))
    )
    made = _create(folder / "train-images-idx3-ubyte", (count, *images.shape[1:]))
    classes = _create(folder / "train-labels-idx1-ubyte", (count,))
    generator = np.random.default_rng(0)
    for begin in range(0, count, CHUNK):
        rows = np.arange(begin, min(begin + CHUNK, count)) % len(images)
        down, right = generator.integers(-FARTHEST, FARTHEST + 1, (2, len(rows)))
        made[begin : begin + len(rows)] = moved(images[rows], down, right)
        classes[begin : begin + len(rows)] = labels[rows]
    for name, dimensions in (("t10k-images", 3), ("t10k-labels", 1)):
        shutil.copy(part(source, name, dimensions), folder / f"{name}-idx{dimensions}-ubyte")
    (folder / "complete").touch()
    return folder
