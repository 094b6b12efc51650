-- SPDX-License-Identifier: Apache-2.0
--- Saving what was trained. An adapter: a new folder is written beside the old one, read back by PEFT's rules, tested,
-- and only then put in its place as a whole; whatever fails leaves the old adapter as it was. The test: every
-- matrix has the bits of the live parameter and the same scale; with the file's matrices the model gives the
-- logits that it gave with the live ones, and others than without an adapter. A failed test ends with exit
-- status 6. It costs one walk where the job has three micro-batches, three walks at most.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local model = require "bs.model.model"
local options = require "bs.settings.options"
local put_folder = require "bs.model.put_folder"
local write_model = require "bs.model.write_model"

local save = {}
local TOKENS <const> = 8
-- Below this scale * rms(B) an adapter may vanish in rounding, so that nothing can be asked of its effect.
local SMALLEST <const> = 1e-6

local function fail(dir, fmt, ...)
  bs.fail("selftest", "self-test of the adapter for %s: %s; the files were not put in place", dir, fmt:format(...))
end

local function reopen(inst, dir, written)
  local ok, saved = pcall(adapter.open, inst.spec.model, written)
  if not ok then fail(dir, "it cannot be read back: %s", tostring(saved)) end
  return saved
end

local function zeros(like) return bs.array.new("f32", like:dims()) end

local function close(...)
  for _, array in ipairs { ... } do array:close() end
end

-- The file wraps what the instance wraps, with the same bits and scales. Returns the largest scale * rms(B).
local function compare(inst, saved, dir)
  local found, effect = {}, 0
  for _, a in ipairs(saved.list) do found[a.full] = a end
  for _, a in ipairs(inst.spec.adapters) do
    local s, ids = found[a.full], inst.adapter[a.full]
    if not s then fail(dir, "'%s' is not in it", a.full) end
    found[a.full] = nil
    if s.scale ~= a.scale then fail(dir, "'%s' has scale %.17g, %.17g is trained", a.full, s.scale, a.scale) end
    local first, second = saved:read(a.full)
    for id, value in pairs { [ids.a] = first, [ids.b] = second } do
      local live <close> = inst.params:get(id)
      if live:hash() ~= value:hash() then
        fail(dir, "'%s' has other bits than the live parameter", inst.params:name(id))
      end
    end
    local zero = zeros(second)
    effect = math.max(effect, a.scale * bs.array.rel_err(second, zero) / math.sqrt(second:count()))
    close(first, second, zero)
  end
  if next(found) then fail(dir, "'%s' is in it and not trained", (next(found))) end
  return effect
end

-- Before a layer is used: its parameters as the variant wants them. Bits of file and live parameters are equal
-- by now, so the file also restores.
local function set_layer(inst, saved, layer, variant)
  for _, a in ipairs(inst.spec.adapters) do
    if a.layer == layer then
      local first, second = saved:read(a.full)
      local zero, ids = zeros(second), inst.adapter[a.full]
      inst.params:set(ids.a, first)
      inst.params:set(ids.b, variant == "base" and zero or second)
      close(first, second, zero)
    end
  end
end

local function row()
  local ids = {}
  for i = 1, TOKENS do ids[i] = i * 7919 end
  return ids
end

