-- SPDX-License-Identifier: Apache-2.0
--- PEFT adapter folders: adapter_config.json and adapter_model.safetensors, read and written by PEFT's
-- rules. When reading, the tensor keys alone decide what is wrapped; r and alpha come from the config. What either file
-- says that would not be computed is refused.
local bs = require "bs"
local adapter_config = require "bs.model.adapter_config"
local adapter_tensors = require "bs.model.adapter_tensors"
local guard = require "bs.settings.guard"
local lora = require "bs.model.lora"
local model = require "bs.model.model"

local adapter = {}
local CONFIG <const>, TENSORS <const> = "adapter_config.json", "adapter_model.safetensors"
local TRIES <const>, MOST <const> = 100, 1 << 24 -- of reading a folder that is replaced meanwhile; bytes of its config

--- Names of the files of an adapter folder, for bs.folder; all other files in one are somebody else's.
adapter.files = { CONFIG, TENSORS }

-- ---- reading -------------------------------------------------------------------------------------------

local saved = {}
saved.__index = saved

local function read_f32(file, t)
  local a = file:read(t.name)
  if t.dtype == "f32" then return a end
  local wide = a:cast("f32")
  a:close()
  return wide
end

--- The matrices A [r, in] and B [out, r] of an adapter of the list, f32.
function saved:read(full)
  local t = self.tensors[full]
  return read_f32(self.file, t.a), read_f32(self.file, t.b)
end

function saved:close() self.file:close() end
saved.__close = saved.close

