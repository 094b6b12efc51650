-- SPDX-License-Identifier: Apache-2.0
std = "lua54"
max_line_length = 120
files["tests/**/*_spec.lua"] = {std = "lua54+busted"}