-- Logits of the last token of one short row for each variant, as many of them in a walk as a step has
-- micro-batches: a walk reads the weights once.
local function logits(inst, saved, variants)
  local state, out = {}, {}
  local vocab, batch = inst.spec.model.config.vocab, inst.spec.batch
  local n = math.min(TOKENS, batch.tokens)
  local ids = row()
  for i = 1, TOKENS do ids[i] = ids[i] % vocab end
  local micro = { row_len = { n }, ids = table.move(ids, 1, n, 1, {}) }
  local function enter(layer, variant)
    if (state[layer] or "live") ~= variant then set_layer(inst, saved, layer, variant) end
    state[layer] = variant
  end
  local ok, err = pcall(function()
    for first = 1, #variants, batch.micros do
      local micros = {}
      for _ = first, math.min(#variants, first + batch.micros - 1) do micros[#micros + 1] = micro end
      local got = inst:walk(micros, {
        mode = "last", prepare = function(layer, j) enter(layer, variants[first + j]) end,
      })
      table.move(got, 1, #got, first, out)
    end
  end)
  for layer, variant in pairs(state) do
    if variant ~= "live" then set_layer(inst, saved, layer, "live") end
  end
  if not ok then error(err, 0) end
  return table.unpack(out)
end

-- Test what adapter.write made in `written` for the folder dir. walk: false leaves the logits out.
local function test(inst, dir, written, walk)
  local saved <close> = reopen(inst, dir, written)
  local effect = compare(inst, saved, dir)
  if not inst.head or walk == false then return end -- layers alone have no logits
  local live, file, base = logits(inst, saved, { "live", "file", "base" })
  if live:hash() ~= file:hash() then fail(dir, "its logits differ from the live model's") end
  if effect >= SMALLEST and live:hash() == base:hash() then
    fail(dir, "its logits are those of the base model: it has no effect")
  end
end

local save_rules <const> = { walk = { type = "boolean", default = true }, tamper = { type = "function" } }

--- Save the adapter of an instance as a PEFT folder. o.walk: false leaves the logits out of the test, for which the
-- checkpoint must be read. o.tamper: tests only, called between writing and testing with the paths of both files.
function save.adapter(inst, dir, o)
  o = options.read("save: ", o, save_rules)
  put_folder(dir, adapter.files, function(written)
    adapter.write(inst.spec, inst.params, inst.adapter, written)
    if o.tamper then o.tamper(written .. "/adapter_model.safetensors", written .. "/adapter_config.json") end
    test(inst, dir, written, o.walk)
  end)
end

local base_options = { dtype = { words = { "f32", "bf16", "f16" }, default = "f32" } }

-- What a saved model holds: {name, dtype, dims} in the order of names; trained weights as dtype, others as they are.
local function tensors_of(m, ids, dtype)
  local list = {}
  for name, t in pairs(m.checkpoint.tensors) do
    if ids[name] then
      list[#list + 1] = { name = name, dtype = dtype, dims = t.dims }
    elseif not (m.tied and name == m.family.head.weight) then
      list[#list + 1] = t
    end
  end
  table.sort(list, function(x, y) return x.name < y.name end)
  return list
end

-- ids: of the parameters that tensor t is made of, one or one for each of its slices.
local function add_trained(out, inst, ids, t)
  local value, bytes = inst.params:get(ids[1]), {}
  if #ids > 1 or #t.dims ~= 2 then
    bytes[1] = value:bytes()
    for k = 2, #ids do
      local slice <close> = inst.params:get(ids[k])
      bytes[k] = slice:bytes()
    end
    value:close()
    value = bs.array.new("f32", t.dims, table.concat(bytes))
  end
  local stored = write_model.stored(t.name, value, t.dtype)
  out:add(t.name, stored)
  close(value, stored)
end

--- Write the weights of an instance with trainable="base", as its steps have left them, as a checkpoint folder
-- (made if absent), tensor by tensor. opts.dtype: f32 (default), bf16 or f16. A value that is not finite, or not as
-- that dtype, is refused by the name of its tensor.
function save.base(inst, dir, opts)
  local m, trainable = inst.spec.model, inst.spec.trainable
  if trainable ~= "base" then
    bs.fail("usage", 'save_base: trainable="%s" changes no weight of the model; save(dir) writes the adapter',
      trainable)
  end
  local o = options.read("save_base: ", opts, base_options)
  local ids = model.in_file(m, inst:parameter_ids())
  local list = tensors_of(m, ids, o.dtype)
  put_folder(dir, write_model.names(), function(written)
    local out <close> = write_model.writer(written, list)
    for _, t in ipairs(list) do
      if ids[t.name] then
        add_trained(out, inst, ids[t.name], t)
      else
        local file <close> = assert(bs.safetensors.open(t.path))
        out:copy(t.name, file)
      end
    end
    out:finish()
    write_model.config(written, m.checkpoint.config, o.dtype)
  end)
end

return save
