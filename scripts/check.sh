#!/usr/bin/env bash
# Formatters and linters. check.sh tells, check.sh --fix reformats, check.sh --tidy has clang-tidy look
# at every file.

set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cd "$ROOT"
mapfile -t cpp < <(find include src apps python tests examples benchmarks -name '*.cpp' -o -name '*.hpp' 2>/dev/null | sort)

if [ "${1:-}" = "--fix" ]; then
  "$VENV/bin/clang-format" -i "${cpp[@]}"
  "$VENV/bin/ruff" check --fix .
  "$VENV/bin/ruff" format .
  exit 0
fi

status=0
say "clang-format ($("$VENV/bin/clang-format" --version | grep -o '[0-9.]*' | head -1))"
"$VENV/bin/clang-format" --dry-run -Werror "${cpp[@]}" || status=1
say "ruff"
"$VENV/bin/ruff" check . || status=1
"$VENV/bin/ruff" format --check . || status=1
say "bash -n and shellcheck"
for script in scripts/*.sh .ci/run; do bash -n "$script" || status=1; done
if command -v shellcheck >/dev/null; then
  shellcheck -x scripts/*.sh .ci/run || status=1
else
  note "shellcheck is not installed: apt-get install shellcheck to include it."
fi
say "clang-tidy"
# Half a minute a file: only what this branch changes, unless check.sh --tidy asks for all.
tidy_files() {
  if [ "${1:-}" = "--tidy" ]; then
    git ls-files src apps
  else
    git diff --name-only --diff-filter=d "$(git merge-base HEAD '@{upstream}' 2>/dev/null || echo HEAD)"
  fi | grep -E '^(src|apps)/.*\.cpp$' || true
}
mapfile -t tidy < <(tidy_files "$@")
if ! command -v clang-tidy >/dev/null; then
  note "clang-tidy is not installed: apt-get install clang-tidy to include it."
elif [ "${#tidy[@]}" -eq 0 ]; then
  note "no changed source file; 'make tidy' looks at all of them"
else
  # A configured tree says how files are compiled; g++'s precompiled header is taken out.
  [ -f build/release/compile_commands.json ] || build_tree release infinitybatch
  mkdir -p build/tidy
  "$VENV_PYTHON" scripts/tidy_commands.py build/release/compile_commands.json build/tidy/compile_commands.json
  printf '%s\n' "${tidy[@]}" |
    xargs -P "$(jobs_for_this_machine)" -n 4 clang-tidy -p build/tidy --quiet || status=1
fi
if [ "$status" -eq 0 ]; then say "All checks passed"; else say "Some checks failed"; fi
exit "$status"
