#!/usr/bin/env bash
# Every test: builds everything, then ctest (C++) and pytest (Python, command line, packaging).
# Both run even if the first fails; the exit status tells whether both passed.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "make test: builds everything, runs the C++ tests, then the Python, command line and packaging"
note "tests. Nothing more is downloaded. From nothing it takes about 20 minutes on two cores."
# Two threads that wait for each other leave their cores to the other tests meanwhile: cases with two
# threads take a tenth of the time then.
export OMP_WAIT_POLICY=passive
"$VENV_PYTHON" "$ROOT/scripts/export_digits.py" "$ROOT/data/digits"
build_tree release

status=0
say "C++ tests"
ctest --test-dir "$RELEASE" --output-on-failure --parallel "$(jobs_for_this_machine)" || status=1
# The variables tell the tests which build they test.
export INFINITYBATCH_BUILD_DIR="$RELEASE" INFINITYBATCH_CLI="$RELEASE/bin/infinitybatch"
export PYTHONPATH="$RELEASE/python"
# Full tables take longer than the ten minutes that a test has else (pyproject.toml).
[ -z "${INFINITYBATCH_LONG_TESTS:-}" ] || export PYTEST_ADDOPTS="-o faulthandler_timeout=7200"
cd "$ROOT"
# A test uses one thread. Files stay together, for what is set up once in each; random programs need
# nothing set up, and one core alone would take an hour and a half for the long variant.
say "Python, command line and packaging tests, as many at once as there are cores"
"$VENV_PYTHON" -m pytest tests -m "not alone" --ignore tests/fuzz -n auto --dist loadfile --no-loadscope-reorder || status=1
say "Random programs"
"$VENV_PYTHON" -m pytest tests/fuzz -n auto --dist worksteal || status=1
say "Tests on a simulated accelerator"
files=tests/sim/sample.txt
[ -z "${INFINITYBATCH_LONG_TESTS:-}" ] || files=tests/sim/files.txt
# shellcheck disable=SC2046
"$VENV_PYTHON" -m pytest tests/sim $(cat "$files") --device sim -n auto --dist loadfile || status=1
say "Tests that no other may run beside, one after the other"
"$VENV_PYTHON" -m pytest tests -m alone || status=1
exit "$status"
