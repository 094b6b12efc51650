#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# busted.sh BSLUA SPEC [options]: run a busted spec in the host program; the specs of the bindings run a
# second time in a stock lua5.4 that loads the module BS_MODULE.
set -eu
bslua=$1
spec=$2
shift 2

printf 'require "busted.runner"({standalone = false})\n' | "$bslua" - --output=plainTerminal "$@" "$spec"

case $(basename "$spec") in
binding_spec.lua | lifetime_spec.lua | json_spec.lua | array_spec.lua | safetensors_spec.lua | tokenizer_spec.lua) ;;
*) exit 0 ;;
esac
[ -n "${BS_MODULE:-}" ] || exit 0
command -v lua5.4 >/dev/null || exit 0
# A sanitized module needs its runtime in the program: only the host has it.
if grep -q -e __asan_init -e __tsan_init "$BS_MODULE"; then exit 0; fi
printf 'require "busted.runner"({standalone = false})\n' |
    LUA_CPATH="$(dirname "$BS_MODULE")/?.so;;" lua5.4 - --output=plainTerminal "$@" "$spec"
