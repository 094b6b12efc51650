#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Parity on a GPU: every reference in the given folders (default: tests/data), f32 and bf16, three homes, side by
# side. A line for each reference and dtype: what failed, the check that came nearest to its bound (error / bound),
# whether the homes give the same bits. References of families that do not exist are left out and counted. Exit
# status 1 if a run failed or bits differ.
#   tests/gpu_parity.sh FOLDER_WITH_BSLUA [OUT [FOLDER_OF_REFERENCES...]]      DEVICE=cpu DTYPES=f32 rehearses it
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 1
out=${2:-build/gpu-parity}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
shift $(($# < 2 ? $# : 2))
references=()
for path in "$@"; do references+=("$(cd "$path" && pwd)") || exit 1; done
cd "$(dirname "$0")/.." || exit 1
. tests/gpu_lib.sh
[ ${#references[@]} -gt 0 ] || references=("$PWD/tests/data")

export out bslua=$folder/bslua device=${DEVICE:-cuda}
one() { # folder dtype home
  local name
  name=$(basename "$1")-$2-$3
  timeout 120 "$bslua" recipes/parity.lua model="$1" reference="$1/reference.safetensors" device="$device" dtype="$2" \
    home="$3" json="$out/$name.json" >"$out/$name.log" 2>&1
  echo $? >"$out/$name.status"
}
export -f one

list=() left_out=()
for root in "${references[@]}"; do
  for dir in "$root"/*/; do
    [ -e "$dir/reference.safetensors" ] || continue
    if why=$("$bslua" -e "require('bs.model.find_family').find(require('bs.model.checkpoint').read_json('${dir}config.json'))" 2>&1); then
      list+=("${dir%/}")
    elif [[ $why == *"has no family"* ]]; then
      left_out+=("$(basename "$dir")")
    else # another reason must not pass for that one
      echo "$(basename "$dir"): $why" >&2
      exit 1
    fi
  done
done
dtypes=${DTYPES:-f32 bf16}
for dir in "${list[@]}"; do
  for dtype in $dtypes; do
    for home in gpu ram disk; do echo "$dir $dtype $home"; done
  done
done | xargs -P "${JOBS:-8}" -L 1 bash -c 'one "$0" "$1" "$2"'

failed=0 runs=0
for dir in "${list[@]}"; do
  name=$(basename "$dir")
  for dtype in $dtypes; do
    line="" bits=""
    for home in gpu ram disk; do
      runs=$((runs + 1)) at=$out/$name-$dtype-$home
      if [ "$(cat "$at.status" 2>/dev/null)" != 0 ]; then
        failed=$((failed + 1))
        line="$line; $home FAILED: $(grep -E 'FAIL|bslua:' "$at.log" | tr -s ' ' | cut -c1-160 | head -3 | paste -sd'|')"
      fi
      bits="$bits $(grep -o '"hash": *"[0-9a-f]*"' "$at.json" 2>/dev/null | md5sum | cut -c1-8)"
    done
    nearest=$(awk '$(NF-2) == "bound" && $(NF-1) > 0 { r = $(NF-3) / $(NF-1); if (r >= most) { most = r; what = $1 } }
      END { if (what) printf "nearest %s %.2f", what, most }' "$out/$name-$dtype-gpu.log")
    same="same bits"
    if [ "$(tr ' ' '\n' <<<"$bits" | grep . | sort -u | wc -l)" != 1 ]; then
      same="HOMES DIFFER IN BITS" failed=$((failed + 1))
    fi
    echo "$name $dtype: $same; $nearest$line"
  done
done
[ ${#left_out[@]} -gt 0 ] && echo "no family: ${left_out[*]}"
echo "== ${#list[@]} references, $runs runs, $failed failures"
[ $failed -eq 0 ] && [ $runs -gt 0 ]
