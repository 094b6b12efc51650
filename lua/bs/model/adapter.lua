-- SPDX-License-Identifier: Apache-2.0
--- PEFT adapter folders: adapter_config.json and adapter_model.safetensors, read and written by PEFT's
-- rules. When reading, the tensor keys alone decide what is wrapped; r and alpha come from the config.
local bs = require "bs"
local checkpoint = require "bs.model.checkpoint"
local lora = require "bs.model.lora"
local model = require "bs.model.model"

local adapter = {}
local CONFIG <const>, TENSORS <const> = "adapter_config.json", "adapter_model.safetensors"
local TRIES <const>, MOST <const> = 100, 1 << 24 -- of reading a folder that is replaced meanwhile; bytes of its config

--- Names of the files of an adapter folder, for bs.folder; all other files in one are somebody else's.
adapter.files = { CONFIG, TENSORS }

-- Options of PEFT that change the mathematics and that we do not have.
local refused = {
  use_dora = false, lora_bias = false, use_qalora = false, fan_in_fan_out = false, bias = "none",
  layer_replication = bs.json.null, modules_to_save = bs.json.null,
  trainable_token_indices = bs.json.null, alora_invocation_tokens = bs.json.null,
}

local function check_config(path, config)
  if config.peft_type ~= nil and config.peft_type ~= "LORA" then
    bs.fail("error", "%s: peft_type '%s'; only LORA adapters are supported", path, tostring(config.peft_type))
  end
  for key, plain in pairs(refused) do
    local v = config[key]
    if v ~= nil and v ~= bs.json.null and v ~= plain and not (type(v) == "table" and not next(v)) then
      bs.fail("error", "%s: '%s' = %s is not supported", path, key, bs.json.encode(v))
    end
  end
end

local function given(v, default)
  if v == nil or v == bs.json.null then return default end
  return v
end

-- The specification that a config describes; its numbers are checked.
local function spec_of(path, config)
  for _, key in ipairs { "rank_pattern", "alpha_pattern" } do
    local v = given(config[key], {})
    if type(v) ~= "table" then bs.fail("error", "%s: '%s' must be an object", path, key) end
    for name in pairs(v) do
      if type(name) ~= "string" then bs.fail("error", "%s: '%s' must be an object", path, key) end
    end
  end
  for _, key in ipairs { "r", "lora_alpha" } do
    if given(config[key]) == nil then bs.fail("error", "%s: '%s' is missing", path, key) end
  end
  local ok, spec = pcall(lora.spec, {
    rslora = given(config.use_rslora, false), r = config.r, alpha = config.lora_alpha,
    dropout = given(config.lora_dropout, 0), rank_pattern = given(config.rank_pattern, {}),
    alpha_pattern = given(config.alpha_pattern, {}),
  })
  if not ok then bs.fail("error", "%s: %s", path, tostring(spec)) end
  return spec
end

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

-- The tensors of the file by linear: full -> {a, b} as the file describes them.
local function find_tensors(m, file)
  local prefix, linears, found = m.family.peft_prefix, {}, {}
  model.each_linear(m, function(l) linears[l.full] = l end)
  for _, t in ipairs(file:tensors()) do
    local full, ab = t.name:match("^(.*)%.lora_([AB])%.weight$")
    local name = full and full:sub(1, #prefix) == prefix and full:sub(#prefix + 1)
    if not name or not linears[name] then
      bs.fail("error", "%s: tensor '%s' belongs to no linear of this model; is the adapter of another "
        .. "model?", file:path(), t.name)
    end
    if t.dtype ~= "f32" and t.dtype ~= "bf16" and t.dtype ~= "f16" then
      bs.fail("error", "%s: tensor '%s' is stored as %s; f32, bf16 and f16 are supported", file:path(), t.name, t.dtype)
    end
    found[name] = found[name] or {}
    found[name][ab == "A" and "a" or "b"] = t
  end
  return found
end

-- The adapters that the tensors make, in model order, shapes checked.
local function match(m, spec, found, path)
  local list = {}
  for _, a in ipairs(lora.select(m, {
    targets = "all", r = spec.r, alpha = spec.alpha, rslora = spec.rslora, dropout = spec.dropout,
    rank_pattern = spec.rank_pattern, alpha_pattern = spec.alpha_pattern,
  })) do
    local f = found[a.full]
    if f then
      if not (f.a and f.b) then
        bs.fail("error", "%s: '%s' has only one of lora_A and lora_B", path, a.full)
      end
      local da, db = f.a.dims, f.b.dims
      if #da ~= 2 or #db ~= 2 or da[1] ~= a.r or da[2] ~= a.inn or db[1] ~= a.out or db[2] ~= a.r then
        bs.fail("error", "%s: '%s' has A [%s] and B [%s]; this model and r=%d need A [%d, %d] and B [%d, %d]",
          path, a.full, table.concat(da, ", "), table.concat(db, ", "), a.r, a.r, a.inn, a.out, a.r)
      end
      list[#list + 1] = a
    end
  end
  if #list == 0 then bs.fail("error", "%s: holds no adapter for this model", path) end
  return list
end

local function open_once(m, dir)
  local path = dir .. "/" .. CONFIG
  local config = checkpoint.read_json(path)
  check_config(path, config)
  local spec = spec_of(path, config)
  local file, message = bs.safetensors.open(dir .. "/" .. TENSORS)
  if not file then bs.fail("error", "%s", message) end
  local tensors = find_tensors(m, file)
  local self = { config = config, spec = spec, file = file, tensors = tensors }
  self.list = match(m, spec, tensors, file:path())
  return setmetatable(self, saved)
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
  if not is_product(m, targets, layers, wrapped) then names, some = sorted(wrapped), false end
  return {
    alpha_pattern = alpha, auto_mapping = null, base_model_name_or_path = spec.name, bias = "none",
    exclude_modules = null, fan_in_fan_out = false, inference_mode = true, init_lora_weights = true,
    layer_replication = null, layers_pattern = some and "layers" or null,
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
