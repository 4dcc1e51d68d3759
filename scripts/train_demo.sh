#!/usr/bin/env bash
# What `make train` shows: the same training of the same batch in the same memory, first as plain
# PyTorch does it, which cannot work, then by infinitybatch. The network has BatchNorm, whose
# statistics are those of the whole batch: what waits for them is offloaded to disk, or computed
# again where that is faster.
#   train_demo.sh BINARY

set -euo pipefail

if [ $# -ne 1 ] || [ ! -x "$1" ]; then
  echo "usage: train_demo.sh BINARY (the infinitybatch program; 'make build' makes it)" >&2
  exit 2
fi
binary="$1"
budget=24MiB
settings=(--data digits --batch-size all --memory-budget "$budget" --optimizer adam --epochs 30)
out_of_memory=3
wanted_percent=97

say() { printf '\n==> %s\n' "$*"; }

# Both sides alike: glibc keeps freed blocks instead of paying page faults for each new one.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-4294967296}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-4294967296}"

# Threads that wait sleep instead of spinning: on a busy machine spinning costs a hundred times more.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

say "1. Native: all digits in one batch, in $budget. It is expected to run out of memory."
printf '$ infinitybatch train %s --strategy native\n' "${settings[*]}"
status=0
"$binary" train "${settings[@]}" --strategy native || status=$?
if [ "$status" -ne "$out_of_memory" ]; then
  echo "error: native training ended with code $status where $out_of_memory (out of memory) was expected" >&2
  exit 1
fi
echo "(out of memory, as expected: the whole batch does not fit in $budget)"

say "2. infinitybatch: the same model, batch and memory; gradient and BatchNorm are those of the whole batch."
printf '$ infinitybatch train %s\n' "${settings[*]}"
metrics="$(mktemp)"
trap 'rm -f "$metrics"' EXIT
# With --json what people read goes to stderr (shown here) and the metrics to stdout (kept).
# shellcheck disable=SC2069  # the order is meant: stderr to where stdout went, then stdout to the file
"$binary" train "${settings[@]}" --json 2>&1 >"$metrics"

number_of() { sed -n "s/.*\"event\":\"summary\".*\"$1\":\([0-9.e+-]*\).*/\1/p" "$metrics"; }
accuracy="$(number_of held_out_accuracy)"
peak="$(number_of peak_over_budget)"
offloaded="$(awk -v b="$(number_of offloaded_bytes)" -v s="$(number_of steps)" 'BEGIN {printf "%.0f", b / s / 2 ^ 20}')"
say "3. Result: held-out accuracy $(awk -v a="$accuracy" 'BEGIN {printf "%.1f", 100 * a}') %, peak $(awk -v p="$peak" 'BEGIN {printf "%.3f", p}') of the $budget budget, $offloaded MiB offloaded a step"
if ! awk -v a="$accuracy" -v p="$peak" -v wanted="$wanted_percent" \
  'BEGIN {exit !(100 * a >= wanted && p <= 1)}'; then
  echo "error: an accuracy of at least $wanted_percent % and a peak of at most 1 were expected" >&2
  exit 1
fi
