#!/usr/bin/env bash
# Runs the test suite and the benchmarks with this machine's accelerator, and writes what came out to
# a dated folder. Arguments: the device (cuda, xpu, mps); what torch finds, if left out.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

find_device='import torch
device = torch.accelerator.current_accelerator(check_available=True)
print(device.type if device else "")'
device="${1:-$("$VENV_PYTHON" -c "$find_device")}"
[ -n "$device" ] ||
  fail "torch finds no accelerator here. Install a torch that has one (TORCH=torch==2.13.0 make setup)."

results="$ROOT/benchmarks/results/accelerator-$(date +%Y-%m-%d-%H%M%S)"
say "make gpu: builds everything, then runs tests and benchmarks on '$device'. Nothing is downloaded;"
note "results go to ${results#"$ROOT"/}."
build_tree release
mkdir -p "$results"
export INFINITYBATCH_BUILD_DIR="$RELEASE" INFINITYBATCH_CLI="$RELEASE/bin/infinitybatch"
export PYTHONPATH="$RELEASE/python"
cd "$ROOT"
{
  date --iso-8601=seconds
  git rev-parse HEAD 2>/dev/null || echo "no commit"
  "$VENV_PYTHON" -c 'import torch
print("torch", torch.__version__)
print(torch.get_device_module().get_device_properties(0))'
} >"$results/machine.txt"

status=0
say "Tests"
# shellcheck disable=SC2046
"$VENV_PYTHON" -m pytest $(cat "$ROOT/tests/sim/files.txt") --device "$device" \
  --junitxml "$results/tests.xml" 2>&1 | tee "$results/tests.txt" || status=1
say "Benchmarks"
"$VENV_PYTHON" benchmarks/accelerator.py "$device" --output "$results/times.json" || status=1
exit "$status"
