"""evaluate and predict on other data than a model was trained on: what the training has learned of
its data (numbers of classes, columns, scaling, size of images) applies, or the mismatch is an error."""

import json
import re
import shutil
import struct

import numpy
import pytest
from command_line_tools import ERROR, OK, events, run
from PIL import Image

FITS = ("--model", "mlp", "--width", "16", "--depth", "1", "--batch-size", "32")
NAMES = ("cat", "dog", "eel")


def event(result, name):
    assert result.returncode == OK, result.stderr
    (found,) = [line for line in events(result) if line["event"] == name]
    return found


def table(seed=0, count=240):
    """Three classes by three columns of unlike size; the fourth is noise."""
    random = numpy.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    centres = numpy.array([[4.0, -2, 1], [0, 3, -3], [-4, 0, 3]])
    features = centres[labels] + random.normal(0, 0.5, (count, 3)) + 5
    return numpy.column_stack([features, random.normal(0, 1, count)]), labels


def levels(seed=0, count=240):
    """Three classes that differ by their level alone, which a mean of their own takes away."""
    random = numpy.random.default_rng(seed)
    labels = random.integers(0, 3, count)
    return labels[:, None] * 4.0 + random.normal(0, 0.5, (count, 4)), labels


def write_csv(path, features, labels, columns=("a", "b", "c", "d"), names=NAMES, header=True):
    lines = [",".join([*columns, "label"])] if header else []
    for row, label in zip(features, labels, strict=True):
        lines.append(
            ",".join([*(repr(float(v)) for v in row), names[label] if names else str(label)])
        )
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of a table with names, and one of a table without."""
    path = tmp_path_factory.mktemp("trained")
    features, labels = table()
    write_csv(path / "named.csv", features, labels)
    write_csv(path / "plain.csv", features, labels, names=None, header=False)
    for name, more in (("named", ()), ("plain", ("--labels", "-1"))):
        result = run("train", "--data", path / f"{name}.csv", *more, *FITS, "--epochs", "30",
                     "--save", path / f"{name}.safetensors")  # fmt: skip
        assert result.returncode == OK, result.stderr
    return path


def accuracy(trained, data, model="named", *more):
    result = run("evaluate", trained / f"{model}.safetensors", "--data", data, *more, "--json")
    return event(result, "evaluate")["accuracy"]


def test_the_record_of_the_training(trained):
    content = (trained / "named.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    known = json.loads(header["__metadata__"]["infinitybatch"])["encoding"]
    assert (known["classes"], known["columns"]) == (list(NAMES), ["a", "b", "c", "d"])
    features, _ = table()
    held = numpy.array([int((i + 1) * 0.2) > int(i * 0.2) for i in range(len(features))])
    assert known["mean"] == pytest.approx(features[~held].mean())
    assert known["deviation"] == pytest.approx(features[~held].std())


def test_two_of_three_classes(trained, tmp_path):
    features, labels = table(1)
    some = labels > 0
    assert accuracy(trained, write_csv(tmp_path / "some.csv", features[some], labels[some])) > 0.97
    plain = write_csv(
        tmp_path / "plain.csv", features[some], labels[some], names=None, header=False
    )
    assert accuracy(trained, plain, "plain") > 0.97


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_another_range_is_not_scaled_away(kind, tmp_path):
    """Rows of some classes alone, whose own mean and deviation are others."""
    arrays = ("--inputs", "rows", "--labels", "kinds") if kind == "npz" else ()

    def write(name, features, labels):
        if kind == "csv":
            return write_csv(tmp_path / f"{name}.csv", features, labels)
        numpy.savez(tmp_path / f"{name}.npz", rows=features, kinds=labels)
        return tmp_path / f"{name}.npz"

    model = tmp_path / "m.safetensors"
    data = write("train", *levels())
    result = run("train", "--data", data, *arrays, *FITS, "--epochs", "30", "--save", model)
    assert result.returncode == OK, result.stderr
    features, labels = levels(1)
    for name, some in (("one", labels == 2), ("two", labels < 2), ("few", labels == 0)):
        other = write(name, features[some], labels[some])
        # Names of arrays are the training's, too.
        found = event(run("evaluate", model, "--data", other, "--json"), "evaluate")
        assert found["accuracy"] > 0.97, name


def test_columns_are_taken_by_name(trained, tmp_path):
    features, labels = table(3)
    data = write_csv(tmp_path / "t.csv", features[:, [2, 3, 0, 1]], labels, columns="cdab")
    assert accuracy(trained, data) > 0.97
    whole = accuracy(trained, write_csv(tmp_path / "same.csv", features, labels))
    assert accuracy(trained, data) == whole


def test_predict_gives_the_trainings_numbers_and_prints_names(trained, tmp_path):
    features, labels = table(4)
    some = labels > 0
    data = write_csv(tmp_path / "some.csv", features[some], labels[some])
    out, model = tmp_path / "classes.npy", trained / "named.safetensors"
    result = run("predict", model, "--data", data, "--output", out)
    assert result.returncode == OK, result.stderr
    predicted = numpy.load(out)
    assert (predicted == labels[some]).mean() > 0.97
    counts = [int((predicted == number).sum()) for number in range(3)]
    said = ", ".join(f"{i} {name} ({counts[i]})" for i, name in enumerate(NAMES))
    assert f"classes: {said}" in result.stdout
    found = event(run("predict", model, "--data", data, "--output", out, "--json"), "predict")
    assert found["classes"] == list(NAMES)


MISMATCHES = {
    "unknown class": (dict(names=("cat", "dog", "fox")), r"class 'fox' is none that the model was trained on \(cat, dog, eel\)"),
    "numbers": (dict(names=None), r"class '\d' is a number, and the model was trained on names \(cat, dog, eel\)"),
    "missing column": (dict(columns=("a", "b", "c", "z")), "has a column 'z' that the model was not trained on .*leave it out"),
    "one less": (dict(columns=("a", "b", "d"), keep=[0, 1, 3]), "has no column 'c', which the model was trained on"),
    "no header": (dict(header=False, keep=[0, 1, 2]), "has samples of 3, and the model in .* takes 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatches_of_tables(case, trained, tmp_path):
    given, message = MISMATCHES[case]
    options = {"columns": ("a", "b", "c", "d"), **given}
    features, labels = table(5)
    features = features[:, options.pop("keep", [0, 1, 2, 3])]
    data = write_csv(tmp_path / "other.csv", features, labels, **options)
    labels_flag = () if options.get("header", True) else ("--labels", "-1")
    for command in (("evaluate",), ("predict", "--output", tmp_path / "o.npy")):
        result = run(
            command[0], trained / "named.safetensors", "--data", data, *labels_flag, *command[1:]
        )
        assert result.returncode == ERROR and result.stderr.count("\n") == 1, result.stderr
        assert re.search(message, result.stderr), result.stderr
    assert not (tmp_path / "o.npy").exists()


def test_names_for_a_model_of_numbers(trained, tmp_path):
    data = write_csv(tmp_path / "named.csv", *table(6))
    result = run("evaluate", trained / "plain.safetensors", "--data", data)
    assert result.returncode == ERROR
    assert "is a name, and the model was trained on numbers" in result.stderr


def images(path, classes, size=(8, 8), seed=0, count=20, colours=False):
    random = numpy.random.default_rng(seed)
    for number, name in classes.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            image = random.integers(0, 60, (8, 8))
            image[2 * number : 2 * number + 3, 2 * number : 2 * number + 3] += 150
            picture = Image.fromarray(image.astype(numpy.uint8)).resize(size[::-1])
            picture = picture.convert("RGB") if colours else picture
            picture.save(path / name / f"{i}.png")
    return path


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    data = images(path / "train", dict(enumerate(NAMES)))
    for name, more in (("plain", ()), ("scaled", ("--image-size", "6"))):
        result = run("train", "--data", data, *more, *FITS, "--epochs", "40", "--save",
                     path / f"{name}.safetensors")  # fmt: skip
        assert result.returncode == OK, result.stderr
    return path


def test_folders_with_two_of_three_classes(of_images, tmp_path):
    some = images(tmp_path / "some", {1: "dog", 2: "eel"}, seed=1)
    assert accuracy(of_images, some, "plain") > 0.97
    assert accuracy(of_images, some, "scaled") > 0.9  # to the training's --image-size
    (tmp_path / "split").mkdir()
    shutil.copytree(some, tmp_path / "split" / "train")
    shutil.copytree(some, tmp_path / "split" / "val")
    assert accuracy(of_images, tmp_path / "split", "plain") > 0.97


def test_mismatches_of_folders(of_images, tmp_path):
    strangers = images(tmp_path / "fox", {1: "fox"})
    larger = images(tmp_path / "larger", {1: "dog"}, size=(16, 16))
    coloured = images(tmp_path / "coloured", {1: "dog"}, colours=True)
    for data, message in (
        (strangers, r"fox: is a class that the model was not trained on \(cat, dog, eel\)"),
        (larger, "is 16x16 pixels .*the model takes 8x8; scale all with --image-size 8x8"),
        (coloured, "has colours, and the model was trained on grey images"),
    ):
        result = run("evaluate", of_images / "plain.safetensors", "--data", data)
        assert result.returncode == ERROR and re.search(message, result.stderr), result.stderr
    assert accuracy(of_images, larger, "plain", "--image-size", "8x8") > 0.97  # as it says
    assert accuracy(of_images, larger, "scaled") > 0.9


def test_text_is_bytes_whatever_it_holds(folder, tmp_path):
    model, other = tmp_path / "m.safetensors", tmp_path / "other.txt"
    size = ("--context", "32", "--width", "16", "--depth", "1")
    assert run("train", "--data", folder / "text.txt", *size, "--epochs", "1", "--save", model).returncode == OK  # fmt: skip
    other.write_text("ÆØÅ 中文 the quick brown fox\n" * 40, encoding="utf-8")
    found = event(run("evaluate", model, "--data", other, "--json"), "evaluate")
    assert found["samples"] > 0 and found["of"] == "all"


def without_record(path, model):
    """As an earlier version saved it."""
    content = model.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    description = json.loads(header["__metadata__"]["infinitybatch"])
    del description["encoding"]
    header["__metadata__"]["infinitybatch"] = json.dumps(description)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return path


def test_files_of_earlier_versions_learn_it_from_the_trainings_data_or_refuse(trained, tmp_path):
    features, labels = table(8)
    some = labels > 0
    data = write_csv(tmp_path / "some.csv", features[some], labels[some])
    old = without_record(tmp_path / "old.safetensors", trained / "named.safetensors")
    found = event(run("evaluate", old, "--data", data, "--json"), "evaluate")
    assert found["accuracy"] == accuracy(trained, data)
    assert run("evaluate", old).returncode == OK
    source = trained / "named.csv"
    moved = source.rename(trained / "moved.csv")
    try:
        result = run("evaluate", old, "--data", data)
        assert result.returncode == ERROR
        assert "without the classes, columns and scaling of its training" in result.stderr
        assert accuracy(trained, data) > 0.97  # what is saved today needs no data of the training
    finally:
        moved.rename(source)


def test_train_refuses_several_processes(trained, tmp_path):
    save = tmp_path / "m.safetensors"
    arguments = ("train", "--data", trained / "named.csv", *FITS, "--save", save)
    result = run(*arguments, WORLD_SIZE="2")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not save.exists()
    assert "WORLD_SIZE is 2, and train works in one process" in result.stderr
    assert run(*arguments, "--epochs", "1", WORLD_SIZE="1").returncode == OK
