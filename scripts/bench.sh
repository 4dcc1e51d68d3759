#!/usr/bin/env bash
# Runs the benchmarks against build/release. Arguments go to benchmarks/run.py.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "make bench: builds everything, then times it against native training. Leave the machine alone"
note "meanwhile; results go to benchmarks/results."
build_tree release
cd "$ROOT"
PYTHONPATH="$RELEASE/python" INFINITYBATCH_CLI="$RELEASE/bin/infinitybatch" \
  exec "$VENV_PYTHON" benchmarks/run.py "$@"
