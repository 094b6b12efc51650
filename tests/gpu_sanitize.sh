#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer: memcheck over every kernel and over a small training job in bf16 that is streamed
# from disk, racecheck over the kernels with shared memory (attention, norms, softmax). The three run side by side.
# Exit status: the number of runs that failed.
#   tests/gpu_sanitize.sh FOLDER_WITH_THE_PROGRAMS [OUT]      EVERY=1 RACE_EVERY=12: one trial in so many
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 1
out=${2:-build/gpu-sanitize}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
. tests/gpu_lib.sh
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[ -n "$tool" ] || { echo "there is no compute-sanitizer on the path nor in /usr/local/cuda*/bin"; exit 1; }
kernels=$folder/test_cuda_kernels
[ -x "$kernels" ] || kernels=$folder/tests/test_cuda_kernels

run() { # name, options of the tool, program...
  local name=$1 options=$2 start=$SECONDS status
  shift 2
  # shellcheck disable=SC2086
  timeout "${LIMIT:-240}" "$tool" $options --error-exitcode 9 "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name: exit $status, $((SECONDS - start)) s, $(grep -E '^[0-9]+ passed|equals resident' "$out/$name.log" | tail -1), $(
    grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$name.log" | tail -1)"
  [ $status -eq 0 ] || grep -E '^=========|^FAIL|^bslua' "$out/$name.log" | cut -c1-160 | head -12
  echo $status >"$out/$name.status"
}
export BS_TEST_DEVICE=cuda BS_TEST_DTYPE=bf16 BS_TEST_TMP=$out/tmp
run memcheck-kernels "--tool memcheck --leak-check no" "$kernels" "--every=${EVERY:-1}" &
run memcheck-job "--tool memcheck --leak-check no" "$folder/bslua" tests/support/streamed_job.lua &
run racecheck "--tool racecheck --racecheck-report all" "$kernels" "--only=attention,rmsnorm,layernorm,softmax" \
  "--every=${RACE_EVERY:-12}" &
wait
failed=$(cat "$out"/*.status | grep -vc '^0$')
echo "== $failed runs failed"
exit "$failed"
