#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, from a build folder or a dist folder: the device contract and the kernels on
# "cuda" and "check:cuda", a lost GPU, jobs (gpu_stream.sh), parity (gpu_parity.sh), then times. A compact report;
# the whole output goes to OUT (default: a folder gpu_report here). Exit status: the number of programs that failed.
#   tests/run_gpu.sh [folder with the programs]      BENCH=0: no times; SANITIZE=1: compute-sanitizer, too
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here}
[ -x "$folder/bslua" ] || folder=$here/../build/cuda
OUT=${OUT:-$PWD/gpu_report}
mkdir -p "$OUT"

tests=$here
[ -d "$here/tests" ] && tests=$here/tests
. "$tests/gpu_lib.sh"
echo "GPU: $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -1)"
"$folder/bslua" --version 2>&1 | tail -4

failures=0
program() { for d in "$folder" "$folder/tests"; do [ -x "$d/$1" ] && echo "$d/$1" && return; done; }
run() { # title, program, arguments
  local title=$1 path log="$OUT/$1.log" status
  path=$(program "$2")
  if [ -z "$path" ]; then echo "-- $title: not built"; return; fi
  timeout 300 "$path" "${@:3}" >"$log" 2>&1
  status=$?
  echo "-- $title: exit $status, $(grep -cE '^ok |\[ +OK \]' "$log") ok, $(grep -cE '^FAIL|\[ +FAILED +\] [a-z]' "$log") failed"
  [ $status -eq 0 ] && return
  failures=$((failures + 1))
  grep -E '^FAIL|FATAL|FAILED|error|no cuda|ERROR' "$log" | head -40
}
run contract test_dev_contract
run check test_dev_check
run kernels test_cuda_kernels
run kernels-check test_cuda_kernels --check
run lost test_dev_contract --lose
script() { # title, script: in the same folder as this or below it
  echo "-- $1"
  "$tests/$2" "$folder" "$OUT/$1" || failures=$((failures + 1))
}
script stream gpu_stream.sh
script parity gpu_parity.sh
[ "${SANITIZE:-0}" != 0 ] && script sanitize gpu_sanitize.sh
if [ "${BENCH:-1}" != 0 ]; then
  run times bench_cuda_kernels
  grep -E '^bench' "$OUT/times.log"
fi
echo "== $failures programs failed"
exit $failures
