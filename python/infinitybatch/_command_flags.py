"""Flags of `python -m infinitybatch train`: those of the C++ command line, with its defaults."""

import argparse
import difflib
from typing import Any, NoReturn

from .errors import Error

PROGRAM = "python -m infinitybatch train"

#: Learning rates and what goes with them where none is given, as in the C++ command line.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "adam": {"lr": 0.003},
    "adamw": {"lr": 0.003},
    "rmsprop": {"lr": 0.001},
    "adagrad": {"lr": 0.01},
}

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("model", "held_out", "memory_budget", "micro_batch_size", "lr", "clip")),
    **dict.fromkeys(("amp", "ema", "save", "checkpoint_every", "resume")),
    **dict.fromkeys(("labels", "inputs", "image_size", "metrics"), ""),
    "data": "digits",
    "csv_header": "auto",
    "context": 64,
    "batch_size": "512",
    "device": "cpu",
    "seed": 0,
    "loss": "CrossEntropyLoss",
    "optimizer": "adam",
    "epochs": 40,
    "schedule": "constant",
    "json": False,
}

#: What a training cannot change on its way.
FIXED = ("model", "data", "labels", "batch_size", "optimizer", "seed", "held_out")


class UsageError(Error):
    """A flag that cannot be used; ends the program with 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace(": ", " ", 1)
        if message.startswith("unrecognized arguments"):
            wrong = message.split()[2]
            near = difflib.get_close_matches(wrong.partition("=")[0], _names(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            message = f"{wrong} is not a flag{hint}"
        raise UsageError(f"{message}; see: {PROGRAM} --help")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog=PROGRAM,
        description="Train a model of your own: the exact gradient of each whole batch, inside the "
        "memory that you allow.",
        epilog="Exit codes: 0 done, 1 error, 2 usage, 3 out of memory, 130 Ctrl-C, 143 SIGTERM.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = made.add_argument
    add("--model", help="package.module:factory, called without arguments or with `samples` "
        "(shape, classes, kind); gives a torch.nn.Module")  # fmt: skip
    add("--data", help="files and folders as infinitybatch train takes them, or "
        "package.module:factory, which gives a Dataset or loader, or two: (train, held out)")  # fmt: skip
    add("--labels", help="classes: a file, a column of a .csv, an array of a .npz")
    add("--inputs", help="array of a .npz that holds samples")
    add("--csv-header", choices=("auto", "yes", "no"))
    add("--image-size", help="scale images to 32 or 32x48")
    add("--context", type=_count, help="bytes of text in one sample")
    add("--held-out", type=_share, help="share of the samples kept for measuring")
    add("--batch-size", help='samples per optimizer step, or "all" [512]')
    add("--memory-budget", help="what tensors may occupy: 8GiB, 0.8 (of the device) or auto")
    add("--micro-batch-size", type=_count, help="samples at once, in place of a budget")
    add("--device", help="cpu, or an accelerator as torch names it")
    add("--seed", type=_seed, help="for parameters and the order of samples")
    add("--loss", help="one of torch.nn, or package.module:factory")
    add("--optimizer", help="one of torch.optim")
    add("--lr", type=_number, help="learning rate [the optimizer's usual one]")
    add("--epochs", type=_count, help="how often each sample is seen [40]")
    add("--schedule", help="constant, linear or cosine (to 0), by epochs; or "
        "package.module:factory, called with the optimizer")  # fmt: skip
    add("--clip", type=_positive, metavar="NORM", help="the most that the norm of all gradients is")
    add("--amp", nargs="?", const="bfloat16", choices=("bfloat16", "float16"),
        help="autocast; float16 with a GradScaler [bfloat16]")  # fmt: skip
    add("--ema", type=_decay, metavar="DECAY", help="measure and save averages of the parameters")
    add("--metrics", help="top5, balanced-accuracy, macro-f1, perplexity, with commas; "
        "or package.module:factory, which gives metrics as Trainer.evaluate takes them")  # fmt: skip
    add("--save", help="write the trained weights: a .pt that torch.load reads, or .safetensors")
    add(
        "--checkpoint-every",
        type=_count,
        help="write a checkpoint beside them after as many epochs",
    )
    add("--resume", help="go on from a checkpoint, with its flags")
    add("--json", action="store_true", default=argparse.SUPPRESS, help="JSON lines on stdout")
    return made


def _names() -> list[str]:
    return ["--" + name.replace("_", "-") for name in DEFAULTS]


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text}")
    return value


def _seed(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from 0 to {2**64 - 1}, not {text}"
        )
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= 1e12:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, not {text}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be a number above 0, not 0")
    return value


def _decay(text: str) -> float:
    value = _number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be a number below 1, as 0.999, not {text}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if value > 0.9:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 0.9, not {text}")
    return value
