"""Draws what a command of infinitybatch prints in a terminal: README's picture, light and dark.

    make build && .venv/bin/python scripts/terminal_picture.py

The command runs for real, in a pseudo-terminal; nothing is typed in. Times are this machine's.
"""

import os
import pty
import re
import subprocess
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
BINARY = ROOT / "build/release/bin/infinitybatch"
COMMAND = "infinitybatch plan --data digits --model resnet --batch-size all --memory-budget 24MiB"
WIDTH, HEIGHT, MARGIN = 7.83, 19, 16  # of a character at 13 pixels, of a line, around the text
#: Of GitHub's themes: ground, text, and the colours 31 to 36 of a terminal.
THEMES = {
    "light": ("#f6f8fa", "#1f2328", "#cf222e", "#116329", "#4d2d00", "#0969da", "#8250df", "#1b7c83"),
    "dark": ("#151b23", "#f0f6fc", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf"),
}  # fmt: skip
COLUMNS = 92
STYLE = re.compile(r"\x1b\[([\d;]*)m")
FULL_LINE = rf"(?:(?:\x1b\[[\d;]*m)*.){{1,{COLUMNS}}}(?:\x1b\[[\d;]*m)*"
MOVES = re.compile(r"\x1b\[[\d;?]*[A-Za-ln-z]")


def printed(command: list[str]) -> str:
    """What a command writes on a terminal.

    Raises:
        CalledProcessError: if it fails.
    """
    mine, its = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(command, stdout=its, stderr=its, env=environment, cwd=ROOT)
    os.close(its)
    text = b""
    try:
        while piece := os.read(mine, 4096):
            text += piece
    except OSError:  # Linux's way to say that the other side is closed
        pass
    os.close(mine)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return text.decode()


def lines_of(text: str) -> list[str]:
    """What stays on the screen: of lines that are overwritten the last, and long ones in pieces."""
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    left = [MOVES.sub("", line.rsplit("\r", 1)[-1]).rstrip() for line in lines]
    return [piece for line in left for piece in re.findall(FULL_LINE, line) or [""]]


def spans(line: str, colours: tuple[str, ...]) -> str:
    """A line with its styles, as SVG."""
    done, style = "", ""
    for at, piece in enumerate(STYLE.split(line)):
        if at % 2 == 0:
            done += f"<tspan{style}>{escape(piece)}</tspan>" if piece else ""
            continue
        for code in map(int, piece.split(";") if piece else ["0"]):
            if code == 0:
                style = ""
            elif code == 1:
                style += ' font-weight="bold"'
            elif code == 2:
                style += ' opacity="0.65"'
            elif 31 <= code <= 36 or 91 <= code <= 96:
                style += f' fill="{colours[code % 10 - 1]}"'
    return done


def draw(text: str, theme: str) -> str:
    """The screen as SVG; `text` may hold a terminal's escape sequences."""
    ground, foreground, *colours = THEMES[theme]
    lines = lines_of(text)
    lengths = [len(STYLE.sub("", line)) for line in lines]
    width = round(max(lengths) * WIDTH + 2 * MARGIN)
    height = len(lines) * HEIGHT + 2 * MARGIN
    rows = []
    for at, (line, length) in enumerate(zip(lines, lengths, strict=True)):
        if length:
            y = MARGIN + HEIGHT * at + 14
            rows.append(
                f'<text x="{MARGIN}" y="{y}" textLength="{length * WIDTH:.1f}" '
                f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{spans(line, tuple(colours))}'
                "</text>"
            )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="ui-monospace, SFMono-Regular, Menlo, DejaVu Sans Mono, '
        f'monospace" font-size="13" fill="{foreground}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{ground}"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def main() -> int:
    binary = os.environ.get("INFINITYBATCH_CLI", str(BINARY))
    text = f"$ {COMMAND}\n" + printed([binary, *COMMAND.split()[1:]])
    for theme in THEMES:
        (IMAGES / f"terminal-{theme}.svg").write_text(draw(text, theme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
