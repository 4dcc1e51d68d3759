"""Compiles and loads a piece of C++ that has no place in the library."""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).resolve().parents[1] / "native"


def load(name: str) -> tuple[ctypes.CDLL | None, str]:
    """native/`name`.cpp, linked with the torch that runs; its functions are `extern "C"`.

    Returns:
        The library and "", or None and the reason in one line: no compiler, say.
    """
    libraries = Path(torch.__file__).with_name("lib")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, f"{name}.so")
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-DNDEBUG", "-fPIC"]
        command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        command += ["-shared", str(SOURCES / f"{name}.cpp"), "-o", str(target)]
        command += [f"-L{libraries}", "-ltorch_cpu", "-lc10"]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
            wrong = [line for line in said if "error" in line] or said
            return None, wrong[0] if wrong else "the compiler failed"
        return ctypes.CDLL(str(target)), ""
