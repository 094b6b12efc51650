# SPDX-License-Identifier: Apache-2.0
# Sourced by recipes/quickstart.sh and tests/run.sh, so that either may come first: packages, and a build folder.

is_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q "install ok installed"; }

# The words to put before a command that installs, in `as_root`; false where this user may not.
may_install() {
  as_root=()
  [ "$(id -u)" -eq 0 ] && return 0
  as_root=(sudo -n)
  command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null
}

# Installs what is missing as root or through sudo; otherwise prints the one line to run and stops.
need_packages() {
  if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "This is not Debian or Ubuntu: install Lua 5.4, cJSON, liburing, CMocka, OpenBLAS, PCRE2," \
         "utf8proc, CMake and busted by other means; continuing." >&2
    return 0
  fi
  local missing=()
  for p in "$@"; do is_installed "$p" || missing+=("$p"); done
  [ ${#missing[@]} -eq 0 ] && return 0
  if ! may_install; then
    echo "These packages are missing; run this line, then this script again:" >&2
    echo "  sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
    exit 1
  fi
  echo "installing: ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
}

# The same for what a test does without: where the distribution does not have it, or nothing may be installed, a line
# says so and the script goes on.
want_packages() {
  command -v dpkg-query >/dev/null 2>&1 || return 0
  local quick=(-o Acquire::Retries=0 -o Acquire::http::Timeout=10)
  for p in "$@"; do
    is_installed "$p" && continue
    may_install && "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq "${quick[@]}" "$p" >/dev/null 2>&1 && echo "installed: $p" && continue
    echo "without $p, which could not be installed: its test is left out"
  done
}

build_packages=(build-essential cmake ninja-build pkg-config liblua5.4-dev libcjson-dev liburing-dev
                libopenblas0 libpcre2-dev libutf8proc-dev)
test_packages=(lua5.4 libcmocka-dev lua-busted lua-check)
optional_test_packages=(clang-format-14)

# Configures build/PRESET. A preset sets every option that matters here, so what an earlier configuration left in
# the folder does not; a folder of another generator is begun anew.
configure() { # preset, options of cmake
  local preset=$1 fresh=()
  shift
  if ! grep -qs '^CMAKE_GENERATOR:INTERNAL=Ninja$' "build/$preset/CMakeCache.txt"; then fresh=(--fresh); fi
  cmake --preset "$preset" "${fresh[@]}" "$@"
}
