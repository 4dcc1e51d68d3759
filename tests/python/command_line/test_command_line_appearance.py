"""What training looks like in a terminal and in a file, and how it ends."""

import os
import pty
import re
import select
import signal
import struct
import subprocess
import threading
import time

import pytest
from command_line_tools import ERROR, INTERRUPTED, OK, TERMINATED, binary, environment, run


def test_table_is_plain_where_nobody_watches(pair):
    result = run("train", *pair, "--model", "mlp", "--epochs", "3", "--memory-budget", "64MiB")
    assert result.returncode == OK
    assert "\r" not in result.stdout and "\x1b" not in result.stdout
    heading = next(
        line for line in result.stdout.splitlines() if line.lstrip().startswith("epoch ")
    )
    for word in ("loss", "held-out accuracy", "samples/s", "micro-batch", "peak ÷ budget"):
        assert word in heading
    rows = [
        line.split() for line in result.stdout.splitlines() if re.match(r" +\d+ +\d+\.\d", line)
    ]
    assert [row[0] for row in rows] == ["1", "2", "3"]


def test_table_is_ascii_where_the_locale_is(pair):
    arguments = ("--model", "mlp", "--epochs", "1", "--memory-budget", "64MiB")
    for command in ("train", "plan"):
        result = run(
            command, *pair, *(arguments if command == "train" else arguments[:2]), LC_ALL="C"
        )
        assert result.returncode == OK and result.stdout.isascii(), result.stdout


def test_long_epochs_tell_plainly_how_far_they_are(folder):
    """A plain line every five seconds; this epoch is made longer than that."""
    process = subprocess.Popen(
        [binary(), "train", "--data", folder / "pair", "--model", "resnet", "--width", "128"]
        + ["--depth", "4", "--epochs", "1000", "--micro-batch-size", "4", "--batch-size", "all"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    too_long = threading.Timer(60, process.kill)
    too_long.start()
    try:
        line = next((line for line in process.stdout if " left" in line), "nothing came")
        assert re.fullmatch(
            r"epoch \d+/1000 \d+ of 240 samples, \d+/s(, loss [\d.]+)?, .+ left\n", line
        )
    finally:
        too_long.cancel()
        process.kill()
        process.wait()


def read_terminal(arguments, until: bytes, columns=60) -> bytes:
    """What a terminal of that width gets, until `until` appears; then the process is ended."""
    import fcntl
    import termios

    child, terminal = pty.fork()
    if child == 0:
        settings = environment(TERM="xterm", LC_ALL="C.UTF-8")
        os.execve(binary(), [binary(), *map(str, arguments)], settings)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = b""
    deadline = time.monotonic() + 60
    while until not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:
                break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(terminal)
    assert until in seen, seen[-2000:]
    return seen


def test_a_terminal_gets_one_line_that_is_refreshed(folder):
    arguments = ("train", "--data", folder / "pair", "--width", "64", "--epochs", "1000")
    # A row of the table in place of the line; fast epochs may end before their line is drawn.
    seen = read_terminal(arguments, until=b"\x1b[K  ").decode()
    passing = [
        part.split("\x1b[K")[0] for part in seen.split("\r") if "left" in part or "━" in part
    ]
    assert passing, seen
    assert all(len(line) < 60 for line in passing), "cut to the terminal's width"
    assert "━" in passing[-1] or "─" in passing[-1]


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_ctrl_c_ends_cleanly(pair, number, code):
    process = subprocess.Popen(
        [binary(), "train", *map(str, pair), "--epochs", "100000", "--memory-budget", "16MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for line in process.stdout:
        if re.match(r" +2 ", line):
            break
    process.send_signal(number)
    begin = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 10
    assert process.returncode == code
    assert re.fullmatch(r"infinitybatch: (interrupted|terminated).*\n", stderr), stderr


def test_full_disk_is_an_error():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [binary(), "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == ERROR and "could not be written" in result.stderr
