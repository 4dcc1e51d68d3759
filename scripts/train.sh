#!/usr/bin/env bash
# The main job: builds the command line, exports scikit-learn's digits and trains on them.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

say "make train: builds the command line, writes the digits data that scikit-learn ships into"
note "data/digits (nothing is downloaded for it), then trains inside a memory budget."
build_tree release infinitybatch_cli
"$VENV_PYTHON" "$ROOT/scripts/export_digits.py" "$ROOT/data/digits"
say "Training"
cd "$ROOT"
exec bash "$ROOT/scripts/train_demo.sh" "$RELEASE/bin/infinitybatch"
