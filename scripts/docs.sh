#!/usr/bin/env bash
# The site: every document of the repository, and the reference of both languages, in build/docs.
# Nothing in it is loaded from the network. A link that leads nowhere is an error.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$ROOT"
say "make docs: installs Sphinx and its like into .venv (requirements-docs.txt) and the"
note "system package doxygen, where they are missing; builds the site in build/docs."
command -v doxygen >/dev/null || install_packages doxygen
stamp="$VENV/.infinitybatch-docs"
if ! cmp -s requirements-docs.txt "$stamp"; then
  read -r -a pip_args <<<"${PIP_ARGS:-}"
  "$VENV_PYTHON" -m pip install --disable-pip-version-check -q "${pip_args[@]}" -r requirements-docs.txt
  cp requirements-docs.txt "$stamp"
fi
rm -rf "$BUILD/docs" "$BUILD/doxygen"
mkdir -p "$BUILD"
doxygen docs/site/Doxyfile
# Everything anew, and every warning an error.
PYTHONPATH="$RELEASE/python" "$VENV_PYTHON" -m sphinx -c docs/site -E -q -W --keep-going \
  -d "$BUILD/docs-cache" . "$BUILD/docs"
"$VENV_PYTHON" docs/site/no_network.py "$BUILD/docs"
say "The site is build/docs/index.html"
