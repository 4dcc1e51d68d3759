#!/usr/bin/env bash
# The C++ tests with several threads under ThreadSanitizer: steps, wrapped models and copies of what
# is offloaded, each beside others. Arguments go to the test programs (--gtest_filter=...).
#
# Not covered, and why:
#   - torch's own code: the wheel is not instrumented, so what it does to memory is left out
#     (ignore_noninstrumented_modules);
#   - kernels on several threads: the barriers of OpenMP's runtime are not seen either, so tests run
#     with one;
#   - Python tests: the interpreter would have to be started with the sanitizer preloaded.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "make tsan: builds the library and the tests with several threads instrumented, then runs them"
build_tree tsan infinitybatch_threads_tests infinitybatch_offload_tests infinitybatch_memory_tests
export OMP_NUM_THREADS=1
export TSAN_OPTIONS="ignore_noninstrumented_modules=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"
# Addresses chosen at random may lie where the sanitizer has its shadow memory.
run=()
if setarch "$(uname -m)" -R true 2>/dev/null; then run=(setarch "$(uname -m)" -R); fi
status=0
# What is left out asserts times, and a program with the sanitizer is ten times slower, or counts the
# process's mappings, and the sanitizer has its own for each. Of the memory tests those are wanted
# that share pages.
for tests in "threads:-" "offload:-Background.WhatComputationHidesIsTold" \
  "memory:PagesTest.*-PagesTest.LieApartOnlyAsFarAsThereAreMappings"; do
  program=infinitybatch_${tests%%:*}_tests
  say "$program"
  "${run[@]}" "$BUILD/tsan/bin/$program" --gtest_brief=1 --gtest_filter="${tests#*:}" "$@" || status=1
done
[ "$status" -eq 0 ] || fail "ThreadSanitizer found a race, or a test failed"
note "no race"
