#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh clone to a running program: installs what is missing, builds, and runs quickstart.lua, which
# makes a small model, finetunes it streamed from disk and checks the result. Words are its settings.
set -euo pipefail
cd "$(dirname "$0")/.."
. cmake/packages.sh
need_packages "${build_packages[@]}"
cmake --preset release -G Ninja -DBS_TESTS=OFF
cmake --build --preset release
build/release/bslua --version
exec build/release/bslua recipes/quickstart.lua "$@"
