"""Every format that --data takes trains to the same bits as the .npy file with the same values."""

import re
import struct
import zipfile
import zlib
from pathlib import Path

import numpy
import pytest
from command_line_tools import ERROR, OK, USAGE, epochs, events, run

SMALL = ("--model", "mlp", "--width", "8", "--depth", "1", "--epochs", "2", "--batch-size", "64")
N = 120


def losses(*arguments) -> list[float]:
    return [event["loss"] for event in epochs(run("train", *arguments, *SMALL, "--json"))]


def samples(shape=(6,), dtype=numpy.int8) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Small whole numbers, which every type holds exactly."""
    random = numpy.random.default_rng(1)
    labels = numpy.arange(N) % 3
    inputs = random.integers(0, 2, (N, *shape)) + (labels.reshape(-1, *[1] * len(shape)) == 1)
    return (inputs if dtype is not bool else inputs % 2).astype(dtype), labels


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    """The losses of the values as float32 in C order."""
    return plain_losses(tmp_path_factory.mktemp("plain"), *samples())


def plain_losses(path: Path, inputs: numpy.ndarray, labels: numpy.ndarray) -> list[float]:
    numpy.save(path / "x.npy", inputs.astype("float32"))
    numpy.save(path / "y.npy", labels.astype("int64"))
    result = losses("--data", path / "x.npy", "--labels", path / "y.npy")
    assert len(result) == 2 and result[1] < result[0]
    return result


TYPES = ["i1", "u1", *[f"{o}{t}" for o in "<>" for t in "i2 i4 i8 u2 u4 u8 f2 f4 f8".split()]]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", TYPES)
def test_types_and_orders(dtype, order, plain, tmp_path):
    inputs, labels = samples()
    numpy.save(tmp_path / "x.npy", numpy.asarray(inputs.astype(dtype), order=order))
    integers = dtype if "f" not in dtype else ">u2"
    numpy.save(tmp_path / "y.npy", labels.astype(integers))
    assert losses("--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy") == plain


@pytest.mark.parametrize("order", ["C", "F"])
def test_images_in_fortran_order(order, tmp_path):
    inputs, labels = samples((3, 4, 5))
    expected = plain_losses(tmp_path, inputs, labels)
    numpy.save(tmp_path / "x.npy", numpy.asarray(inputs.astype(">f4"), order=order))
    assert losses("--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy") == expected


def test_bool(tmp_path):
    inputs, labels = samples(dtype=bool)
    inputs[:, 0] = labels == 1
    expected = plain_losses(tmp_path, inputs, labels)
    numpy.save(tmp_path / "x.npy", numpy.asfortranarray(inputs))
    assert losses("--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy") == expected


def test_wide_unsigned_values_are_themselves(tmp_path):
    inputs, labels = samples()
    for dtype, factor in (("u2", 20000), ("u4", 1 << 30), (">u8", 1 << 40)):
        wide = inputs.astype(dtype) * numpy.asarray(factor, dtype)
        expected = plain_losses(tmp_path, wide.astype("float64"), labels)
        numpy.save(tmp_path / "x.npy", wide)
        assert losses("--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy") == expected


def test_what_no_int64_holds(tmp_path):
    inputs, labels = samples(dtype=numpy.uint64)
    inputs[3, 3] = 2**64 - 1
    numpy.save(tmp_path / "x.npy", inputs)
    numpy.save(tmp_path / "y.npy", labels)
    result = run("train", "--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy")
    assert result.returncode == ERROR and "x.npy: holds 18446744073709551615" in result.stderr


# ---- .npz ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (("inputs", "labels"), ()),
        (("x", "y"), ()),
        (("images", "targets"), ()),
        (("mine", "theirs"), ("--inputs", "mine", "--labels", "theirs")),
    ],
)
def test_npz(save, names, flags, plain, tmp_path):
    inputs, labels = samples()
    arrays = {names[0]: inputs.astype(">i4"), names[1]: labels, "other": numpy.zeros(3)}
    save(tmp_path / "d.npz", **arrays)
    assert losses("--data", tmp_path / "d.npz", *flags) == plain


def test_npz_with_its_own_split(tmp_path):
    inputs, labels = samples((4, 4))
    numpy.savez(tmp_path / "d.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    result = run("train", "--data", tmp_path / "d.npz", *SMALL, "--json")
    assert result.returncode == OK, result.stderr
    result = run("train", "--data", tmp_path / "d.npz", *SMALL, "--held-out", "0.1")
    assert result.returncode == USAGE and "brings its own held-out samples" in result.stderr


def npz(path: Path, **arrays) -> Path:
    numpy.savez(path / "d.npz", **arrays)
    return path / "d.npz"


def test_npz_that_is_not_clear(tmp_path):
    x, y = samples()

    def refused(arrays: dict, message: str, *flags, code: int = USAGE) -> None:
        result = run("train", "--data", npz(tmp_path, **arrays), *flags)
        assert result.returncode == code and result.stderr.count("\n") == 1, result.stderr
        assert re.search(message, result.stderr), result.stderr

    refused({"a": x, "b": y}, "has no array called inputs, .*; it has a, b: name one with --inputs")
    refused({"x": x, "b": y}, "has no array called labels, .*; it has x, b: name one with --labels")
    refused({"x": x, "images": x, "y": y}, "several arrays that may be meant: x, images")
    refused({"x": x, "y": y}, "--labels z is no array of .*d.npz, which has x, y", "--labels", "z")
    refused({"x": x, "y": y[1:]}, r"d.npz\[x\] has 120 samples but", code=ERROR)
    refused({"x": numpy.array(["a"] * N), "y": y}, r"d.npz\[x\]: has elements of type", code=ERROR)
    with zipfile.ZipFile(tmp_path / "other.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    result = run("train", "--data", tmp_path / "other.npz")
    assert result.returncode == ERROR and "holds no NumPy arrays" in result.stderr


@pytest.mark.parametrize("save", [numpy.savez, numpy.savez_compressed])
def test_damaged_npz(save, tmp_path):
    x, y = samples((40,))
    save(tmp_path / "good.npz", x=x, y=y)
    good = (tmp_path / "good.npz").read_bytes()
    flipped = bytearray(good)
    flipped[400] ^= 0x10
    broken = {"cut": good[: len(good) // 2], "flipped": bytes(flipped), "other": b"no archive"}
    for name, content in broken.items():
        (tmp_path / f"{name}.npz").write_bytes(content)
        result = run("train", "--data", tmp_path / f"{name}.npz")
        assert result.returncode == ERROR and result.stderr.count("\n") == 1, result.stderr
        assert re.search("cannot be unpacked; the archive is damaged", result.stderr), name


# ---- .csv ---------------------------------------------------------------------------------------


def csv_text(delimiter=",", header=True, position=0, end="\n", words=False) -> str:
    inputs, labels = samples()
    lines = []
    if header:
        lines.append([f"f{i}" for i in range(6)])
        lines[0].insert(position, "Label")
    for row, label in zip(inputs, labels, strict=True):
        fields = [str(value) for value in row]
        fields.insert(position, "cab"[2 - label] if words else str(label))
        lines.append(fields)
    return end.join(delimiter.join(fields) for fields in lines) + end


CSV = {
    "usual name": (csv_text(), ()),
    "named": (csv_text().replace("Label", "price class"), ("--labels", "price class")),
    "first of none": (csv_text(header=False), ("--labels", "1")),
    "last of none": (csv_text(header=False, position=6), ("--labels", "-1")),
    "in the middle": (csv_text(position=3), ("--labels", "4")),
    "semicolons": (csv_text(";"), ()),
    "tabs and carriage returns": (csv_text("\t", end="\r\n"), ()),
    "blank lines, no last end": ("\n" + csv_text().replace("\n", "\n\n").rstrip(), ()),
    "byte order mark": ("\ufeff" + csv_text(), ()),
    "blanks, quotes, signs": (
        re.sub(r"(?<=[,\n])([01])(?=[,\n])", r' "+\1" ', csv_text()),
        (),
    ),
    "floats": (csv_text().replace("1,", "1.0e0,").replace("f1.0e0", "f1"), ()),
    "savetxt": ("# " + csv_text(), ()),
    "quoted names": (csv_text().replace("f1", '"f, ""1""\n"'), ()),
}


@pytest.mark.parametrize("case", CSV)
def test_csv(case, plain, tmp_path):
    text, flags = CSV[case]
    (tmp_path / "d.csv").write_text(text, newline="")
    assert losses("--data", tmp_path / "d.csv", *flags) == plain


@pytest.mark.parametrize("header", [True, False])
def test_csv_classes_with_names_are_numbered_by_alphabet(header, tmp_path):
    inputs, labels = samples()
    # Class 0 is "b", 1 is "a", 2 is "c".
    expected = plain_losses(tmp_path, inputs, numpy.array([1, 0, 2])[labels])
    text = csv_text(header=header, position=6, words=True)
    (tmp_path / "d.csv").write_text(text)
    assert losses("--data", tmp_path / "d.csv", "--labels", "7") == expected


def test_csv_says_what_it_lacks_and_where(tmp_path):
    def refused(text: str, message: str, *flags, code: int = ERROR) -> None:
        (tmp_path / "d.csv").write_text(text)
        result = run("train", "--data", "d.csv", *flags, cwd=tmp_path)
        assert result.returncode == code and result.stderr.count("\n") == 1, result.stderr
        assert re.search(message, result.stderr), result.stderr

    head = "a,b,label\n"
    refused(head + "1,2,0\n1,,1\n", "d.csv: line 3 column 'b': is empty; fill it in")
    refused(head + "1,2,0\n\n1,x,1\n", "line 4 column 'b': 'x' is not a number")
    refused(head + "1,nan,0\n", "line 2 column 'b': 'nan' is not a finite number")
    refused(head + "1,1e999,0\n", "line 2 column 'b': '1e999' is not a finite number")
    refused("a;b;label\n1;2,5;0\n", "'2,5' is not a number; write a point in place of the comma")
    refused(head + "1,2,0\n1,2\n", "line 3 has 2 fields, the first has 3")
    refused(
        head + "1,2,0\n1,2,cat\n", "line 3 column 'label': class 'cat' is a name, others are nu"
    )
    refused(head + "1,2,0.5\n", "line 2 column 'label': class 0.5 is not a whole number")
    refused(head + "1,2,\n", "line 2 column 'label': has no class")
    refused(head, "has names of columns but no samples")
    refused('a,label\n"1,2\n', "line 2: a quote does not end")
    refused("one\n1\n", "line 1 has one column")
    refused(",b,label\n0,2,0\n", r"a column has no name in line 1; .*to_csv\(index=False\)")
    refused(
        "a,b,c\n1,2,0\n", r"which column holds the classes\? .* columns are a, b, c", code=USAGE
    )
    refused("5,2,7\n1,2,0\n", "which column .* columns are 1 to 3", code=USAGE)
    refused("label,y,c\n1,2,0\n", "which column holds the classes", code=USAGE)
    refused(
        head, "--labels d is no column of .* columns are a, b, label", "--labels", "d", code=USAGE
    )
    refused(head, "--labels 4 is no column", "--labels", "4", code=USAGE)
    refused("0,1,2,label\n5,2,7,0\n", "line 1 may hold names .*--csv-header yes or", code=USAGE)
    refused("0,1,2\n5,2,7\n", "line 1 may hold names", "--labels", "1", code=USAGE)


@pytest.mark.parametrize("header", ["yes", "no"])
def test_csv_header_is_as_it_is_said(header, tmp_path):
    lines = ["0,1,2", *(f"{i % 5},{i % 3},{i % 2}" for i in range(40))]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    flags = ("--csv-header", header, "--labels", "3", "--held-out", "0")
    result = run("train", "--data", tmp_path / "d.csv", *flags, *SMALL, "--json")
    assert result.returncode == OK, result.stderr
    begin = next(event for event in events(result) if "samples" in event)
    assert begin["samples"] == 40 + (header == "no")


# ---- images -------------------------------------------------------------------------------------


def png(pixels: numpy.ndarray, bits: int = 8) -> bytes:
    """(H, W) is grey, (H, W, 3) colours, (H, W, 4) with transparency."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    kind = {1: 0, 3: 2, 4: 6}[1 if pixels.ndim == 2 else pixels.shape[2]]
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], bits, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(f">u{bits // 8}").tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*each) for each in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    )