-- Why a folder without one of the two files is none that can be read.
local function check_files(dir)
  local config, tensors = dir .. "/" .. CONFIG, dir .. "/" .. TENSORS
  if not bs.is_file(config) then
    if bs.is_file(dir .. "/adapters.safetensors") then
      bs.fail("error", "%s: there is no %s; adapters.safetensors is of another format than PEFT's", dir, CONFIG)
    elseif bs.is_file(dir .. "/config.json") then
      bs.fail("error", "%s: there is no %s; config.json says that it is a model (model=), not an adapter", dir, CONFIG)
    end
    local inside = {}
    for _, name in ipairs(bs.list_folder(dir) or {}) do
      if bs.is_file(dir .. "/" .. name .. "/" .. CONFIG) then inside[#inside + 1] = name end
    end
    if #inside > 0 then
      bs.fail("error", "%s: there is no %s; an adapter is in each of its folders: %s", dir, CONFIG,
        table.concat(inside, ", "))
    end
  elseif not bs.is_file(tensors) then
    for _, name in ipairs { "adapter_model.bin", "adapters.safetensors" } do
      if bs.is_file(dir .. "/" .. name) then
        bs.fail("error", "%s: there is no %s; %s is not read (save the adapter with PEFT's save_pretrained, "
          .. "safe_serialization=True)", dir, TENSORS, name)
      end
    end
  end
end

-- The adapters that the tensors make, in model order, shapes checked.
local function match(m, spec, numbers, found, path)
  local list = {}
  model.each_linear(m, function(l)
    local f = found[l.full]
    if not f then return end
    local a = lora.of(l, spec, numbers(l))
    if not (f.a and f.b) then
      bs.fail("error", "%s: '%s' has only one of lora_A and lora_B", path, a.full)
    end
    local da, db = f.a.dims, f.b.dims
    if #da ~= 2 or #db ~= 2 or da[1] ~= a.r or da[2] ~= a.inn or db[1] ~= a.out or db[2] ~= a.r then
      bs.fail("error", "%s: '%s' has A [%s] and B [%s]; this model and r=%d need A [%d, %d] and B [%d, %d]",
        path, a.full, table.concat(da, ", "), table.concat(db, ", "), a.r, a.r, a.inn, a.out, a.r)
    end
    list[#list + 1] = a
  end)
  if #list == 0 then bs.fail("error", "%s: holds no adapter for this model", path) end
  return list
end

-- A linear that the config names has its tensors in the file: an adapter that lacks a part gives other results than the
-- one that was trained.
local function check_complete(m, config, found, path)
  local wraps, missing, first = adapter_config.wraps(config), 0, nil
  if not wraps then return end
  local function check(l)
    if wraps(l) and not found[l.full] then missing, first = missing + 1, first or l.full end
  end
  model.each_linear(m, check)
  for _, module in ipairs(lora.outer(m)) do check { full = module.name } end
  if missing > 0 then
    bs.fail("error", "%s: it is incomplete: 'target_modules' of %s names '%s', which is not in it%s", path, CONFIG,
      first, missing > 1 and (", nor are %d more"):format(missing - 1) or "")
  end
end

local function open_once(m, dir)
  check_files(dir)
  local config, spec, numbers = adapter_config.read(dir .. "/" .. CONFIG)
  local file, message = bs.safetensors.open(dir .. "/" .. TENSORS)
  if not file then bs.fail("error", "%s", message) end
  local self = setmetatable({ config = config, spec = spec, file = file }, saved)
  local _ <close> = guard(self)
  self.tensors = adapter_tensors.find(m, file)
  self.list = match(m, spec, numbers, self.tensors, file:path())
  check_complete(m, config, self.tensors, file:path())
  return self
end

--- Open an adapter folder for a model: {list (as lora.select), spec (r, alpha, rslora, ...), config,
-- tensors, read(full), close}. Both files are of one save: where a save has come between, they are opened again, and
-- where a process ended while it moved them, the folder is put in order.
function adapter.open(m, dir)
  local path = dir .. "/" .. CONFIG
  for _ = 1, TRIES do
    if not bs.is_file(path) then bs.folder.recover(dir, adapter.files) end
    local before = bs.read_file(path, MOST)
    local ok, opened = pcall(open_once, m, dir)
    if bs.read_file(path, MOST) == before then
      if not ok then error(opened, 0) end
      return opened
    end
    if ok then opened:close() end
  end
  bs.fail("error", "%s: the adapter is being replaced all the time; try again when that has ended", dir)
end

-- ---- writing -------------------------------------------------------------------------------------------

-- Is every linear of these layers whose last name is a target among the wrapped ones? Then PEFT finds them by
-- these names; else it needs the full ones.
local function is_product(m, targets, layers, wrapped)
  local all = true
  model.each_linear(m, function(l)
    if layers[l.layer] and targets[l.full:match("[^.]+$")] and not wrapped[l.full] then all = false end
  end)
  return all
end

local function sorted(set)
  local list = {}
  for key in pairs(set) do list[#list + 1] = key end
  table.sort(list)
  return list
end

-- A path is bytes and JSON is UTF-8: one that is not is written as people see it.
local function in_json(path) return utf8.len(path) and path or bs.printable(path) end

-- adapter_config.json as PEFT writes it: sorted keys, defaults spelled out.
local function peft_config(spec)
  local null, m, first, lora_spec = bs.json.null, spec.model, spec.adapters[1], spec.lora
  local targets, layers, wrapped, rank, alpha = {}, {}, {}, {}, {}
  for _, a in ipairs(spec.adapters) do
    targets[a.full:match("[^.]+$")], layers[a.layer], wrapped[a.full] = true, true, true
    if a.r ~= lora_spec.r then rank[a.full] = a.r end
    if a.alpha ~= lora_spec.alpha then alpha[a.full] = a.alpha end
  end
  local names, chosen = sorted(targets), sorted(layers)
  local some = #chosen < m.config.layers
  -- PEFT finds the number of a layer after this name, which must not be the first.
  local pattern = m.family.prefix(0):match("%.([^.]+)%.%d+%.$")
  if some and not pattern or not is_product(m, targets, layers, wrapped) then names, some = sorted(wrapped), false end
  return {
    alpha_pattern = alpha, auto_mapping = null, base_model_name_or_path = in_json(spec.name), bias = "none",
    exclude_modules = null, fan_in_fan_out = false, inference_mode = true, init_lora_weights = true,
    layer_replication = null, layers_pattern = some and pattern or null,
    layers_to_transform = some and chosen or null, loftq_config = {},
    lora_alpha = lora_spec.alpha, lora_bias = false, lora_dropout = first.dropout, megatron_config = null,
    megatron_core = "megatron.core", modules_to_save = null, peft_type = "LORA", r = lora_spec.r,
    rank_pattern = rank, revision = null, target_modules = names,
    task_type = "CAUSAL_LM", use_dora = false, use_rslora = lora_spec.rslora == true,
  }
end

--- Write the adapters of a spec to a folder that is there, matrix by matrix. params holds the values, by_name their ids
-- (lora.register). A value that is not finite is refused by the name of its tensor.
function adapter.write(spec, params, by_name, dir)
  local list, ids = {}, {}
  for _, a in ipairs(spec.adapters) do
    local of = by_name[a.full]
    for id, dims in pairs { [of.a] = { a.r, a.inn }, [of.b] = { a.out, a.r } } do
      ids[#ids + 1] = id
      list[#list + 1] = { name = params:name(id), dtype = "f32", dims = dims }
    end
  end
  local file <close> = bs.safetensors.writer(dir .. "/" .. TENSORS, list, { format = "pt" })
  for _, id in ipairs(ids) do
    local value <close> = params:get(id)
    if not value:is_finite() then
      bs.fail("nonfinite", "the adapter cannot be saved: its tensor '%s' holds NaN or infinity", params:name(id))
    end
    file:add(params:name(id), value)
  end
  file:finish()
  bs.write_file(dir .. "/" .. CONFIG, bs.json.encode(peft_config(spec), { pretty = true }) .. "\n")
end

return adapter
