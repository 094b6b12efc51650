#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running program: installs what is missing, builds, checks the numbers against a
# reference, then trains an adapter for 20 steps streamed from disk under budgets smaller than the model.
set -euo pipefail
cd "$(dirname "$0")/.."
. cmake/packages.sh
need_packages "${build_packages[@]}"
cmake --preset release -G Ninja -DBS_TESTS=OFF
cmake --build --preset release
bslua=build/release/bslua
"$bslua" --version
echo "== numbers against the reference, every block streamed from disk"
"$bslua" recipes/parity.lua model=tests/data/qwen3 reference=tests/data/qwen3/reference.safetensors home=disk |
  tail -n 12
echo "== 20 steps of LoRA, streamed from disk"
"$bslua" recipes/qwen8b_lora.lua model=tests/data/qwen3 data=tests/data/rows.jsonl steps=20 step_tokens=80 \
  micro_tokens=40 r=4 lr=5e-3 home=disk vram=2MiB ram=12MiB out=build/quickstart-adapter
