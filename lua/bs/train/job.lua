-- SPDX-License-Identifier: Apache-2.0
--- A job: model, program, plan, optimizer and data in one object, which recipes, parity and tests drive.
--
--   local job <close> = job.new { model = DIR, lora = {...}, vram = bytes, ram = bytes }
--   job:step(micros)          one optimizer step        job:eval(batches)   mean loss
--   job:run{...}              the training loop         job:close()
--
-- trainable: "lora"; "none"; or "base", the model's own weights: gradients anywhere, updates where home="gpu"
-- and every tensor is stored as f32 (AdamW decays all of them alike, norms too).
-- A micro-batch is {row_len = {...}, ids = {...}, labels = {...} or nil, row_id = {...} or nil}.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local args = require "bs.settings.args"
local device = require "bs.instance.device"
local dry = require "bs.plan.dry"
local lora = require "bs.model.lora"
local model = require "bs.model.model"
local nn = require "bs.nn.nn"
local plan = require "bs.plan.choose"
local program = require "bs.instance.program"
local run = require "bs.train.loop"
local save = require "bs.train.save"

local job = {}
local methods = {}
local mt = { __index = methods, __name = "bs.job" }

local UNBOUNDED = 1 << 60
--- Settings and their defaults. vram and ram: the device pool and every accounted host byte, in bytes, as a
-- fraction (a float) of what is free, or "auto". dtype: what is computed in, f32, bf16, or auto: bf16 where the
-- device can and the checkpoint is bf16. dry: the device may be meta, which counts memory and computes nothing.
-- stack: the layers alone, without the head (measurements): steps have no loss. keep: upper layers whose
-- activations stay on the device between forward and backward instead of being computed again; auto: as many as pay.
-- rates: see plan.check_rates.
job.defaults = {
  device = "cpu", threads = 0, vram = UNBOUNDED, ram = UNBOUNDED, home = "auto", boundaries = "auto",
  dev_slots = "auto", host_slots = "auto", micro_tokens = 512, micros = 1, rows = 0, seed = 1,
  trainable = "lora", dtype = "f32", keep = "auto",
}

-- Settings without a default, and their types.
local optional = {
  model = "string", lora = "table", adapter = "string", io = "table", rates = "any", logits = "boolean",
  device_options = "table", family = "table", group = "number", log = "function", dry = "boolean",
  stack = "boolean", cache = "table",
}

-- Values of the settings: least and most integer, or the words; both where "auto" stands for a number.
local MANY <const>, auto <const> = 1 << 20, { "auto" }
local integers = {
  threads = { 0, 1024 }, vram = { 0, UNBOUNDED }, ram = { 0, UNBOUNDED }, micro_tokens = { 2, MANY },
  micros = { 1, MANY }, rows = { 0, MANY }, dev_slots = { 1, MANY }, host_slots = { 1, MANY },
  keep = { 0, MANY }, group = { 1, MANY }, seed = { math.mininteger, math.maxinteger },
}
local words = {
  home = { "auto", "gpu", "ram", "disk" }, boundaries = { "auto", "device", "host" }, dev_slots = auto, keep = auto,
  host_slots = auto, vram = auto, ram = auto, trainable = { "lora", "base", "none" }, dtype = { "f32", "bf16", "auto" },
}

local function has(list, value)
  for _, v in ipairs(list or {}) do
    if v == value then return true end
  end
  return false
end

