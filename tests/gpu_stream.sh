#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The specs of jobs on a GPU, f32 and bf16, with no more than bslua: streamed equals resident for every placement,
# bytes and pool as planned, fifty seeds of delays, what a device may refuse. The files run side by side. Exit
# status: the number of files that failed.
#   tests/gpu_stream.sh FOLDER_WITH_BSLUA [OUT]      DEVICE=cpu rehearses it
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 1
out=${2:-build/gpu-stream}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
cd "$(dirname "$0")/.." || exit 1
. tests/gpu_lib.sh

export BSLUA=$folder/bslua BS_TEST_DEVICE=${DEVICE:-cuda} out
one() { # spec dtype
  export BS_TEST_DTYPE=$2 BS_TEST_TMP=$out/tmp-$1-$2
  timeout "${LIMIT:-280}" "$BSLUA" tests/support/specs.lua "tests/lua/$1_spec.lua" >"$out/$1-$2.log" 2>&1
  local status=$?
  rm -rf "$BS_TEST_TMP"
  echo "$1 $2: exit $status, $(tail -n 1 "$out/$1-$2.log")"
  [ $status -eq 0 ] || { grep -A2 -E '^FAIL|^bslua:' "$out/$1-$2.log" | cut -c1-300 | head -12; }
  return $status
}
export -f one
dtypes="f32 bf16"
[ "$BS_TEST_DEVICE" = cpu ] && dtypes=f32
for spec in invariants jitter device_faults bad_run; do
  for dtype in $dtypes; do echo "$spec $dtype"; done
done | xargs -P "${JOBS:-8}" -L 1 bash -c 'one "$0" "$1" || echo "failed: $0 $1"' | tee "$out/all.log"
failed=$(grep -c '^failed: ' "$out/all.log")
echo "== $failed spec files failed"
exit "$failed"
