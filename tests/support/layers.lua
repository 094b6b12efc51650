-- SPDX-License-Identifier: Apache-2.0
--- The tree as data: which folders are which layer, and what a layer may name. tests/lua/lint_*_spec.lua hold the
-- tree against it; whoever moves a folder changes this table and nothing else.
local layers = {}

--- Layers of C, lowest first: name, folders (the longest one that holds a file counts), what it may include besides
-- its own headers and the system's. A public header src/bs/NAME.h belongs to layer NAME; `public` is what it may
-- include besides.
layers.c = {
  { "base", { "src/base" }, {} },
  { "bsk", { "kernels" }, { "base" } },
  { "kernels/cpu", { "kernels/cpu" }, { "base", "bsk" } },
  { "kernels/cuda", { "kernels/cuda" }, { "base", "bsk" } },
  { "dev", { "src/dev" }, { "base", "bsk" } },
  { "nvml", { "src/backend/nvml" }, { "dev" } },
  { "devices", { "src/backend/meta", "src/backend/check", "src/backend/cpu" }, { "base", "bsk", "dev" } },
  { "cuda", { "src/backend/cuda" }, { "base", "bsk", "dev", "nvml", "kernels/cuda" } },
  { "backend", { "src/backend" }, { "base", "dev", "nvml", "devices", "cuda" } },
  { "io", { "src/io" }, { "base" } },
  { "text", { "src/text" }, { "base" } },
  { "engine", { "src/engine" }, { "base", "bsk", "dev" } },
  { "tensor", { "src/tensor" }, { "base", "bsk", "dev", "engine" }, public = { "io" } },
  { "stream", { "src/stream" }, { "base", "bsk", "dev", "engine", "io" } },
  { "train", { "src/train" }, { "base", "bsk", "dev", "engine", "tensor" } },
  { "bs.h", { "src" }, { "base", "dev", "io", "text", "engine", "tensor", "stream", "train" } },
  { "lua", { "src/lua" }, { "bs.h" } },
  { "host", { "src/host" }, { "bs.h", "lua" } },
}

--- Where the public headers are, of which src/bs.h includes every one.
layers.public_folder = "src/bs"

--- Folders where an include of a system header that matches the pattern is allowed; anywhere else it is a fault.
layers.foreign = {
  { "^lua", { "src", "src/lua", "src/host" } },
  { "^lauxlib", { "src/lua", "src/host" } },
  { "^cu", { "kernels/cuda", "src/backend/cuda" } },
  { "^nvtx", { "kernels/cuda", "src/backend/cuda" } },
}

--- Where #include "..." looks, after the folder of the file itself.
layers.include_path = { "src", "kernels", "tests/support" }

--- Rooms of lua/bs, lowest first: folders, or single files by their names, where those of one line do not know each
-- other. A file may require what stands in its own room or in a line above.
layers.rooms = {
  { "settings" },
  { "init" },
  { "args", "tokenizer", "data", "nn" },
  { "chat" },
  { "family" },
  { "model" },
  { "instance" },
  { "plan", "decode" },
  { "train" },
  { "job" },
  { "cli" },
}

--- Most circles of files inside one folder of C.
layers.most_circles = 0

--- Most lines of a file by its extension, and of a function.
layers.most_lines = { c = 899, h = 899, cu = 899, cuh = 899, cpp = 899, lua = 399 }
layers.most_function_lines = 80

--- Longest line of C, comments included; the formatter itself keeps code within its ColumnLimit.
layers.most_columns = 120

--- The one version of clang-format whose output is the format of the tree.
layers.clang_format = 14

return layers
