"""README's picture: the peak of a step against the size of its batch, made of the suite `reach`."""

import io
from pathlib import Path
from typing import Any

from quoted import MIB, RESULTS, Quoted, latest

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
#: Of GitHub's two themes: text, grid, native, ours.
THEMES = {
    "light": ("#1f2328", "#d1d9e0", "#cf222e", "#0969da"),
    "dark": ("#f0f6fc", "#3d444d", "#ff7b72", "#58a6ff"),
}
# The same bytes for the same results, wherever they are drawn.
STYLE = {"svg.hashsalt": "infinitybatch", "svg.fonttype": "path", "font.family": "DejaVu Sans"}


def points(reach: Quoted, contestant: str) -> list[tuple[int, float]]:
    """Batch size and peak in MiB; those that ran out of memory are left out."""
    return [
        (figure["batch size"], figure["peak bytes"] / MIB)
        for figure in reach.figures(contestant=contestant)
        if figure["peak bytes"] is not None
    ]


def first_that_fails(reach: Quoted) -> int:
    return next(
        figure["batch size"]
        for figure in reach.figures(contestant="native")
        if figure["peak bytes"] is None
    )


def sentence(folder: Path = RESULTS) -> str:
    """What the picture shows, for those who do not see it."""
    reach = latest("reach", folder=folder)
    native, ours = points(reach, "native"), points(reach, "infinitybatch")
    return (
        f"One step of a small convnet on a device of 1 GiB: native training runs out of memory at "
        f"{first_that_fails(reach):,} images ({native[-1][1]:,.0f} MiB at {native[-1][0]:,}); with a "
        f"budget of 16 MiB the peak is {ours[-1][1]:.1f} MiB at {ours[-1][0]:,}."
    )


def draw(theme: str, folder: Path = RESULTS) -> str:
    """The chart as SVG. `theme` is "light" or "dark"."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    text, grid, red, blue = THEMES[theme]
    reach = latest("reach", folder=folder)
    native, ours = points(reach, "native"), points(reach, "infinitybatch")
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.4))
        axes.set_xscale("log", base=4)
        axes.set_yscale("log", base=4)
        axes.plot(*zip(*native, strict=True), "o-", color=red, linewidth=2)
        axes.plot(*zip(*ours, strict=True), "o-", color=blue, linewidth=2)
        died, most = first_that_fails(reach), 1024
        axes.plot([native[-1][0], died], [native[-1][1], most], ":", color=red, linewidth=2)
        axes.plot([died], [most], "X", color=red, markersize=11)
        label(axes, (died, most), "native: out of memory", red, (12, -4))
        label(axes, ours[-4], "infinitybatch, 16 MiB allowed", blue, (0, 10))
        axes.set_ylim(0.1, 4096)
        sizes = [size for size, _ in ours]
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        heights = (0.25, 1, 4, 16, 64, 256, 1024)
        axes.set_yticks(heights, [f"{height:g} MiB" for height in heights])
        axes.minorticks_off()
        axes.set_xlabel("batch size", color=text)
        axes.set_title("Peak memory of a training step", color=text, loc="left", fontsize=12)
        axes.tick_params(colors=text, length=0, labelsize=9)
        axes.grid(color=grid, linewidth=0.6)
        axes.set_frame_on(False)
        figure.tight_layout()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def label(axes: Any, at: tuple[int, float], words: str, color: str, by: tuple[int, int]) -> None:
    axes.annotate(
        words, at, by, textcoords="offset points", color=color, fontsize=10, fontweight="bold"
    )


def pictures(folder: Path = RESULTS) -> dict[Path, str]:
    return {IMAGES / f"reach-{theme}.svg": draw(theme, folder) for theme in THEMES}
