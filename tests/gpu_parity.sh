#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Parity on a GPU for every reference in tests/data, f32 and bf16, three homes: one line each, and whether the
# homes give the same bits.   tests/gpu_parity.sh FOLDER_WITH_BSLUA [OUT]
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
bslua=$1/bslua
out=${2:-build/gpu-parity}
mkdir -p "$out"
failed=0
for dir in tests/data/*/; do
  name=$(basename "$dir")
  [ -e "$dir/reference.safetensors" ] || continue
  for dtype in f32 bf16; do
    bits=""
    for home in gpu ram disk; do
      log=$out/$name-$dtype-$home.log
      timeout 60 "$bslua" recipes/parity.lua model="$dir" reference="$dir/reference.safetensors" device=cuda \
        dtype=$dtype home=$home json="$out/$name-$dtype-$home.json" >"$log" 2>&1
      status=$?
      [ $status -ne 0 ] && failed=$((failed + 1)) && grep -E 'FAIL|bslua:' "$log" | head -4
      bits="$bits $(grep -o '"hash": *"[0-9a-f]*"' "$out/$name-$dtype-$home.json" 2>/dev/null | md5sum | cut -c1-8)"
      echo "$name $dtype $home: exit $status, $(tail -n 1 "$log")"
    done
    [ "$(echo $bits | tr ' ' '\n' | sort -u | wc -l)" = 1 ] || { echo "$name $dtype: homes differ in bits"; failed=$((failed + 1)); }
  done
done
echo "== $failed parity runs failed"
[ $failed -eq 0 ]
