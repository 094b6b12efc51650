# SPDX-License-Identifier: Apache-2.0
# Sourced by recipes/quickstart.sh and tests/run.sh, so that either may come first: packages, and a build folder.

# Installs what is missing as root or through sudo; otherwise prints the one line to run and stops.
need_packages() {
  if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "This is not Debian or Ubuntu: install Lua 5.4, cJSON, liburing, CMocka, OpenBLAS, PCRE2," \
         "utf8proc, CMake and busted by other means; continuing." >&2
    return 0
  fi
  local missing=()
  for p in "$@"; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q "install ok installed" || missing+=("$p")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  local run=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
      run=(sudo -n)
    else
      echo "These packages are missing; run this line, then this script again:" >&2
      echo "  sudo apt-get update && sudo apt-get install -y ${missing[*]}" >&2
      exit 1
    fi
  fi
  echo "installing: ${missing[*]}"
  "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
}

build_packages=(build-essential cmake ninja-build pkg-config liblua5.4-dev libcjson-dev liburing-dev
                libopenblas0 libpcre2-dev libutf8proc-dev)
test_packages=(lua5.4 libcmocka-dev lua-busted lua-check)

# Configures build/PRESET. A preset sets every option that matters here, so what an earlier configuration left in
# the folder does not; a folder of another generator is begun anew.
configure() { # preset, options of cmake
  local preset=$1 fresh=()
  shift
  if ! grep -qs '^CMAKE_GENERATOR:INTERNAL=Ninja$' "build/$preset/CMakeCache.txt"; then fresh=(--fresh); fi
  cmake --preset "$preset" "${fresh[@]}" "$@"
}
