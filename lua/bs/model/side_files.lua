-- SPDX-License-Identifier: Apache-2.0
--- The files of a model folder that go with its weights into another one: tokenizer, templates, whatever a text says.
-- Left out: weights in other forms, which would stay as they were; adapters, which programs would apply again; what is
-- no regular file; and links that lead out of the folder, but for those of a download cache into its own blobs.
local bs = require "bs"

local side_files = {}

local INDEX <const>, CONFIG <const> = "model.safetensors.index.json", "config.json"

local weights = {
  safetensors = true, bin = true, pt = true, pth = true, ckpt = true, gguf = true, h5 = true, msgpack = true,
  onnx = true, onnx_data = true, npz = true,
}

-- Files of tokenizers and generation by the names that programs look for: one of an earlier model must not stay beside
-- those of another.
local known = {
  "added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json", "merges.txt",
  "preprocessor_config.json", "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json",
  "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json",
  "vocab.json", "vocab.txt",
}

-- The folder that a path without links is in.
local function parent(path) return path:match("^(.*)/[^/]*$") end

-- The path without links of the file of a name. It may be a link inside the folder, or one of a cache's
-- snapshots/REVISION to its blobs. nil and the reason where it may not be read.
local function find(dir, name)
  local real = bs.real_path(dir .. "/" .. name)
  if not real then return nil, "a link to nothing" end
  if not bs.is_file(real) then return nil end
  local home = bs.real_path(dir)
  if real:sub(1, #home + 1) == home .. "/" then return real end
  local snapshots = parent(home)
  if snapshots:match("[^/]*$") == "snapshots" and parent(real) == parent(snapshots) .. "/blobs" then return real end
  return nil, "a link out of the folder"
end

local function is_left(name)
  return weights[(name:match("%.([^.]*)$") or ""):lower()] or name:match("%.index%.json$") or name:match("^adapter_")
    or name:sub(1, 1) == "."
end

--- The files of a model folder: {name = path}, and a list of what is left out, with a reason where it is not obvious.
-- config.json and the index are read wherever they are, as the weights are.
function side_files.of(dir)
  local files, left = {}, {}
  for _, name in ipairs(assert(bs.list_folder(dir))) do
    local from, why
    if name == CONFIG or name == INDEX then
      from = bs.is_file(dir .. "/" .. name) and dir .. "/" .. name
    elseif not is_left(name) then
      from, why = find(dir, name)
    end
    files[name] = from or nil
    if not from then left[#left + 1] = why and ("%s (%s)"):format(name, why) or name end
  end
  return files, left
end

--- Names that are replaced when these files are written: theirs and those that belong to a model of any kind.
function side_files.names(files)
  local names = table.move(known, 1, #known, 1, {})
  for name in pairs(files) do names[#names + 1] = (name:gsub("[][*?\\]", "\\%0")) end
  return names
end

return side_files
