#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running program: installs what is missing, builds, and runs quickstart.lua, which
# makes a small model, finetunes it streamed from disk and checks the result. Words are its settings;
# device=cuda builds with CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
. cmake/packages.sh
preset=release
for word in "$@"; do
  case $word in device=*cuda*) preset=cuda ;; esac
done
need_packages "${build_packages[@]}"
configure "$preset"
cmake --build --preset "$preset" --target bslua
"build/$preset/bslua" --version
exec "build/$preset/bslua" recipes/quickstart.lua "$@"
