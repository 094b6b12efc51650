#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every figure that the runtime is held to on a GPU, one line each: name, measured, bound, ok or no. Numbers and raw
# samples go to OUT as JSON, with a log beside each. About 5 minutes for `ram`, 2 each for `disk` and `ops` on an H200;
# DIR (default: OUT/checkpoints) needs 20 GB, on the drive that is to be measured.
#   bench/figures.sh DIST OUT [ram|disk|ops|all] [DIR]
#   ONLY=name       only the cases whose name holds that
#   PYTHON=python3  with PyTorch, for the comparison
#   DEVICE=cuda SHAPE=qwen3-8b  for a rehearsal elsewhere; the bounds are those of this device and shape
# Exit status: 0 all bounds are kept, 1 some are not, 2 usage.
set -uo pipefail
if [ $# -lt 2 ] || ! [ -x "$1/bslua" ]; then
  echo "bench/figures.sh DIST OUT [ram|disk|ops|all] [DIR]; DIST is a folder with the program bslua" >&2
  exit 2
fi
part=${3:-all}
case $part in ram|disk|ops|all) ;; *) echo "$part: ram, disk, ops or all is expected" >&2; exit 2 ;; esac
dist=$(cd "$1" && pwd)
mkdir -p "$2" && out=$(cd "$2" && pwd)
dir=${4:-$out/checkpoints}
bench=$(cd "$(dirname "$0")" && pwd)
only=${ONLY:-} python=${PYTHON:-python3} device=${DEVICE:-cuda} shape=${SHAPE:-qwen3-8b}

run() { # name, seconds at most, command
  local name=$1 most=$2 start=$SECONDS
  case $name in *"$only"*) ;; *) return ;; esac
  timeout "$most" "${@:3}" >"$out/$name.log" 2>&1
  local status=$?
  [ $status -eq 0 ] || { echo "$name: exit $status: $(tail -1 "$out/$name.log")"; }
  echo "$name: $((SECONDS - start)) s" >>"$out/seconds.txt"
}
stream() { # name, seconds at most, settings
  run "$1" "$2" "$dist/bslua" "$bench/stream.lua" device="$device" dir="$dir" json="$out/$1.json" "${@:3}"
}
big=(shape="$shape" dev_slots=2)

if [ "$part" = ops ] || [ "$part" = all ]; then
  run ops 200 "$dist/bslua" "$bench/ops.lua" shape="$shape" device="$device" dir="$dir" tokens=2048,8192 \
    json="$out/ops.json"
  for turn in 1 2; do # ours and PyTorch's alternate
    stream tiny64-$turn 60 shape=tiny64 tokens=32 home=ram mode=train,empty dev_slots=2 steps=40
    if "$python" -c "import torch" 2>/dev/null; then
      run torch64-$turn 90 "$python" "$bench/torch_stream.py" shape=tiny64 tokens=32 steps=40 json="$out/torch64-$turn.json"
    fi
  done
fi
if [ "$part" = ram ] || [ "$part" = all ]; then
  stream ram 120 "${big[@]}" tokens=128,2048 home=ram
  # two slots more for what the link can bring while the backward pass of long rows computes
  stream 8192 90 shape="$shape" dev_slots=4 tokens=8192 home=ram boundaries=host profile=true
  stream kept 60 "${big[@]}" tokens=8192 home=gpu keep=18
  stream infer 60 "${big[@]}" tokens=128 home=ram mode=infer
  stream 4x2048 80 "${big[@]}" tokens=2048 micros=4 home=ram profile=true
  stream 16x2048 120 "${big[@]}" tokens=2048 rows=2 micros=8 home=ram boundaries=host profile=true limit=80
  stream 4x8192 90 "${big[@]}" tokens=8192 micros=4 home=ram boundaries=host profile=true limit=60
  stream 8x512 80 "${big[@]}" tokens=512 micros=8 home=ram
  stream vram8 60 "${big[@]}" tokens=2048 home=auto vram=8GB
fi
if [ "$part" = disk ] || [ "$part" = all ]; then
  stream disk 150 "${big[@]}" tokens=128 home=disk steps=2
  stream half 90 "${big[@]}" layers=12 tokens=128 home=auto vram=1GB ram_blocks=6 steps=4
  stream idle 90 "${big[@]}" tokens=128 home=ram,auto vram=1GB ram=auto
fi
"$dist/bslua" "$bench/figures.lua" "$out"
