-- SPDX-License-Identifier: Apache-2.0
--- Saving what was trained. An adapter: the new files are written beside the old ones, read back by PEFT's
-- rules, tested, and only then put in place; whatever fails leaves the old adapter as it was. The test: every
-- matrix has the bits of the live parameter and the same scale; with the file's matrices the model gives the
-- logits that it gave with the live ones, and others than without an adapter. A failed test ends with exit
-- status 6. It costs one walk where the job has three micro-batches, three walks at most.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local checkpoint = require "bs.model.checkpoint"

local save = {}
local NEW <const> = ".new"
local TOKENS <const> = 8
-- Below this scale * rms(B) an adapter may vanish in rounding, so that nothing can be asked of its effect.
local SMALLEST <const> = 1e-6

local function fail(dir, fmt, ...)
  bs.fail("selftest", "self-test of the adapter for %s: %s; the files were not put in place", dir, fmt:format(...))
end

local function reopen(inst, dir)
  local ok, saved = pcall(adapter.open, inst.spec.model, dir, NEW)
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

--- Test the files that adapter.write made with the suffix of this module.
function save.test(inst, dir)
  local saved <close> = reopen(inst, dir)
  local effect = compare(inst, saved, dir)
  if not inst.head then return end -- layers alone have no logits
  local live, file, base = logits(inst, saved, { "live", "file", "base" })
  if live:hash() ~= file:hash() then fail(dir, "its logits differ from the live model's") end
  if effect >= SMALLEST and live:hash() == base:hash() then
    fail(dir, "its logits are those of the base model: it has no effect")
  end
end

--- Save the adapter of an instance as a PEFT folder. tamper: tests only, called between writing and testing.
function save.adapter(inst, dir, tamper)
  local ok, err = pcall(function()
    adapter.write(inst.spec, inst.params, inst.adapter, dir, NEW)
    if tamper then tamper(dir .. "/adapter_model.safetensors" .. NEW, dir .. "/adapter_config.json" .. NEW) end
    save.test(inst, dir)
    adapter.put_in_place(dir, NEW)
  end)
  if not ok then
    adapter.discard(dir, NEW)
    error(err, 0)
  end
end

--- Write the weights of an instance with trainable="base", as its steps have left them, as a checkpoint folder
-- (made if absent). opts.dtype: f32 (default), bf16 or f16. All of it is in host memory meanwhile.
function save.base(inst, dir, opts)
  local m, trainable = inst.spec.model, inst.spec.trainable
  if trainable ~= "base" then
    bs.fail("usage", 'save_base: trainable="%s" changes no weight of the model; save(dir) writes the adapter',
      trainable)
  end
  local dtype, values = opts and opts.dtype or "f32", inst:parameters()
  local arrays = checkpoint.others(m.checkpoint, values)
  if m.tied then arrays[m.family.head.weight] = nil end
  for name, value in pairs(values) do
    local dims = m.checkpoint.tensors[name].dims
    if #dims ~= 2 then value = bs.array.new("f32", dims, value:bytes()) end
    arrays[name] = dtype == "f32" and value or value:cast(dtype)
  end
  checkpoint.write(dir, m.checkpoint.config, arrays, dtype)
end

return save
