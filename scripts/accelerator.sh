#!/usr/bin/env bash
# Runs the test suite and the benchmarks with this machine's accelerator, and writes what came out to
# a dated folder. Arguments: the device (cuda, xpu, mps); what torch finds, if left out.
# "sim FOLDER" tries this script on the simulated device, with less work, for `make test`: nothing is
# built, and what comes out goes to the folder.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_device='import torch
device = torch.accelerator.current_accelerator(check_available=True)
print(device.type if device else "")'
device="${1:-$("$VENV_PYTHON" -c "$find_device")}"
[ -n "$device" ] ||
  fail "torch finds no accelerator here. Install a torch that has one (TORCH=torch==2.13.0 make setup)."

results="${2:-$ROOT/benchmarks/results/accelerator-$(date +%Y-%m-%d-%H%M%S)}"
say "make gpu: builds everything, then runs tests and benchmarks on '$device'. Nothing is downloaded;"
note "results go to ${results#"$ROOT"/}."
benchmarks=()
if [ "$device" = sim ]; then
  [ $# -eq 2 ] || fail "the simulated device needs a folder for what comes out: accelerator.sh sim FOLDER"
  export INFINITYBATCH_DRY=1 PYTHONPATH="$ROOT/tests/sim"
  benchmarks=(--toy --rounds 2)
else
  build_tree release
fi
mkdir -p "$results"
export INFINITYBATCH_BUILD_DIR="${INFINITYBATCH_BUILD_DIR:-$RELEASE}"
export INFINITYBATCH_CLI="$INFINITYBATCH_BUILD_DIR/bin/infinitybatch"
export PYTHONPATH="$INFINITYBATCH_BUILD_DIR/python${PYTHONPATH:+:$PYTHONPATH}"
cd "$ROOT"
{
  date --iso-8601=seconds
  git rev-parse HEAD 2>/dev/null || echo "no commit"
  "$VENV_PYTHON" -c 'import sys, torch
print("torch", torch.__version__)
if sys.argv[1] == "sim":
    import simulated_device
print(torch.get_device_module(sys.argv[1]).get_device_properties(0))' "$device"
} >"$results/machine.txt"

status=0
say "Tests"
files=()
while read -r file; do files+=("$file"); done <"$ROOT/tests/sim/files.txt"
if [ "$device" = sim ]; then # they are there, and can be imported
  "$VENV_PYTHON" -m pytest "${files[@]}" --device sim --collect-only --quiet >"$results/collected.txt" ||
    status=1
  files=()
fi
"$VENV_PYTHON" -m pytest "$ROOT/tests/sim" "${files[@]}" --device "$device" \
  --junitxml "$results/tests.xml" 2>&1 | tee "$results/tests.txt" || status=1
say "Benchmarks"
"$VENV_PYTHON" benchmarks/accelerator.py "$device" --output "$results/times.json" \
  "${benchmarks[@]}" || status=1
exit "$status"