def images(shape: tuple[int, ...]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Class by class, as folders have them."""
    random = numpy.random.default_rng(2)
    labels = numpy.arange(60) // 20
    pixels = random.integers(0, 60, (60, *shape)) + 90 * labels.reshape(-1, *[1] * len(shape))
    return pixels.astype(numpy.uint8), labels


def write(folder: Path, pixels: numpy.ndarray, labels: numpy.ndarray) -> None:
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
        (folder / f"class {label}" / f"{i:03}.PNG").write_bytes(png(image))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3), (6, 5, 4)])
def test_images(shape, tmp_path):
    pixels, labels = images(shape)
    write(tmp_path / "folder", pixels, labels)
    (tmp_path / "folder" / "class 1" / ".DS_Store").write_bytes(b"hidden")
    channels_first = pixels if pixels.ndim == 3 else pixels[..., :3].transpose(0, 3, 1, 2)
    expected = plain_losses(tmp_path, channels_first, labels)
    assert losses("--data", tmp_path / "folder") == expected


def test_grey_among_colours_has_three_channels(tmp_path):
    pixels, labels = images((4, 4))
    write(tmp_path / "folder", pixels, labels)
    colours = numpy.repeat(pixels[:, None], 3, axis=1)
    last = tmp_path / "folder" / "class 2" / "059.PNG"
    last.write_bytes(png(colours[59].transpose(1, 2, 0)))
    assert losses("--data", tmp_path / "folder") == plain_losses(tmp_path, colours, labels)


def test_images_that_are_split_already(tmp_path):
    pixels, labels = images((4, 4))
    write(tmp_path / "train", pixels, labels)
    write(tmp_path / "val", pixels[::2], labels[::2])
    result = run("train", "--data", tmp_path, *SMALL, "--json")
    assert result.returncode == OK, result.stderr
    begin = next(event for event in events(result) if "samples" in event)
    assert begin["samples"] == 60
    (tmp_path / "val" / "class 9").mkdir()
    result = run("train", "--data", tmp_path, *SMALL)
    assert "class 9: is a class that the folder to train on does not have" in result.stderr


def test_images_of_several_sizes(tmp_path):
    pixels, labels = images((4, 4))
    write(tmp_path, pixels, labels)
    (tmp_path / "class 1" / "025.PNG").write_bytes(png(numpy.full((8, 6), 128)))
    result = run("train", "--data", tmp_path, *SMALL)
    assert result.returncode == ERROR
    assert re.search(
        "025.PNG: is 8x6 pixels .*, others are 4x4; scale .*--image-size 4x4", result.stderr
    )
    for size in ("4", "4x4", "3x7"):
        assert len(losses("--data", tmp_path, "--image-size", size)) == 2


def test_an_even_image_stays_even_when_it_is_scaled(tmp_path):
    pixels, labels = images((1, 1))
    grown = numpy.repeat(numpy.repeat(pixels, 4, 1), 4, 2)
    write(tmp_path / "folder", grown, labels)
    expected = plain_losses(tmp_path, pixels, labels)
    assert losses("--data", tmp_path / "folder", "--image-size", "1") == expected


def test_no_images(tmp_path):
    pixels, labels = images((4, 4))

    def refused(message: str, *flags, code: int = ERROR) -> None:
        result = run("train", "--data", tmp_path, *SMALL, *flags)
        assert result.returncode == code and result.stderr.count("\n") == 1, result.stderr
        assert re.search(message, result.stderr), result.stderr

    refused("no folder of images for each class")
    (tmp_path / "class 0").mkdir()
    refused("has no images in its folders")
    write(tmp_path, pixels, labels)
    for bad in ("0", "x", "4x", "4x5x6", "-3", "99999999"):
        refused("--image-size must be pixels as in 32 or 32x48", "--image-size", bad, code=USAGE)
    refused("leave --labels out", "--labels", "1", code=USAGE)
    other = tmp_path / "class 0" / "notes.txt"
    other.write_text("not an image")
    refused("notes.txt: cannot be read as a PNG, JPEG or BMP image")
    other.write_bytes(png(numpy.zeros((4, 4)), bits=16))
    refused("notes.txt: has 16 bits a channel where 8 are read")
    other.write_bytes(png(pixels[0])[:60])
    refused("notes.txt: cannot be read as a PNG")
    other.unlink()
    (tmp_path / "stray.png").write_bytes(png(pixels[0]))
    refused("stray.png: lies beside folders, which are taken for classes; move it away")


# ---- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "kind"),
    [
        ("--inputs", "x", "a .npz file"),
        ("--csv-header", "no", "a .csv file"),
        ("--image-size", "32", "a folder of images"),
    ],
)
def test_flags_of_other_formats(flag, value, kind, folder):
    result = run("train", "--data", folder / "x.npy", "--labels", folder / "y.npy", flag, value)
    assert result.returncode == USAGE and f"{flag} belongs to {kind}" in result.stderr


def test_doctor_lists_them():
    checks = {event.get("name"): event for event in events(run("doctor", "--json"))}
    assert "IDX, .npy, .csv, text, .npz, folders of images" in checks["data formats"]["finding"]


def test_no_room_for_what_is_unpacked(tmp_path):
    inputs, labels = samples()
    numpy.savez(tmp_path / "d.npz", x=inputs, y=labels)
    result = run("train", "--data", tmp_path / "d.npz", TMPDIR=tmp_path / "nowhere")
    assert result.returncode == ERROR
    assert re.search("no file of .* for its values can be made in .*nowhere", result.stderr)
