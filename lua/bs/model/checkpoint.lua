-- SPDX-License-Identifier: Apache-2.0
--- A Hugging Face checkpoint folder, read in place: config.json and every tensor's file, dtype, shape
-- and offset. The index names the files (never a glob); sizes come from the shards' own headers.
local bs = require "bs"
local files = require "bs.settings.files"
local folder = require "bs.model.folder"
local quantised = require "bs.model.quantised"
local tell = require "bs.model.tell"
local write_model = require "bs.model.write_model"

local checkpoint = {}

-- Published files have kilobytes; what is read takes a multiple of its text's memory.
local CONFIG_MOST <const>, INDEX_MOST <const> = 4 << 20, 256 << 20

--- A whole file as text, and as a JSON object, or a raised error: see bs.settings.files.
checkpoint.read_file, checkpoint.read_json = files.read, files.json

-- Tensors that the index gives to another shard are stale copies; those that it does not name at all are kept apart.
local function add_shard(self, dir, shard, wanted)
  local path = dir .. "/" .. shard
  local file, message = bs.safetensors.open(path)
  if not file then bs.fail("error", "%s", message) end
  for _, t in ipairs(file:tensors()) do
    t.path = path
    if wanted == nil or wanted[t.name] == shard then
      self.tensors[t.name] = t
    elseif wanted[t.name] == nil then
      self.unlisted[t.name] = t
    else
      self.stale[#self.stale + 1] = t.name
    end
  end
  self.files[#self.files + 1] = path
  file:close()
end

local function open_sharded(self, dir, index_path)
  local index = checkpoint.read_json(index_path, INDEX_MOST)
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
    if not bs.is_file(dir .. "/" .. shard) then
      local why = folder.not_a_file(dir, shard)
      missing[#missing + 1] = why and ("%s (%s)"):format(shard, why:sub(#dir + #shard + 3)) or shard
    end
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

-- Tell what of the folder's weights is not read.
local function tell_rest(self, index)
  local read = {}
  for _, path in ipairs(self.files) do read[path:match("[^/]*$")] = true end
  if read["model.safetensors"] and bs.is_file(index) then
    tell.once("%s: model.safetensors is read, and not the shards of the index beside it", self.dir)
  end
  if #self.stale > 0 then
    table.sort(self.stale)
    tell.once("%s: %d tensors are in several files (%s); those of the files that the index names are read", self.dir,
      #self.stale, tell.names(self.stale))
  end
  folder.tell_others(self.dir, read)
end

--- Open a folder. Returns {dir, config, tensors = {name -> {path, dtype, dims, offset, bytes}}, files, unlisted,
-- stale}. unlisted: like tensors, those in the shards that the index does not name; stale: names that the index gives
-- to another shard. Neither is read.
function checkpoint.open(dir)
  dir = #dir > 1 and dir:gsub("/+$", "") or dir
  local self = { dir = dir, tensors = {}, files = {}, unlisted = {}, stale = {} }
  if not bs.is_file(dir .. "/config.json") then write_model.recover(dir) end
  if not bs.is_file(dir .. "/config.json") then folder.no_config(dir) end
  self.config = checkpoint.read_json(dir .. "/config.json", CONFIG_MOST)
  local index = dir .. "/model.safetensors.index.json"
  if bs.is_file(dir .. "/model.safetensors") then
    add_shard(self, dir, "model.safetensors")
  elseif bs.is_file(index) then
    open_sharded(self, dir, index)
  else
    folder.no_weights(dir)
  end
  tell_rest(self, index)
  return self
end

local function shape(dims) return "[" .. table.concat(dims, ", ") .. "]" end

local function same_dims(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do
    if a[i] ~= b[i] then return false end
  end
  return true
end

-- An entry that is stored as what can be computed with.
local function known_dtype(self, t)
  if t.dtype ~= "f32" and t.dtype ~= "bf16" and t.dtype ~= "f16" then
    local what = quantised.beside(self.tensors, t.name)
    bs.fail("error", "%s: tensor '%s' is stored as %s; f32, bf16 and f16 are supported%s", t.path, t.name, t.dtype,
      what and ". " .. what or "")
  end
  return t
end

--- An entry, checked: it is stored as what can be computed with, and has the shape that the config implies.
function checkpoint.check_tensor(self, t, dims)
  known_dtype(self, t)
  if not same_dims(t.dims, dims) then
    bs.fail("error", "%s: tensor '%s' is %s, config.json implies %s", t.path, t.name, shape(t.dims), shape(dims))
  end
  return t
end

-- A tensor whose name differs from one by what stands before it, as programs that wrap a model write it; or nil.
local function other_prefix(self, name)
  local inner, found = name:match("^[^.]*%.(.*)$"), nil
  for other in pairs(self.tensors) do
    local like = other == inner or other:sub(-#name - 1) == "." .. name
    if like and (not found or other < found) then found = other end
  end
  return found and ("It has '%s': its names have another prefix"):format(found)
end

-- The entry of a name that config.json asks for.
local function find(self, name, dims)
  local t = self.tensors[name]
  if t then return t end
  local what = quantised.beside(self.tensors, name)
    or self.unlisted[name] and "It is in a shard, but the index does not name it" or other_prefix(self, name)
  bs.fail("error", "%s: tensor '%s' %s is missing; config.json asks for it%s", self.dir, name, shape(dims),
    what and ". " .. what or "")
end

--- The entry of a tensor by its name, checked likewise.
function checkpoint.tensor(self, name, dims) return checkpoint.check_tensor(self, find(self, name, dims), dims) end

--- The entry of a tensor that holds `count` matrices or vectors of these dims (nil: one, without a dimension for it).
-- transposed: matrices may lie as [in, out] as well as [out, in]; where both could be meant, it says whether they do.
-- Returns whether they do, too.
function checkpoint.slices(self, name, dims, count, transposed)
  if not count then return checkpoint.tensor(self, name, dims), false end
  local as_is, turned = { count, table.unpack(dims) }, { count, dims[2], dims[1] }
  local t = known_dtype(self, find(self, name, as_is))
  if #dims == 2 and transposed ~= nil and same_dims(t.dims, turned) and (transposed or dims[1] ~= dims[2]) then
    return t, true
  end
  if not same_dims(t.dims, as_is) then
    bs.fail("error", "%s: tensor '%s' is %s, config.json implies %s%s", t.path, name, shape(t.dims), shape(as_is),
      transposed ~= nil and #dims == 2 and " or " .. shape(turned) or "")
  end
  return t, false
end

-- Suffixes of the tensors that a packed one lies in, and their last dimensions for a row of n values.
local packings = {
  mxfp4 = { blocks = "_blocks", scales = "_scales", group = 32, bytes = 16 },
}

--- The entries of a packed tensor [count, dims...] and of its scales.
function checkpoint.packed(self, name, dims, count, packing)
  local p = packings[packing]
  local groups, found = dims[#dims] // p.group, {}
  for _, part in ipairs { "blocks", "scales" } do
    local full, want = name .. p[part], { count, table.unpack(dims) }
    want[#want] = groups
    if part == "blocks" then want[#want + 1] = p.bytes end
    local t = self.tensors[full]
    if not t then
      bs.fail("error", "%s: neither '%s' nor '%s' %s is there; config.json asks for it", self.dir, name, full,
        shape(want))
    end
    if t.dtype ~= "u8" or not same_dims(t.dims, want) or dims[#dims] % p.group ~= 0 then
      bs.fail("error", "%s: tensor '%s' is %s %s, config.json implies u8 %s", t.path, full, t.dtype, shape(t.dims),
        shape(want))
    end
    found[part] = t
  end
  return found.blocks, found.scales
end

return checkpoint
