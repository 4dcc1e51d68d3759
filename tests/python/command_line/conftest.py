import pathlib

import numpy
import pytest
from command_line_tools import idx


@pytest.fixture(scope="module")
def samples() -> tuple[numpy.ndarray, numpy.ndarray]:
    """300 images of 8 by 8 of 3 classes: a bright square in one of three places, and noise."""
    random = numpy.random.default_rng(0)
    labels = numpy.arange(300) % 3
    images = random.integers(0, 80, (300, 8, 8))
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 3, 2 * label : 2 * label + 3] += 120
    return images.astype(numpy.uint8), labels.astype(numpy.uint8)


@pytest.fixture(scope="module")
def folder(samples, tmp_path_factory) -> pathlib.Path:
    """The samples in every format that is read."""
    images, labels = samples
    path = tmp_path_factory.mktemp("data")
    (path / "pair").mkdir()
    (path / "pair" / "train-images-idx3-ubyte").write_bytes(idx(images))
    (path / "pair" / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    (path / "images.idx").write_bytes(idx(images))
    (path / "labels.idx").write_bytes(idx(labels))
    numpy.save(path / "x.npy", images.astype(numpy.float32))
    numpy.save(path / "y.npy", labels.astype(numpy.int64))
    numpy.save(path / "vectors.npy", images.reshape(300, 64).astype(numpy.float64))
    text = "the quick brown fox jumps over the lazy dog. " * 200
    (path / "text.txt").write_text(text)
    return path


@pytest.fixture(scope="module")
def pair(folder) -> tuple:
    return ("--data", folder / "pair")
