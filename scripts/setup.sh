#!/usr/bin/env bash
# Prepares everything that building, training and testing need, and says so before it does it:
#   - Debian or Ubuntu packages, only those that are missing;
#   - .venv, a virtual environment, with a torch that was already there or a pinned new one;
#   - the pinned Python tools of requirements-dev.txt, and requirements-loops.txt.
# Nothing outside .venv is touched but the system packages that the message names. Run again, it
# only checks. `setup.sh --dry-run` says what it would do and does nothing.
#
# Settings, all optional, as environment variables:
#   PYTHON      the interpreter to start from (3.11 or newer); its torch is reused
#   TORCH_ROOT  the folder of an installed torch package (.../site-packages/torch) to be reused
#   TORCH       what pip installs instead, say 'torch==2.12.0' or a wheel file; nothing is reused
#   PIP_ARGS    more arguments for pip install, say '--index-url ...'
#   PIP_*       pip's own settings

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DEFAULT_TORCH="torch==2.13.0"
STAMP="$VENV/.infinitybatch-setup"

# ---- Python ------------------------------------------------------------------------------------

is_new_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

choose_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON: no such program."
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer."
    command -v "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer on PATH. Install one, or name it with PYTHON=/path/to/python3."
}

# Prints the site-packages folder of the torch to be reused, or nothing.
torch_to_reuse() {
  [ -z "${TORCH:-}" ] || return 0
  if [ -n "${TORCH_ROOT:-}" ]; then
    [ -f "$TORCH_ROOT/__init__.py" ] || fail "TORCH_ROOT=$TORCH_ROOT is not an installed torch" \
      "package (no __init__.py). For a libtorch without Python call cmake yourself with" \
      "-DTORCH_ROOT=$TORCH_ROOT -DINFINITYBATCH_BUILD_PYTHON=OFF."
    dirname "$(cd "$TORCH_ROOT" && pwd -P)"
    return
  fi
  # The interpreter may be that of an active virtual or conda environment.
  "$1" - <<'PY'
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    minor = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
    if (2, 11) <= minor <= (2, 13) and os.path.isdir(os.path.join(os.path.dirname(spec.origin), "include")):
        print(os.path.dirname(os.path.dirname(spec.origin)))
PY
}

# ---- System packages ---------------------------------------------------------------------------

has_header() {
  printf '#include <%s>\n' "$1" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1
}

# Prints the Debian names of what is missing.
missing_packages() {
  local python="$1" version
  command -v cmake >/dev/null || echo cmake
  if ! command -v c++ >/dev/null; then
    echo g++ libcli11-dev libgtest-dev libminizip-dev libstb-dev nlohmann-json3-dev
  else
    has_header CLI/CLI.hpp || echo libcli11-dev
    has_header gtest/gtest.h || echo libgtest-dev
    has_header minizip/unzip.h || echo libminizip-dev
    has_header stb/stb_image.h || echo libstb-dev
    has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  fi
  version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$version-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
    echo "$version-dev"
}

# ---- The environment ---------------------------------------------------------------------------

python="$(choose_python)"
base_of() { "$1" -c 'import sys; print(sys._base_executable)'; }
if [ "$("$python" -c 'import sys; print(sys.prefix)')" = "$VENV" ]; then
  # Called with .venv active: it cannot be made from itself. What it was made from stays.
  python="$(base_of "$python")"
  reuse="$(torch_to_reuse "$python")"
  [ -n "$reuse" ] || [ -n "${TORCH:-}" ] || [ ! -f "$STAMP" ] || reuse="$(sed -n 's/^reuse //p' "$STAMP")"
else
  reuse="$(torch_to_reuse "$python")"
fi
torch="${TORCH:-$DEFAULT_TORCH}"
read -r -a packages <<<"$(missing_packages "$python" | tr '\n' ' ')"
read -r -a pip_args <<<"${PIP_ARGS:-}"

wanted="$(
  "$python" -c 'import sys; print("python", sys.base_prefix, sys.version.replace("\n", " "))'
  if [ -n "$reuse" ]; then echo "reuse $reuse"; else echo "install $torch"; fi
  cat "$ROOT/requirements-dev.txt" "$ROOT/requirements-loops.txt"
)"
up_to_date=false
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ] &&
  "$VENV_PYTHON" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
  up_to_date=true
fi
if $up_to_date && [ "${#packages[@]}" -eq 0 ]; then
  note "Set-up is complete: .venv and system packages are as wanted."
  exit 0
fi

if [ "${1:-}" = "--dry-run" ]; then
  say "Setting up, what would happen:"
else
  say "Setting up, what will happen:"
fi
if [ "${#packages[@]}" -gt 0 ]; then
  note "- system packages through apt-get$([ "$(id -u)" -eq 0 ] || echo ' and sudo'): ${packages[*]} (some 10 MB)"
fi
if ! $up_to_date; then
  note "- a virtual environment in .venv, from $python"
  if [ -n "$reuse" ]; then
    note "- torch: the one in $reuse is reused, nothing is downloaded for it"
  else
    note "- torch: pip installs '$torch' into .venv. The default index's Linux build is about"
    note "  2.7 GB of downloads with its CUDA libraries; a CPU build is 190 MB, for instance with"
    note "  PIP_ARGS='--index-url https://download.pytorch.org/whl/cpu'. An existing torch is reused"
    note "  with PYTHON=/path/to/its/python or TORCH_ROOT=/path/to/site-packages/torch."
  fi
  note "- Python packages into .venv (requirements-dev.txt, requirements-loops.txt): about 170 MB"
fi
[ "${1:-}" != "--dry-run" ] || exit 0

[ "${#packages[@]}" -eq 0 ] || install_packages "${packages[@]}"

if ! $up_to_date; then
  rm -f "$STAMP"
  # Another interpreter or another torch than before: begin anew rather than mix them.
  rm -rf "$VENV"
  "$python" -m venv "$VENV"
  [ -n "$reuse" ] ||
    "$VENV_PYTHON" -m pip install --disable-pip-version-check "${pip_args[@]}" "$torch"
  "$VENV_PYTHON" -m pip install --disable-pip-version-check -q "${pip_args[@]}" -r "$ROOT/requirements-dev.txt"
  if [ -n "$reuse" ]; then
    # Last, so that the tools above are in .venv even where the other environment has them too.
    echo "$reuse" >"$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/reused-torch.pth"
    "$VENV_PYTHON" -c 'import torch' ||
      fail "the torch in $reuse cannot be imported by $python. Name its own interpreter with PYTHON."
  fi
  # After torch, or pip would bring one of its own.
  "$VENV_PYTHON" -m pip install --disable-pip-version-check -q "${pip_args[@]}" -r "$ROOT/requirements-loops.txt"
  printf '%s\n' "$wanted" >"$STAMP"
fi
say "Set-up is complete: torch $("$VENV_PYTHON" -c 'import importlib.metadata as m; print(m.version("torch"))') in .venv"
