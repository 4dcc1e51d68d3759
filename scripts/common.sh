# shellcheck shell=bash disable=SC2034
# Sourced by the other scripts: where things are and how to say what happens.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VENV_PYTHON="$VENV/bin/python"
BUILD="$ROOT/build"
RELEASE="$BUILD/release"

say() { printf '\n==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Debian packages, by root or through sudo.
install_packages() {
  local sudo=()
  if ! command -v apt-get >/dev/null; then
    fail "these are missing and this is no Debian or Ubuntu: $*. Install them by your system's" \
      "names for them, then run this again."
  fi
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "as root, please: apt-get install $*"
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# How many compilers may run at once: one a core, but each wants up to 2 GB of memory.
jobs_for_this_machine() {
  if [ -n "${JOBS:-}" ]; then
    echo "$JOBS"
    return
  fi
  local cores memory
  cores="$(nproc 2>/dev/null || echo 1)"
  memory="$(awk '/MemAvailable/ {print int($2 / 2000000)}' /proc/meminfo 2>/dev/null || echo 1)"
  [ "${memory:-0}" -ge 1 ] || memory=1
  if [ "$memory" -lt "$cores" ]; then echo "$memory"; else echo "$cores"; fi
}

# build_tree <preset> [target...]: configure build/<preset> against the environment's torch and
# build the targets (everything, if none is named).
build_tree() {
  local preset="$1"
  shift
  local targets=()
  [ "$#" -eq 0 ] || targets=(--target "$@")
  say "Configuring and building build/$preset${*:+ ($*)} with $(jobs_for_this_machine) jobs"
  mkdir -p "$BUILD"
  (
    cd "$ROOT" || exit
    cmake --preset "$preset" -DPython_EXECUTABLE="$VENV_PYTHON" \
      -DCMAKE_MAKE_PROGRAM="$VENV/bin/ninja" -DINFINITYBATCH_WHEEL_LAYOUT=OFF >"$BUILD/configure-$preset.log" 2>&1 ||
      { cat "$BUILD/configure-$preset.log"; exit 1; }
    cmake --build "$BUILD/$preset" --parallel "$(jobs_for_this_machine)" "${targets[@]}"
  )
}
