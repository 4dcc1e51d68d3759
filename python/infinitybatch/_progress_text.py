"""What a progress line says, and where it stands: a bar by tqdm, or plain lines."""

import importlib
import importlib.util
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from ._row_files import plain
from .errors import InvalidArgument, InvalidType

Values = Mapping[str, Any]

#: How known fields read, each with the value that it cannot do without.
_KNOWN = {
    "epoch": "epoch {epoch}{of_epochs}",
    "batch": "batch {batch}{of_batches}",
    "step": "step {step}",
    "loss": "loss {loss:.4g}",
    "seconds": "{seconds:.3g} s/batch",
    "rate": "{rate:.4g} samples/s",
    "samples": "{samples:,} samples",
    "peak": "peak {peak}",
    "micro_batch_size": "micro-batch {micro_batch_size}",
    "elapsed": "{elapsed} elapsed",
    "eta": "{eta} left",
}


#: Of each value's type, to try a format before training begins.
_SAMPLES = {
    "epoch": 1, "epochs": 2, "batch": 1, "batches": 2, "step": 1, "loss": 0.5, "seconds": 0.5,
    "rate": 2.0, "samples": 3, "peak": 2**20, "micro_batch_size": 2, "learning_rate": 0.1,
    "elapsed": 1.0, "eta": 1.0,
}  # fmt: skip


class _Unknown:
    """Stands for a value that is not known (yet), whatever its format."""

    def __format__(self, spec: str) -> str:
        return "?"


class _Shown(dict[str, Any]):
    def __missing__(self, name: str) -> _Unknown:
        return _Unknown()


def shown(values: Values) -> _Shown:
    """Values as texts where they have units; what is None counts as unknown."""
    out = _Shown((name, plain(value)) for name, value in values.items() if value is not None)
    for one, total in (("of_epochs", "epochs"), ("of_batches", "batches")):
        out[one] = f"/{out[total]}" if total in out else ""
    for name in ("elapsed", "eta"):
        if name in out:
            out[name] = clock(out[name])
    if "peak" in out:
        out["peak"] = size(out["peak"])
    return out


def by_fields(fields: tuple[str, ...], values: Values) -> str:
    """ "epoch 1/3 · batch 2/10 · loss 0.25": fields without a value are left out."""
    texts = shown(values)
    return " · ".join(_field(name, texts) for name in fields if name in texts)


def _field(name: str, texts: _Shown) -> str:
    if name in _KNOWN:
        return _KNOWN[name].format_map(texts)
    value = texts[name]
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def by_format(format: str, values: Values) -> str:
    """A format of the user's own; what is not known is "?"."""
    return format.format_map(shown(values))


def checked_format(format: Any) -> str | None:
    """Raises where it could not show what a training will give it."""
    if format is None:
        return None
    if not isinstance(format, str):
        raise InvalidType(f"format must be a string, not {type(format).__name__}")
    try:
        by_format(format, _SAMPLES)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            f"format={format!r} cannot show a step: {error}. For example: "
            f'format="{{epoch}}/{{epochs}} loss {{loss:.3f}}"'
        ) from None
    return format


def planned(plan: Any) -> str:
    """Which size a budget has led to, and which were tried."""
    chosen = f"micro-batches of {plan.micro_batch_size:,} for {plan.batch_size:,} samples"
    tried = [
        f"{c.micro_batch_size:,} ({size(c.peak_bytes)}{'' if c.feasible else ', too much'})"
        for c in plan.candidates
    ]
    return f"plan: {chosen} within {size(plan.budget_bytes)} · tried {', '.join(tried)}"


class Times:
    """Of the batches of a run. The first one, which plans too, says nothing about later ones."""

    def __init__(self) -> None:
        self._start = self._began = self._first_end = time.monotonic()
        self._count = 0

    def batch_begins(self) -> None:
        self._began = time.monotonic()

    def batch_ends(self) -> float:
        now = time.monotonic()
        self._count += 1
        if self._count == 1:
            self._first_end = now
        return now - self._began

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def left(self, batches: int | None) -> float | None:
        """Seconds that so many batches will take, evaluations between them included; None while
        nobody knows."""
        if batches is None or self._count < 2:
            return None
        return batches * (time.monotonic() - self._first_end) / (self._count - 1)


def clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def size(bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if bytes < 1024:
            return f"{bytes:.4g} {unit}"
        bytes /= 1024
    return f"{bytes:.4g} GiB"


class PlainLines:
    """A line each time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def begin(self, total: int | None) -> None:
        pass

    def show(self, text: str, done: int) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def end(self) -> None:
        pass


class Bar:
    """One line that changes, by tqdm: in a terminal or a notebook."""

    def __init__(self, tqdm: Any, file: TextIO, with_bar: bool) -> None:
        self._tqdm = tqdm
        self._file = file
        self._form = "{percentage:3.0f}%|{bar:20}| {desc}" if with_bar else "{desc}"
        self._bar: Any = None

    def begin(self, total: int | None) -> None:
        self.end()
        form = self._form if total else "{desc}"
        # tqdm says nothing before it is told to: which lines appear when is Progress's business.
        self._bar = self._tqdm(
            total=total, file=self._file, bar_format=form, mininterval=0, delay=1e9
        )

    def show(self, text: str, done: int) -> None:
        if self._bar is None:  # training goes on in the middle of an epoch
            self.begin(None)
        self._bar.n = done
        self._bar.set_description_str(text)

    def say(self, text: str) -> None:
        self._tqdm.write(text, file=self._file)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.delay = 0
            self._bar.close()
            self._bar = None


def in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def find_display(file: TextIO, with_bar: bool) -> PlainLines | Bar:
    """A bar in a terminal or notebook where tqdm is installed; else plain lines."""
    notebook = in_notebook()
    if not (notebook or getattr(file, "isatty", lambda: False)()):
        return PlainLines(file)
    if importlib.util.find_spec("tqdm") is None:
        return PlainLines(file)
    module = importlib.import_module("tqdm.auto" if notebook else "tqdm")
    return Bar(module.tqdm, file, with_bar)