local function check(key, value)
  local range, list, wanted = integers[key], words[key], {}
  local share, number = key == "vram" or key == "ram", math.type(value)
  if has(list, value) or share and number == "float" and value > 0 and value <= 1 then return end
  if range and number == "integer" and value >= range[1] and value <= range[2] then return end
  if range then wanted[1] = ("an integer %d..%d"):format(range[1], range[2]) end
  if share then wanted[2] = "a fraction above 0 and up to 1" end
  if list then wanted[#wanted + 1] = table.concat(list, ", ") end
  local kind = optional[key] or type(job.defaults[key])
  if #wanted == 0 then
    if kind == "any" or type(value) == kind then return end
    wanted[1] = "a " .. kind
  end
  bs.fail(2, "%s=%s; %s is expected", key, tostring(value), table.concat(wanted, " or "))
end

local function settings(cfg)
  local out, names = {}, {}
  for name in pairs(job.defaults) do names[name] = true end
  for name in pairs(optional) do names[name] = true end
  for key, value in pairs(cfg) do
    if not names[key] then
      bs.fail(2, "job: unknown setting '%s'; did you mean %s?", tostring(key),
        table.concat(args.nearest(tostring(key), names), ", "))
    end
    check(key, value)
    out[key] = value
  end
  for key, value in pairs(job.defaults) do
    if out[key] == nil then out[key] = value end
  end
  plan.check_rates(out.rates)
  if not out.model then bs.fail(2, "model= must name a checkpoint folder") end
  for _, key in ipairs(out.cache and { "rows", "tokens" } or {}) do
    local n = out.cache[key]
    if math.type(n) ~= "integer" or n < 1 or n > MANY then
      bs.fail(2, "cache.%s=%s; an integer 1..%d is expected", key, tostring(n), MANY)
    end
  end
  if out.stack and (out.trainable == "base" or out.cache) then
    bs.fail(2, "stack=true: the layers alone have no loss to train the whole model with and no logits to generate "
      .. "from; lora or none without cache= is expected")
  end
  if out.rows == 0 then out.rows = math.min(out.micro_tokens, 1024) end
  if out.rows > out.micro_tokens then
    bs.fail(2, "rows=%d; as many as micro_tokens=%d at most are expected", out.rows, out.micro_tokens)
  end
  return out
end

-- ---- what is trained -----------------------------------------------------------------------------

local function choose_trainables(self)
  local cfg, m = self.cfg, self.model
  self.lowest, self.adapters = m.config.layers, {}
  if cfg.trainable == "base" then
    if cfg.adapter then bs.fail(2, "adapter= with trainable=base; one of them is expected") end
    self.lowest = 0
  elseif cfg.adapter then
    self.saved = adapter.open(m, cfg.adapter)
    self.adapters, self.lora_spec = self.saved.list, self.saved.spec
  elseif cfg.trainable == "lora" then
    self.lora_spec = lora.spec(cfg.lora)
    self.adapters = lora.select(m, self.lora_spec)
  end
  if cfg.trainable ~= "lora" then return end
  for _, a in ipairs(self.adapters) do self.lowest = math.min(self.lowest, a.layer) end
end

-- Every weight as a parameter: name -> id, and with an updatable model where the homes are, which the
-- parameters are told when they are filled.
local function register_base(self, params)
  local m, base, homes = self.model, {}, {}
  local function add(name, rows, cols, block, tensor)
    if base[name] then return end
    local id = params:add_base(name, rows, cols)
    base[name] = id
    if m.updatable then
      params:update_base(id, rows, cols)
      homes[#homes + 1] = { id = id, block = block, tensor = tensor }
    end
  end
  local function add_part(part)
    for _, name in ipairs(part.order) do
      local t, rows = part.tensor[name], 1
      for i = 1, #t.dims - 1 do rows = rows * t.dims[i] end
      add(part.prefix .. name, rows, t.dims[#t.dims], part.block, t.id)
    end
  end
  model.each_part(m, add_part)
  add_part(m.norm)
  local c, embed, tile = m.config, m.embed or {}, m.tiles[1]
  add(m.family.embed.name, c.vocab, c.channels, embed.block, embed.id)
  add(m.head_name, c.vocab, c.channels, tile.block, tile.id)
  if m.family.head.bias then add(m.family.head.bias, c.vocab, 1, tile.block, tile.bias) end
  return base, homes
end

-- ---- objects on an engine --------------------------------------------------------------------------

function methods:batch_config()
  return { micros = self.cfg.micros, tokens = self.cfg.micro_tokens, rows = self.cfg.rows }
end

--- Boundary keys for a placement ("device" or "host"): layer inputs, the gradient, staged hand-offs. keep: the
-- inputs of that many upper layers stay on the device, where their kept activations refer to them.
function methods:store_keys(boundaries, keep)
  local m, c, list, keys = self.model, self.model.config, {}, { h = {} }
  local function add(name, channels, where, dtype)
    list[#list + 1] = { name = name, channels = channels, dtype = dtype or m.compute, stay = where }
    return #list - 1
  end
  for i = 0, c.layers do
    local at = boundaries == "host" and i < c.layers - keep and "host" or "device"
    keys.h[i] = add("h." .. i, c.channels, i >= self.lowest and i < c.layers and at or "pass")
  end
  keys.g = add("g", c.channels, "device")
  local fam = m.family
  if fam.stages then
    local hand = fam.handoff(c)
    -- Sums over experts are f32: y, and the gradients of u and r.
    local sums = { u = "f32", r = "f32" }
    for _, name in ipairs { "h", "u", "r" } do
      keys["mix_" .. name] = add("mix." .. name, hand[name], "device")
      keys["mix_d" .. name] = add("mix.d" .. name, hand[name], "device", sums[name])
    end
    keys.y, keys.dy = add("y", c.channels, "device", "f32"), add("dy", c.channels, "device")
  end
  self.keys = keys
  return list
end

local function head_config(self)
  local m = self.model
  return {
    channels = m.config.channels, vocab = m.config.vocab, softcap = m.config.final_softcap or 0,
    tile_rows = m.tile_rows, logits = self.cfg.logits == true,
  }
end

-- Rotations by name: {short, long, most}; `long` is for forwards whose longest row has more than `most` tokens.
local function make_ropes(self, e)
  local c, ropes, names = self.model.config, {}, {}
  local function rotation(spec, longest)
    local f, scaling = nn.inv_freq(spec, longest)
    return bs.rope.new(e, bs.array.new("f32", { #f }, f), scaling, c.rope_style or "half")
  end
  local specs = c.ropes or { default = c.rope }
  for name in pairs(specs) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local spec, most = specs[name], nn.rope_switch(specs[name])
    local short = rotation(spec, 1)
    ropes[name] = { short = short, long = most and rotation(spec, most + 1) or short, most = most or math.huge }
  end
  return ropes
end

-- Everything that lives on an engine, in an order that gives the same regions on every device. The job
-- holds each part at once, so that close ends them whatever fails here.
local function build(self, dev, choice, pool_bytes)
  local m, cfg, o = self.model, self.cfg, self
  o.placement = plan.place_blocks(self, choice.homes, choice.dev_slots, choice.host_slots)
  o.engine = bs.engine.open {
    device = dev, compute = m.compute, pool_bytes = pool_bytes, expand_bytes = m.expand_bytes,
    workspace_bytes = self.device:props().workspace_bytes, n_blocks = m.n_blocks, seed = cfg.seed,
  }
  local e = o.engine
  o.batch = bs.batch.open(e, self:batch_config())
  o.store = bs.store.open(e, o.batch, self:store_keys(choice.boundaries, choice.keep))
  o.keep_from = m.config.layers - choice.keep
  o.rows = bs.embedding.open(e, {
    manifest = m.manifest, rows = m.rows, home = choice.rows, batch = o.batch, io = cfg.io,
  })
  local trainer
  if cfg.trainable ~= "none" or cfg.adapter then
    o.params = bs.params.open(e)
    if cfg.trainable == "none" then o.params:freeze() end
    o.base = {}
    if cfg.trainable == "base" then o.base, o.base_homes = register_base(self, o.params) end
    trainer = { params = o.params, adapter = lora.register(m, self.adapters, o.params), base = o.base }
    o.params:seal()
  end
  if not cfg.stack then
    local head = head_config(self)
    head.batch = o.batch
    o.head = bs.head.open(e, head)
  end
  o.ropes = make_ropes(self, e)
  if self.kv then
    o.cache = bs.cache.open(e, { rows = cfg.cache.rows, capacity = cfg.cache.tokens, channels = self.kv })
  end
  o.weights = model.bind(m, e, trainer)
  o.stream = bs.stream.open { engine = e, placement = o.placement, io = cfg.io }
  e:seal()
end

local part_order = { "stream", "cache", "head", "params", "rows", "store", "batch", "engine" }

local function close_objects(self)
  self.weights, self.ropes = nil, nil
  for _, key in ipairs(part_order) do
    if self[key] then self[key]:close() end
    self[key] = nil
  end
end

--- What a placement that keeps the activations of `keep` layers needs beside slots, homes and boundaries: {arena,
-- other}, in bytes.
function methods:needs(keep)
  self.needed[keep] = self.needed[keep] or dry.measure(self, keep, build, close_objects)
  return self.needed[keep]
end

-- Layers whose activations can be kept: those with a backward pass in one visit.
local function keepable(self)
  local cfg, staged, most = self.cfg, self.model.family.stages, self.model.config.layers - self.lowest
  if staged then most = 0 end
  if cfg.keep ~= "auto" and cfg.keep > most then
    bs.fail(2, "keep=%d; at most %d layers of this job can keep their activations%s", cfg.keep, most,
      staged and ": its layers are staged" or "")
  end
  return most
end

-- ---- making a job ----------------------------------------------------------------------------------------

local function load_parameters(self)
  for _, a in ipairs(self.adapters) do
    if self.saved then
      local first, second = self.saved:read(a.full)
      self.params:set(a.a, first)
      self.params:set(a.b, second)
    else
      self.params:init_kaiming(a.a, self.cfg.seed)
    end
  end
  if self.saved then self.saved:close() end
  self.saved = nil
end

--- A new job. cfg: see job.defaults; lora = {r, alpha, targets, top_fraction or layers, rslora, dropout,
-- rank_pattern, alpha_pattern} or adapter = folder (with trainable = "none": used and not trained); cache =
-- {rows, tokens}: keys and values of so many rows of so many tokens are kept, for decode.
function job.new(cfg)
  local self = setmetatable({ cfg = settings(cfg), steps_done = 0, needed = {} }, mt)
  local _ <close> = setmetatable({}, { __close = function(_, err)
    if err ~= nil then self:close() end
  end })
  local compute
  self.device, compute = device.open(self.cfg)
  plan.set_budgets(self.cfg, self.device)
  device.limit(self)
  self.model = model.open(self.cfg.model, {
    family = self.cfg.family, group = self.cfg.group, compute = compute,
    update = self.cfg.trainable == "base" and self.cfg.home == "gpu",
  })
  choose_trainables(self)
  self.walk_program = program.walk(self.model, self.cfg.stack)
  if self.cfg.trainable == "none" then
    self.program = self.walk_program
  elseif self.cfg.stack then
    self.program = program.stack(self.model, self.lowest)
  else
    self.program = program.train(self.model, self.lowest, self.cfg.trainable == "base")
  end
  self.keepable = keepable(self)
  if self.cfg.cache then self.kv = dry.cache(self, build, close_objects) end
  device.start(self, function()
    build(self, self.device, self.choice, self.choice.peak)
  end, close_objects)
  load_parameters(self)
  return self
end

function methods:close()
  close_objects(self)
  if self.saved then self.saved:close() end
  self.saved = nil
  if self.device then self.device:close() end
  self.device = nil
end
mt.__close = methods.close

-- Passes and steps have a file of their own.
for name, fn in pairs(require "bs.train.step") do methods[name] = fn end

--- Bytes of all blocks as stored.
function methods:weight_bytes()
  local n = 0
  for b = 0, self.model.n_blocks - 1 do n = n + self.model.manifest:block_info(b).payload end
  return n
end

--- The training loop (see bs.run).
function methods:run(o) return run.train(self, o) end

--- Write the weights of a job with trainable="base" as a checkpoint folder (see save.base).
function methods:save_base(dir, opts) save.base(self, dir, opts) end

--- Save the adapter as a PEFT folder, tested (save.lua).
function methods:save(dir) save.adapter(self, dir) end

return job
