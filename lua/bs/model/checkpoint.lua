-- SPDX-License-Identifier: Apache-2.0
--- A Hugging Face checkpoint folder, read in place: config.json and every tensor's file, dtype, shape
-- and offset. The index names the files (never a glob); sizes come from the shards' own headers.
local bs = require "bs"
local files = require "bs.settings.files"

local checkpoint = {}

--- A whole file as text, and as a JSON object, or a raised error: see bs.settings.files.
checkpoint.read_file, checkpoint.read_json = files.read, files.json

local function add_shard(self, dir, shard, wanted)
  local path = dir .. "/" .. shard
  local file, message = bs.safetensors.open(path)
  if not file then bs.fail("error", "%s", message) end
  for _, t in ipairs(file:tensors()) do
    if wanted == nil or wanted[t.name] == shard then
      t.path = path
      self.tensors[t.name] = t
    end
  end
  self.files[#self.files + 1] = path
  file:close()
end

local function open_sharded(self, dir, index_path)
  local index = checkpoint.read_json(index_path)
  local map = index.weight_map
  if type(map) ~= "table" or not next(map) then
    bs.fail("error", "%s: 'weight_map' is missing or empty", index_path)
  end
  local shards, seen = {}, {}
  for name, shard in pairs(map) do
    if type(shard) ~= "string" or shard:find("/", 1, true) then
      bs.fail("error", "%s: tensor '%s' maps to %s; the name of a file in the folder is expected",
        index_path, name, bs.json.encode(shard))
    end
    if not seen[shard] then
      seen[shard] = true
      shards[#shards + 1] = shard
    end
  end
  table.sort(shards)
  local missing = {}
  for _, shard in ipairs(shards) do
    if not bs.is_file(dir .. "/" .. shard) then missing[#missing + 1] = shard end
  end
  if #missing > 0 then
    bs.fail("error", "%s names files that are not there: %s; download them again", index_path,
      table.concat(missing, ", "))
  end
  for _, shard in ipairs(shards) do add_shard(self, dir, shard, map) end
  for name, shard in pairs(map) do
    if not self.tensors[name] then
      bs.fail("error", "%s says that '%s' is in %s, but that file does not hold it", index_path, name, shard)
    end
  end
end

--- Open a folder. Returns {dir, config, tensors = {name -> {path, dtype, dims, offset, bytes}}, files}.
function checkpoint.open(dir)
  dir = dir:gsub("/+$", "")
  local self = { dir = dir, tensors = {}, files = {} }
  if not bs.is_file(dir .. "/config.json") then
    bs.fail("error", "%s: there is no config.json; model= must name a Hugging Face checkpoint folder", dir)
  end
  self.config = checkpoint.read_json(dir .. "/config.json")
  local index = dir .. "/model.safetensors.index.json"
  if bs.is_file(dir .. "/model.safetensors") then
    add_shard(self, dir, "model.safetensors")
  elseif bs.is_file(index) then
    open_sharded(self, dir, index)
  else
    bs.fail("error", "%s: neither model.safetensors nor model.safetensors.index.json is there", dir)
  end
  return self
end

--- The tensors of a checkpoint that are not in `known`, as arrays: what a family does not use.
function checkpoint.others(self, known)
  local out = {}
  for name, t in pairs(self.tensors) do
    if not known[name] then
      local file <close> = assert(bs.safetensors.open(t.path))
      out[name] = file:read(name)
    end
  end
  return out
end

local dtype_names = { f32 = "float32", bf16 = "bfloat16", f16 = "float16" }

--- Write a folder with config.json and model.safetensors; dtype: how most arrays are stored.
function checkpoint.write(dir, config, arrays, dtype)
  local c = {}
  for key, value in pairs(config) do c[key] = value end
  c[c.dtype and "dtype" or "torch_dtype"] = dtype_names[dtype]
  bs.mkdir(dir)
  bs.safetensors.write(dir .. "/model.safetensors", arrays, { format = "pt" })
  bs.write_file(dir .. "/config.json", bs.json.encode(c, { pretty = true }) .. "\n")
end

local function shape(dims) return "[" .. table.concat(dims, ", ") .. "]" end

--- The entry of a tensor, checked against the shape that the config implies.
function checkpoint.tensor(self, name, dims)
  local t = self.tensors[name]
  if not t then
    bs.fail("error", "%s: tensor '%s' %s is missing; config.json asks for it", self.dir, name, shape(dims))
  end
  if t.dtype ~= "f32" and t.dtype ~= "bf16" and t.dtype ~= "f16" then
    bs.fail("error", "%s: tensor '%s' is stored as %s; f32, bf16 and f16 are supported", t.path, name,
      t.dtype)
  end
  local same = #t.dims == #dims
  for i = 1, same and #dims or 0 do same = same and t.dims[i] == dims[i] end
  if not same then
    bs.fail("error", "%s: tensor '%s' is %s, config.json implies %s", t.path, name, shape(t.dims),
      shape(dims))
  end
  return t
end

return checkpoint
