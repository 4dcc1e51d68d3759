#!/usr/bin/env bash
# Compiles everything into build/release. Needs scripts/setup.sh to have run.
#   build.sh [target...]

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

build_tree release "$@"
note "command line    build/release/bin/infinitybatch"
note "Python package  PYTHONPATH=build/release/python .venv/bin/python"
