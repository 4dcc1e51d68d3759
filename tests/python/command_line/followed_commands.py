"""Ways out of errors of the command line: a part of the message as it stands in the sources, the
arguments that provoke it, and those that it asks for, in a folder that `files` has filled. What is a
tuple of tuples is run one after the other; a text is run by the shell before."""

import gzip
from pathlib import Path
from typing import Any

import numpy
from command_line_tools import idx
from PIL import Image
from test_python_models import MODULE

ONCE = ("--epochs", "1")
OWN = ("--model", "own_nets:sized", *ONCE)
ROWS = ("--data", "x.npy", "--labels", "y.npy")
IMAGES = ("--data", "images.npy", "--labels", "y.npy", *OWN)
OF_PYTHON = ("--model", "own_nets:Net", "--data", "own_nets:data", *ONCE)
SMALL = ("--model", "mlp", "--width", "8", "--depth", "1", *ONCE)
TRAIN = ("train", *ROWS, *SMALL)
TRAIN_AS = ("train", *ROWS, *SMALL[:-2], "--config")


WORDS = """

def words(samples):
    return nn.Sequential(nn.Embedding(samples.classes, 8), nn.Linear(8, samples.classes), Last())


class Last(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)
"""


def files(folder: Path) -> None:
    random = numpy.random.default_rng(0)
    x, y = random.normal(size=(60, 6)).astype("float32"), random.integers(0, 3, 60)
    images = random.integers(0, 255, (60, 8, 8)).astype("uint8")
    numpy.save(folder / "x.npy", x)
    numpy.save(folder / "y.npy", y)
    numpy.save(folder / "zeros.npy", numpy.zeros(60, "int64"))
    numpy.save(folder / "floats.npy", y.astype("float64"))
    numpy.save(folder / "column.npy", y[:, None])
    numpy.save(folder / "few.npy", y[:50])
    numpy.save(folder / "flat.npy", x[:, 0])
    numpy.save(folder / "complex.npy", x.astype("complex64"))
    holes = x.copy()
    holes[0, 0] = numpy.nan
    numpy.save(folder / "holes.npy", holes)
    numpy.save(folder / "filled.npy", numpy.nan_to_num(holes))
    numpy.save(folder / "images.npy", images)
    numpy.savez(folder / "both.npz", first=x, second=y)
    (folder / "images.idx").write_bytes(idx(images))
    (folder / "labels.idx").write_bytes(idx(y))
    (folder / "labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y)))
    (folder / "packed").mkdir()
    packed = folder / "packed" / "train-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.compress(idx(images)))
    (folder / "packed" / "train-labels-idx1-ubyte").write_bytes(idx(y))
    numpy.save(folder / "fields.npy", numpy.zeros(60, [("a", "f4"), ("b", "f4")]))
    (folder / "text.npy").write_text("no array")
    (folder / "pair").mkdir()
    (folder / "pair" / "train-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "pair" / "train-labels-idx1-ubyte").write_bytes(idx(y))
    (folder / "half").mkdir()
    (folder / "half" / "train-images-idx3-ubyte").write_bytes(idx(images))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "short.txt").write_text("abc")
    lines = [",".join(f"{v:.4f}" for v in row) for row in x]
    rows = [f"{line},{label}" for line, label in zip(lines, y, strict=True)]
    (folder / "table.csv").write_text("\n".join(["a,b,c,d,e,f,label", *rows]) + "\n")
    (folder / "index.csv").write_text("\n".join([",a,b,c,d,e,f,label", *("0," + r for r in rows)]))
    emptied = rows[0].replace(rows[0].split(",")[1], "", 1)
    (folder / "holes.csv").write_text("\n".join(["a,b,c,d,e,f,label", emptied, *rows[1:]]))
    (folder / "one.csv").write_text("a\n1\n2\n")
    (folder / "nameless.csv").write_text("\n".join(rows) + "\n")
    (folder / "numbers.csv").write_text("\n".join(["1,2,3,4,5,6,7", *rows]) + "\n")
    (folder / "utf16.txt").write_text("the quick brown fox " * 40, encoding="utf-16")
    numpy.save(folder / "wide.npy", numpy.full((60, 6), 2**63 + 1, "uint64"))
    numpy.save(folder / "narrow.npy", numpy.full((60, 6), 2**63 + 1, "uint64").astype("float64"))
    numpy.save(folder / "below.npy", y - 1)
    (folder / "floats.idx").write_bytes(b"\0\0\x0d\x01\0\0\0\1\0\0\0\0")
    (folder / "nothing").mkdir()
    (folder / "header.csv").write_text("a,b,label\n")
    (folder / "words.csv").write_text("\n".join(["a,b,c,d,e,f,label", "x" + rows[0], *rows[1:]]))
    (folder / "classless.csv").write_text("\n".join(["a,b,c,d,e,f,label", lines[0] + ",", *rows]))
    (folder / "pictures").mkdir()
    for name, size in (("cats", 8), ("dogs", 9)):
        (folder / "pictures" / name).mkdir()
        for i in range(4):
            picture = Image.fromarray(random.integers(0, 255, (size, size)).astype("uint8"))
            picture.save(folder / "pictures" / name / f"{i}.png")
    (folder / "own_nets.py").write_text(MODULE + WORDS)
    (folder / "list.toml").write_text("epochs = [1]\n")
    (folder / "section.toml").write_text("[train]\nepochs = 1\n")
    (folder / "wrong.toml").write_text("epoch = 1\n")
    (folder / "right.toml").write_text("epochs = 1\n")


#: Of `python -m infinitybatch train`, and of files, which both programs read.
PYTHON: list[tuple[str, tuple[str, ...], Any]] = [
    (
        "--data {} is a file of inputs; give their classes with --labels FILE",
        ("--data", "x.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "predicts itself; leave --labels out, or give a .npy or IDX file as --data",
        ("--data", "text.txt", "--labels", "y.npy", *OWN),
        ((*ROWS, *OWN), ("--data", "images.idx", "--labels", "labels.idx", *OWN)),
    ),
    (
        "but --data {} is a folder, which has its own labels; leave --labels out",
        ("--data", "pair", "--labels", "y.npy", *OWN),
        ("--data", "pair", *OWN),
    ),
    (
        "--labels {} is a folder; give the .npy or IDX file of classes in it",
        ("--data", "images.npy", "--labels", "pair", *OWN),
        ("--data", "images.npy", "--labels", "pair/train-labels-idx1-ubyte", *OWN),
    ),
    (
        "{} is compressed; unpack it with: {}gunzip {}",
        ("--data", "images.npy", "--labels", "labels-idx1-ubyte.gz", *OWN),
        (
            "gunzip labels-idx1-ubyte.gz",
            ("--data", "images.npy", "--labels", "labels-idx1-ubyte", *OWN),
        ),
    ),
    (
        "{} is compressed; unpack it with: {}gunzip {}",
        ("--data", "packed", *OWN),
        ("gunzip packed/train-images-idx3-ubyte.gz", ("--data", "packed", *OWN)),
    ),
    (
        "{}: has {} but no {}; both are needed",
        ("--data", "half", *OWN),
        ("cp pair/train-labels-idx1-ubyte half", ("--data", "half", *OWN)),
    ),
    (
        "{} has {} samples but {} has {} labels; give files that are a pair, one label a sample",
        ("--data", "x.npy", "--labels", "few.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "vectors are [n, features], images [n, height, width] or [n, channels, height, width]",
        ("--data", "flat.npy", "--labels", "y.npy", *OWN),
        ((*ROWS, *OWN), IMAGES),
    ),
    (
        "holds values that are not finite; replace them, as numpy.nan_to_num does",
        ("--data", "holes.npy", "--labels", "y.npy", *OWN),
        ("--data", "filled.npy", "--labels", "y.npy", *OWN),
    ),
    (
        "labels are not integers; classes are expected, as in labels.astype('int64')",
        ("--data", "x.npy", "--labels", "floats.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "labels have {} dimensions; one class per sample is expected, shape [n]",
        ("--data", "x.npy", "--labels", "column.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "has elements of type '{}'; save it as array.astype('float32') or array.astype('int64')",
        ("--data", "complex.npy", "--labels", "y.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "holds a structured array; save one plain field of it instead",
        ("--data", "fields.npy", "--labels", "y.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "is no NumPy .npy file (wrong first bytes); write it with numpy.save",
        ("--data", "text.npy", "--labels", "y.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "{} has {}; it has {}: name one with {} NAME",
        ("--data", "both.npz", *OWN),
        ("--data", "both.npz", "--inputs", "first", "--labels", "second", *OWN),
    ),
    (
        "{} is no array of {}, which has {}",
        ("--data", "both.npz", "--inputs", "third", "--labels", "second", *OWN),
        ("--data", "both.npz", "--inputs", "first", "--labels", "second", *OWN),
    ),
    (
        "too few for two samples of {}; choose a longer text or a smaller --context",
        ("--data", "short.txt", "--model", "own_nets:words", *ONCE),
        ("--data", "text.txt", "--model", "own_nets:words", "--context", "6", *ONCE),
    ),
    (
        "Name it with --labels NAME, or by its position, --labels 1 or --labels -1 (the last){}",
        ("--data", "nameless.csv", *OWN),
        (
            ("--data", "nameless.csv", "--labels", "-1", *OWN),
            ("--data", "table.csv", "--labels", "label", *OWN),
        ),
    ),
    (
        "say which with --csv-header yes or --csv-header no",
        ("--data", "numbers.csv", "--labels", "-1", *OWN),
        (
            ("--data", "numbers.csv", "--labels", "-1", "--csv-header", "yes", *OWN),
            ("--data", "numbers.csv", "--labels", "-1", "--csv-header", "no", *OWN),
        ),
    ),
    (
        "leave it out, as with pandas' to_csv(index=False)",
        ("--data", "index.csv", "--labels", "label", *OWN),
        ("--data", "table.csv", "--labels", "label", *OWN),
    ),
    (
        "is empty; fill it in, or leave the line out",
        ("--data", "holes.csv", "--labels", "label", *OWN),
        ("--data", "table.csv", "--labels", "label", *OWN),
    ),
    (
        "line 1 has one column; features and a class are needed, between commas",
        ("--data", "one.csv", *OWN),
        ("--data", "table.csv", "--labels", "label", *OWN),
    ),
    (
        "{} belongs to {}, which --data {} is not; leave it out",
        (*ROWS, *OWN, "--csv-header", "yes"),
        (*ROWS, *OWN),
    ),
    (
        "must be a number from 0 to 0.9, not {}",
        (*ROWS, *OWN, "--held-out", "2"),
        (*ROWS, *OWN, "--held-out", "0.9"),
    ),
    (
        "(UTF-16 by way of: iconv -f UTF-16 -t UTF-8)",
        ("--data", "utf16.txt", "--model", "own_nets:words", "--context", "6", *ONCE),
        (
            "iconv -f UTF-16 -t UTF-8 utf16.txt > utf8.txt",
            ("--data", "utf8.txt", "--model", "own_nets:words", "--context", "6", *ONCE),
        ),
    ),
    (
        "which is above int64; save it as array.astype('float64')",
        ("--data", "x.npy", "--labels", "wide.npy", *OWN),
        ("--data", "narrow.npy", "--labels", "y.npy", *OWN),
    ),
    (
        "label {} of sample {} is no class; classes are 0 to {}",
        ("--data", "x.npy", "--labels", "below.npy", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "where 8 (unsigned bytes) alone is read; convert it to a NumPy .npy file",
        ("--data", "x.npy", "--labels", "floats.idx", *OWN),
        (*ROWS, *OWN),
    ),
    (
        "and no folder of images for each class; give a folder with either, or a file",
        ("--data", "nothing", *OWN),
        (
            ("--data", "pair", *OWN),
            (*ROWS, *OWN),
            ("--data", "pictures", "--image-size", "8", *OWN),
        ),
    ),
    (
        "scale all with --image-size {}",
        ("--data", "pictures", *OWN),
        ("--data", "pictures", "--image-size", "8x8", *OWN),
    ),
    (
        "--image-size must be pixels as in 32 or 32x48 (height, width), not {}",
        ("--data", "pictures", "--image-size", "big", *OWN),
        (
            ("--data", "pictures", "--image-size", "8", *OWN),
            ("--data", "pictures", "--image-size", "8x9", *OWN),
        ),
    ),
    (
        "{}: has names of columns but no samples",
        ("--data", "header.csv", "--labels", "label", *OWN),
        ("--data", "table.csv", "--labels", "label", *OWN),
    ),
    (
        "'{}' is not a {}number{}",
        ("--data", "words.csv", "--labels", "label", *OWN),
        ("--data", "table.csv", "--labels", "label", *OWN),
    ),
    # Flags.
    (
        '--batch-size must be a number of 1 or more, or "all", not {}',
        (*OF_PYTHON, "--batch-size", "0"),
        ((*OF_PYTHON, "--batch-size", "40"), (*OF_PYTHON, "--batch-size", "all")),
    ),
    (
        "--checkpoint-every needs a place, as in: --save model.pt",
        (*OF_PYTHON, "--checkpoint-every", "1"),
        (*OF_PYTHON, "--checkpoint-every", "1", "--save", "model.pt"),
    ),
    (
        "--save {} must end in .pt, .pth or .safetensors",
        (*OF_PYTHON, "--save", "m.bin"),
        ((*OF_PYTHON, "--save", "m.pt"), (*OF_PYTHON, "--save", "m.pth")),
    ),
    (
        "--save {}: there is no folder {}: mkdir -p {}",
        (*OF_PYTHON, "--save", "a/m.pt"),
        ("mkdir -p a", (*OF_PYTHON, "--save", "a/m.pt")),
    ),
    (
        "--model {} is no package.module:factory, as in: pkg.nets:Net",
        ("--model", "mlp", *OF_PYTHON[2:]),
        OF_PYTHON,
    ),
    ("{}: {} has no {}", ("--model", "own_nets:Ned", *OF_PYTHON[2:]), OF_PYTHON),
    (
        "{} is a {}; name what can be called",
        ("--model", "own_nets:value", *OF_PYTHON[2:]),
        OF_PYTHON,
    ),
    (
        "--model {} gave a {}; it must give a torch.nn.Module",
        ("--model", "own_nets:no_model", *OF_PYTHON[2:]),
        OF_PYTHON,
    ),
    (
        "--{} is of files, and --data {} is Python: leave it out",
        (*OF_PYTHON, "--labels", "y.npy"),
        OF_PYTHON,
    ),
    (
        "--loss {} is not one of torch.nn{}",
        (*OF_PYTHON, "--loss", "CrosEntropyLoss"),
        (*OF_PYTHON, "--loss", "CrossEntropyLoss"),
    ),
    (
        "--optimizer {} is not one of torch.optim{}",
        (*OF_PYTHON, "--optimizer", "adm"),
        (*OF_PYTHON, "--optimizer", "adam"),
    ),
    (
        "--schedule {} is not known; use constant, linear, cosine or package.module:factory",
        (*OF_PYTHON, "--schedule", "steps"),
        tuple(
            (*OF_PYTHON, "--schedule", s)
            for s in ("constant", "linear", "cosine", "own_nets:halves")
        ),
    ),
    (
        "--metrics {} is not known; use {} or {}, or package.module:factory",
        (*OF_PYTHON, "--metrics", "f1"),
        ((*OF_PYTHON, "--metrics", "top5"), (*OF_PYTHON, "--metrics", "own_nets:largest")),
    ),
    (
        "needs class scores, which --loss CrossEntropyLoss and NLLLoss have; leave it out, or give package.module:factory",
        (
            "--model",
            "own_nets:Regression",
            "--data",
            "own_nets:numbers",
            "--loss",
            "MSELoss",
            *ONCE,
            "--metrics",
            "top5",
        ),
        (
            (
                "--model",
                "own_nets:Regression",
                "--data",
                "own_nets:numbers",
                "--loss",
                "MSELoss",
                *ONCE,
            ),
            (
                "--model",
                "own_nets:Regression",
                "--data",
                "own_nets:numbers",
                "--loss",
                "MSELoss",
                *ONCE,
                "--metrics",
                "own_nets:largest",
            ),
        ),
    ),
    ("must be a number above 0, not 0", (*OF_PYTHON, "--clip", "0"), (*OF_PYTHON, "--clip", "0.5")),
    (
        "must be a number below 1, as 0.999, not {}",
        (*OF_PYTHON, "--ema", "1"),
        (*OF_PYTHON, "--ema", "0.999"),
    ),
    ("must be a whole number, at least 1, not {}", (*OF_PYTHON[:-2], "--epochs", "0"), OF_PYTHON),
    (
        "must be a whole number from 0 to {}, not {}",
        (*OF_PYTHON, "--seed", "-1"),
        (*OF_PYTHON, "--seed", "0"),
    ),
    (
        "must be a number of 0 or more, not {}",
        (*OF_PYTHON, "--lr", "-1"),
        (*OF_PYTHON, "--lr", "0.1"),
    ),
    (
        "--device {} is not there; this machine and this torch have: {}",
        (*OF_PYTHON, "--device", "gpu"),
        (*OF_PYTHON, "--device", "cpu"),
    ),
    (
        "training diverged: the loss is {} in step {} of epoch {}, it was {} in the first step; use a smaller --lr",
        (*OF_PYTHON, "--batch-size", "40", "--lr", "1e12", "--optimizer", "sgd"),
        (*OF_PYTHON, "--batch-size", "40", "--lr", "0.1", "--optimizer", "sgd"),
    ),
    (
        "all {} epochs are done; train on with more, as in: --epochs {}",
        ("--resume", "done.checkpoint.pt"),
        ("--resume", "done.checkpoint.pt", "--epochs", "2"),
    ),
    (
        "leave {} out, or train anew without --resume",
        ("--resume", "done.checkpoint.pt", "--epochs", "3", "--seed", "1"),
        (("--resume", "done.checkpoint.pt", "--epochs", "3"), (*OF_PYTHON, "--seed", "1")),
    ),
    (
        "or is damaged; resume from the model.checkpoint.pt beside the model",
        ("--resume", "done.pt", "--epochs", "4"),
        ("--resume", "done.checkpoint.pt", "--epochs", "4"),
    ),
]

#: Of the program, each a process.
PROGRAM: list[tuple[str, tuple[str, ...], Any]] = [
    (
        "--metrics names {} twice; name it once",
        (*TRAIN, "--metrics", "top5,macro-f1,top5"),
        (*TRAIN, "--metrics", "top5,macro-f1"),
    ),
    (
        "--checkpoint-every needs a place; name the model's file, as in: --save model.safetensors",
        (*TRAIN, "--checkpoint-every", "1"),
        (*TRAIN, "--checkpoint-every", "1", "--save", "model.safetensors"),
    ),
    (
        "--micro-batch-size means nothing with --strategy native, which computes the whole batch",
        (*TRAIN, "--strategy", "native", "--micro-batch-size", "8"),
        ((*TRAIN, "--strategy", "native"), (*TRAIN, "--micro-batch-size", "8")),
    ),
    (
        "{} means nothing with --offload never; leave one of them out",
        (*TRAIN, "--offload", "never", "--host-budget", "1GiB"),
        (*TRAIN, "--offload", "never"),
    ),
    (
        "name one on a disk with room, or leave it out",
        (*TRAIN, "--offload-directory", "nowhere"),
        (*TRAIN, "--offload-directory", "pair"),
    ),
    (
        "holds vectors; use --model mlp, or shape the data [n, height, width]",
        ("train", *ROWS, *ONCE, "--model", "resnet"),
        ("train", *ROWS, *ONCE, "--model", "mlp"),
    ),
    (
        " is a list; each key has one value, as in: epochs = 40",
        (*TRAIN_AS, "list.toml"),
        (*TRAIN_AS, "right.toml"),
    ),
    (
        "--config: {}: the key '{}' is not known{}; see: infinitybatch {} --help",
        (*TRAIN_AS, "wrong.toml"),
        ("train", "--help"),
    ),
]
