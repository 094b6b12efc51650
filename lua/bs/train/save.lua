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
local FAILED <const> = 6
local TOKENS <const> = 8
-- Below this scale * rms(B) an adapter may vanish in rounding, so that nothing can be asked of its effect.
local SMALLEST <const> = 1e-6

local function fail(dir, fmt, ...)
  bs.fail(FAILED, "self-test of the adapter for %s: %s; the files were not put in place", dir, fmt:format(...))
end

local function reopen(job, dir)
  local ok, saved = pcall(adapter.open, job.model, dir, NEW)
  if not ok then fail(dir, "it cannot be read back: %s", tostring(saved)) end
  return saved
end

local function zeros(like) return bs.array.new("f32", like:dims()) end

local function close(...)
  for _, array in ipairs { ... } do array:close() end
end

-- The file wraps what the job wraps, with the same bits and scales. Returns the largest scale * rms(B).
local function compare(job, saved, dir)
  local found, effect = {}, 0
  for _, a in ipairs(saved.list) do found[a.full] = a end
  for _, a in ipairs(job.adapters) do
    local s = found[a.full]
    if not s then fail(dir, "'%s' is not in it", a.full) end
    found[a.full] = nil
    if s.scale ~= a.scale then fail(dir, "'%s' has scale %.17g, %.17g is trained", a.full, s.scale, a.scale) end
    local first, second = saved:read(a.full)
    for id, value in pairs { [a.a] = first, [a.b] = second } do
      local live <close> = job.params:get(id)
      if live:hash() ~= value:hash() then
        fail(dir, "'%s' has other bits than the live parameter", job.params:name(id))
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
local function set_layer(job, saved, layer, variant)
  for _, a in ipairs(job.adapters) do
    if a.layer == layer then
      local first, second = saved:read(a.full)
      local zero = zeros(second)
      job.params:set(a.a, first)
      job.params:set(a.b, variant == "base" and zero or second)
      close(first, second, zero)
    end
  end
end

local function row()
  local ids = {}
  for i = 1, TOKENS do ids[i] = i * 7919 end
  return ids
end

-- Logits of the last token of one short row for each variant, as many of them in a walk as the job has
-- micro-batches: a walk reads the weights once.
local function logits(job, saved, variants)
  local state, out = {}, {}
  local vocab, n = job.model.config.vocab, math.min(TOKENS, job.cfg.micro_tokens)
  local ids = row()
  for i = 1, TOKENS do ids[i] = ids[i] % vocab end
  local micro = { row_len = { n }, ids = table.move(ids, 1, n, 1, {}) }
  local function enter(layer, variant)
    if (state[layer] or "live") ~= variant then set_layer(job, saved, layer, variant) end
    state[layer] = variant
  end
  local ok, err = pcall(function()
    for first = 1, #variants, job.cfg.micros do
      local micros = {}
      for _ = first, math.min(#variants, first + job.cfg.micros - 1) do micros[#micros + 1] = micro end
      local got = job:walk(micros, "last", nil, nil, function(layer, j) enter(layer, variants[first + j]) end)
      table.move(got, 1, #got, first, out)
    end
  end)
  for layer, variant in pairs(state) do
    if variant ~= "live" then set_layer(job, saved, layer, "live") end
  end
  if not ok then error(err, 0) end
  return table.unpack(out)
end

--- Test the files that adapter.write made with the suffix of this module.
function save.test(job, dir)
  local saved <close> = reopen(job, dir)
  local effect = compare(job, saved, dir)
  if not job.head then return end -- layers alone have no logits
  local live, file, base = logits(job, saved, { "live", "file", "base" })
  if live:hash() ~= file:hash() then fail(dir, "its logits differ from the live model's") end
  if effect >= SMALLEST and live:hash() == base:hash() then
    fail(dir, "its logits are those of the base model: it has no effect")
  end
end

--- Save the job's adapter as a PEFT folder. tamper: tests only, called between writing and testing.
function save.adapter(job, dir, tamper)
  local ok, err = pcall(function()
    adapter.write(job, dir, NEW)
    if tamper then tamper(dir .. "/adapter_model.safetensors" .. NEW, dir .. "/adapter_config.json" .. NEW) end
    save.test(job, dir)
    adapter.put_in_place(dir, NEW)
  end)
  if not ok then
    adapter.discard(dir, NEW)
    error(err, 0)
  end
end

--- Write the weights of a job with trainable="base", as its steps have left them, as a checkpoint folder
-- (made if absent). opts.dtype: f32 (default), bf16 or f16. All of it is in host memory meanwhile.
function save.base(job, dir, opts)
  if job.cfg.trainable ~= "base" then
    bs.fail(2, 'save_base: trainable="%s" changes no weight of the model; save(dir) writes the adapter',
      job.cfg.trainable)
  end
  local dtype, values = opts and opts.dtype or "f32", job:parameters()
  local arrays = checkpoint.others(job.model.checkpoint, values)
  if job.model.tied then arrays[job.model.family.head.weight] = nil end
  for name, value in pairs(values) do
    local dims = job.model.checkpoint.tensors[name].dims
    if #dims ~= 2 then value = bs.array.new("f32", dims, value:bytes()) end
    arrays[name] = dtype == "f32" and value or value:cast(dtype)
  end
  checkpoint.write(dir, job.model.checkpoint.config, arrays, dtype)
end

return save
