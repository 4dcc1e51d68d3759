#!/usr/bin/env bash
# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer.
#
# Not covered, and why:
#   - Python tests: the interpreter would have to be started with the sanitizer preloaded, and then
#     reports its own and NumPy's findings before ours;
#   - torch's own code: the wheel is not instrumented. An overflow of tensor memory by our code is
#     still found, as the allocation passes through the sanitizer's malloc;
#   - leaks: torch keeps singletons for the life of the process, which would all be reported.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "make asan: builds the library and the C++ tests instrumented, then runs them"
build_tree asan infinitybatch_tests
# detect_odr_violation: the wheel's libraries define some of their globals twice themselves.
export ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:allocator_may_return_null=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
exec ctest --test-dir "$BUILD/asan" --output-on-failure
