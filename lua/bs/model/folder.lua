-- SPDX-License-Identifier: Apache-2.0
--- What a folder is that is no checkpoint of ours: each form in which models are handed on has its name, and a way on.
local bs = require "bs"
local files = require "bs.settings.files"
local tell = require "bs.model.tell"

local folder = {}

local CONVERT <const> = "load it with transformers and write it again with save_pretrained, which makes safetensors"

-- Names of files by pattern: what they are, and what to do. The first that is there is told.
local forms = {
  { "%.gguf$", "a GGUF file", "give the original checkpoint, in safetensors" },
  { "^consolidated.*%.safetensors$", "Mistral's own layout of weights",
    "download model*.safetensors and the index of the same checkpoint" },
  { "^consolidated.*%.pth$", "Meta's own layout of weights",
    "download the checkpoint in the Hugging Face layout (*-hf)" },
  { "^pytorch_model.*%.bin$", "a pickled PyTorch checkpoint", CONVERT },
  { "^pytorch_model%.bin%.index%.json$", "a pickled PyTorch checkpoint", CONVERT },
  { "%.pth?$", "a pickled PyTorch file", CONVERT },
  { "%.ckpt$", "a training checkpoint of a framework", CONVERT },
  { "%.bin$", "a pickled PyTorch file", CONVERT },
  { "%.npz$", "weights of MLX", "give the original checkpoint, in safetensors" },
  { "%.h5$", "weights of TensorFlow", CONVERT },
  { "%.msgpack$", "weights of Flax", CONVERT },
  { "%.onnx$", "an ONNX model", "give the original checkpoint, in safetensors" },
  { "^model%-%d+%-of%-%d+%.safetensors$", "a shard without its index",
    "download model.safetensors.index.json of the same checkpoint" },
  { "^adapter_model%.", "the weights of an adapter", "give it as adapter=DIR, and its base as model=" },
  { "%.safetensors$", "weights under a name that no index says",
    "name it model.safetensors if it is all of the model" },
  { "%.incomplete$", "a download that has not ended", "download it again" },
}

local function in_list(list, name)
  for _, n in ipairs(list) do
    if n == name then return true end
  end
  return false
end

-- Why a name that is in a folder is no file: a link without a target, a folder, a pipe. nil where it is one, or absent.
local function why_no_file(dir, name, names)
  if bs.is_file(dir .. "/" .. name) or not in_list(names, name) then return nil end
  if bs.list_folder(dir .. "/" .. name) then return "is a folder" end
  local _, message = bs.read_file(dir .. "/" .. name, 1)
  if (message or ""):find("No such file", 1, true) then
    return "is a link that leads nowhere: what it links to (a cache's blob) has moved or was not downloaded"
  end
  return "is no regular file"
end

--- What a name in the folder is if it is no file that can be read: "x is a link that leads nowhere...", or nil.
function folder.not_a_file(dir, name)
  local why = why_no_file(dir, name, bs.list_folder(dir) or {})
  return why and ("%s/%s %s"):format(dir, name, why)
end

local function form_of(names)
  for _, form in ipairs(forms) do
    for _, name in ipairs(names) do
      if name:find(form[1]) then return name, form[2], form[3] end
    end
  end
end

-- The snapshot in the root of a hub's cache (models--OWNER--NAME), or nil.
local function snapshot(dir, names)
  if not in_list(names, "snapshots") then return nil end
  local there = bs.list_folder(dir .. "/snapshots") or {}
  return there[1] and dir .. "/snapshots/" .. there[1]
end

-- The base that an adapter's folder names: " (its base is 'x')", or "".
local function base_of(dir)
  local ok, config = pcall(files.json, dir .. "/adapter_config.json", 1 << 20)
  local base = ok and config.base_model_name_or_path
  return type(base) == "string" and (" (it names '%s')"):format(base) or ""
end

--- End: the folder has no config.json.
function folder.no_config(dir)
  local EXPECTED <const> = "there is no config.json; model= must name a Hugging Face checkpoint folder"
  local names = bs.list_folder(dir)
  if not names then
    if bs.is_file(dir) then
      local inside = dir:match("^(.*)/[^/]*$") or "."
      if bs.is_file(inside .. "/config.json") then
        bs.fail("error", "%s is a file; the folder that it is in is expected: model=%s", dir, inside)
      end
      local _, what, todo = form_of { dir:match("[^/]*$") }
      bs.fail("error", "%s is a file%s: model= must name a Hugging Face checkpoint folder%s", dir,
        what and ", " .. what or "", todo and "; " .. todo or "")
    end
    bs.fail("error", "%s: %s", dir, EXPECTED)
  end
  local why = why_no_file(dir, "config.json", names)
  if why then bs.fail("error", "%s/config.json %s; model= must name a Hugging Face checkpoint folder", dir, why) end
  if in_list(names, "adapter_config.json") then
    bs.fail("error", "%s: %s. It is the folder of an adapter: give it as adapter=%s, and its base as model=%s", dir,
      EXPECTED, dir, base_of(dir))
  end
  local inner = snapshot(dir, names)
  if inner then bs.fail("error", "%s: %s. It is the root of a hub's cache: model=%s", dir, EXPECTED, inner) end
  local name, what, todo = form_of(names)
  if name then bs.fail("error", "%s: %s. '%s' is %s: %s", dir, EXPECTED, name, what, todo) end
  bs.fail("error", "%s: %s", dir, EXPECTED)
end

--- End: the folder has a config.json, and no weights that are read.
function folder.no_weights(dir)
  local NEITHER <const> = "neither model.safetensors nor model.safetensors.index.json is there"
  local names = assert(bs.list_folder(dir))
  for _, name in ipairs { "model.safetensors", "model.safetensors.index.json" } do
    local why = why_no_file(dir, name, names)
    if why then bs.fail("error", "%s: %s: %s %s", dir, NEITHER, name, why) end
  end
  local name, what, todo = form_of(names)
  if name then bs.fail("error", "%s: %s. '%s' is %s: %s", dir, NEITHER, name, what, todo) end
  bs.fail("error", "%s: %s", dir, NEITHER)
end

-- Names under which the weights of a model are handed on.
local weights = {
  "^model.*%.safetensors$", "^pytorch_model.*%.bin$", "^pytorch_model.*%.safetensors$", "^consolidated.*%.safetensors$",
  "^consolidated.*%.pth$", "^tf_model.*%.h5$", "^flax_model.*%.msgpack$", "%.gguf$",
}

local function is_weights(name)
  for _, pattern in ipairs(weights) do
    if name:find(pattern) then return true end
  end
  return false
end

--- Tell of files beside a checkpoint that look like weights and are not read. read: name -> true.
function folder.tell_others(dir, read)
  local others = {}
  for _, name in ipairs(bs.list_folder(dir) or {}) do
    if is_weights(name) and not read[name] then others[#others + 1] = name end
  end
  if #others > 0 then tell.once("%s: weights that are not read: %s", dir, tell.names(others)) end
  if bs.is_file(dir .. "/adapter_config.json") then
    tell.once("%s: the adapter in it is not used; adapter=%s uses it", dir, dir)
  end
end

return folder
