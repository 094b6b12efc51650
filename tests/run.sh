#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every test: installs what is missing, builds, runs all in release, then the C tests and one small
# streamed job under the address and thread sanitizers. The last line is "N passed, N failed".
# Where there is a CUDA compiler, the program is also built with CUDA and must refuse device=cuda as it should, and
# the kernels without tensor cores run on the CPU.
# BS_PRESETS="release" runs less.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. cmake/packages.sh
need_packages "${build_packages[@]}" "${test_packages[@]}"
want_packages "${optional_test_packages[@]}"

passed=0 failed=0 failures=()

# ThreadSanitizer maps fixed addresses; kernels with many random address bits need setarch -R.
wrap=()
sanitizer_wrap() {
  wrap=()
  [ "$1" = tsan ] && setarch "$(uname -m)" -R true 2>/dev/null && wrap=(setarch "$(uname -m)" -R)
}

run_preset() { # preset, ctest label expression
  local preset=$1 select=$2 log="build/$1-ctest.log"
  echo "== $preset: build"
  if ! { configure "$preset" -DBS_TESTS=ON && cmake --build --preset "$preset"; } >"build/$preset-build.log" 2>&1; then
    tail -40 "build/$preset-build.log"
    failed=$((failed + 1)) failures+=("$preset: build")
    return
  fi
  echo "== $preset: tests"
  sanitizer_wrap "$preset"
  "${wrap[@]}" ctest --test-dir "build/$preset" --output-on-failure -j 2 -L "$select" 2>&1 | tee "$log" |
    grep -vE '^ *Start |Test +#[0-9]+: .* Passed'
  local ok bad
  ok=$(grep -cE 'Test +#[0-9]+: .* Passed' "$log")
  bad=$(grep -cE 'Test +#[0-9]+: .*(\*\*\*Failed|\*\*\*Timeout|\*\*\*Exception|\*\*\*Not Run)' "$log")
  [ "$ok" -eq 0 ] && bad=$((bad + 1))
  passed=$((passed + ok)) failed=$((failed + bad))
  while read -r name; do failures+=("$preset: $name"); done < <(
    sed -nE 's/.*Test +#[0-9]+: ([^ ]+) .*\*\*\*(Failed|Timeout|Exception|Not Run).*/\1/p' "$log")
}

mkdir -p build
for preset in ${BS_PRESETS:-release asan tsan cuda-ci}; do
  case $preset in
    cuda-ci)
      if command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ]; then
        run_preset "$preset" '^device$'
      else
        echo "== $preset: skipped, there is no nvcc on the path (nor in CUDACXX)"
      fi ;;
    release | dev) run_preset "$preset" '.' ;;
    *) run_preset "$preset" '^(c|job)$' ;;
  esac
done
for f in "${failures[@]}"; do echo "FAILED $f"; done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
