-- SPDX-License-Identifier: Apache-2.0
--- A job: model, program, plan, optimizer and data in one object, which recipes, parity and tests drive.
--
--   local job <close> = job.new { model = DIR, lora = {...}, vram = bytes, ram = bytes }
--   job:step(micros)          one optimizer step        job:eval(batches)   mean loss
--   job:run{...}              the training loop         job:close()
--
-- A micro-batch is {row_len = {...}, ids = {...}, labels = {...} or nil, row_id = {...} or nil}.
local bs = require "bs"
local adapter = require "bs.adapter"
local lora = require "bs.lora"
local model = require "bs.model"
local nn = require "bs.nn"
local plan = require "bs.plan"
local program = require "bs.program"

local job = {}
local methods = {}
local mt = { __index = methods, __name = "bs.job" }

local UNBOUNDED = 1 << 60
--- Settings and their defaults. vram and ram: bytes of the device pool and of every accounted host byte.
-- dtype: what is computed in, f32, bf16, or auto: bf16 where the device can and the checkpoint is bf16.
job.defaults = {
  device = "cpu", threads = 0, vram = UNBOUNDED, ram = UNBOUNDED, home = "auto", boundaries = "auto",
  dev_slots = "auto", host_slots = "auto", micro_tokens = 512, micros = 1, rows = 0, seed = 1,
  trainable = "lora", dtype = "f32",
}

local known = {
  model = true, lora = true, adapter = true, io = true, rates = true, logits = true, device_options = true,
  family = true, group = true, log = true,
}

local function settings(cfg)
  local out = {}
  for key, value in pairs(cfg) do
    if job.defaults[key] == nil and not known[key] then
      local names = {}
      for name in pairs(job.defaults) do names[#names + 1] = name end
      for name in pairs(known) do names[#names + 1] = name end
      table.sort(names)
      bs.fail(2, "job: unknown setting '%s'; known: %s", key, table.concat(names, ", "))
    end
    out[key] = value
  end
  for key, value in pairs(job.defaults) do
    if out[key] == nil then out[key] = value end
  end
  local homes = { auto = true, gpu = true, ram = true, disk = true }
  if not homes[out.home] then bs.fail(2, "home=%s; auto, gpu, ram or disk is expected", out.home) end
  if not (out.dtype == "f32" or out.dtype == "bf16" or out.dtype == "auto") then
    bs.fail(2, "dtype=%s; f32, bf16 or auto is expected", tostring(out.dtype))
  end
  if type(out.model) ~= "string" then bs.fail(2, "model= must name a checkpoint folder") end
  if out.rows == 0 then out.rows = math.min(out.micro_tokens, 1024) end
  return out
end

-- ---- what is trained -----------------------------------------------------------------------------

local function choose_trainables(self)
  local cfg, m = self.cfg, self.model
  self.lowest, self.adapters = m.config.layers, {}
  if cfg.trainable == "base" then
    self.lowest = 0
  elseif cfg.trainable == "lora" then
    if cfg.adapter then
      self.adapters, self.initial, self.adapter_config = adapter.load(m, cfg.adapter)
      local c = self.adapter_config
      self.lora_spec = { r = c.r, alpha = c.lora_alpha, rslora = c.use_rslora == true }
    else
      self.lora_spec = cfg.lora or {}
      self.lora_spec.r = self.lora_spec.r or 16
      self.lora_spec.alpha = self.lora_spec.alpha or 2 * self.lora_spec.r
      self.adapters = lora.select(m, self.lora_spec)
    end
    for _, a in ipairs(self.adapters) do self.lowest = math.min(self.lowest, a.layer) end
  elseif cfg.trainable ~= "none" then
    bs.fail(2, "trainable=%s; lora, base or none is expected", tostring(cfg.trainable))
  end
end

local function register_base(self, params)
  local m, base = self.model, {}
  local function add(name, rows, cols)
    if not base[name] then base[name] = params:add_base(name, rows, cols) end
  end
  model.each_part(m, function(part)
    for _, name in ipairs(part.order) do
      local dims = part.tensor[name].dims
      add(part.prefix .. name, #dims == 2 and dims[1] or 1, dims[#dims])
    end
  end)
  add(m.norm.name, 1, m.config.channels)
  add(m.family.embed.name, m.config.vocab, m.config.channels)
  add(m.head_name, m.config.vocab, m.config.channels)
  return base
end

-- ---- objects on an engine --------------------------------------------------------------------------

function methods:batch_config()
  return { micros = self.cfg.micros, tokens = self.cfg.micro_tokens, rows = self.cfg.rows }
end

--- Boundary keys for a placement ("device" or "host"): layer inputs, the gradient, staged hand-offs.
function methods:store_keys(boundaries)
  local m, c, list, keys = self.model, self.model.config, {}, { h = {} }
  local function add(name, channels, keep, dtype)
    list[#list + 1] = { name = name, channels = channels, dtype = dtype or m.compute, keep = keep }
    return #list - 1
  end
  local kept = boundaries == "host" and "host" or "device"
  for i = 0, c.layers do
    keys.h[i] = add("h." .. i, c.channels, i >= self.lowest and i < c.layers and kept or "pass")
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

local function make_ropes(self, e)
  local c, ropes = self.model.config, {}
  for name, spec in pairs(c.ropes or { default = c.rope }) do
    local f, scaling = nn.inv_freq(spec)
    ropes[name] = bs.rope.new(e, bs.array.new("f32", { #f }, f), scaling, c.rope_style or "half")
  end
  return ropes
end

-- Everything that lives on an engine, in an order that gives the same regions on every device.
local function build(self, device, choice, pool_bytes)
  local m, cfg, o = self.model, self.cfg, {}
  o.plan = plan.bs_plan(self, choice.homes, choice.dev_slots, choice.host_slots)
  o.engine = bs.engine.open {
    device = device, compute = m.compute, pool_bytes = pool_bytes, expand_bytes = m.expand_bytes,
    n_blocks = m.n_blocks, seed = cfg.seed,
  }
  local e = o.engine
  o.batch = bs.batch.open(e, self:batch_config())
  o.store = bs.store.open(e, o.batch, self:store_keys(choice.boundaries))
  o.rows = bs.rows.open(e, {
    manifest = m.manifest, rows = m.rows, home = choice.rows, batch = o.batch, io = cfg.io,
  })
  local trainer
  if cfg.trainable ~= "none" then
    o.params = bs.params.open(e)
    o.base = cfg.trainable == "base" and register_base(self, o.params) or {}
    trainer = { params = o.params, adapter = lora.register(m, self.adapters, o.params), base = o.base }
    o.params:seal()
  end
  local head = head_config(self)
  head.batch = o.batch
  o.head = bs.head.open(e, head)
  o.ropes = make_ropes(self, e)
  o.weights = model.bind(m, e, trainer)
  o.stream = bs.stream.open { engine = e, plan = o.plan, io = cfg.io }
  e:seal()
  return o
end

local function use(self, objects)
  for key, value in pairs(objects) do self[key] = value end
end

local part_order = { "stream", "head", "params", "rows", "store", "batch", "engine" }

local function close_objects(self)
  self.weights, self.ropes = nil, nil
  for _, key in ipairs(part_order) do
    if self[key] then self[key]:close() end
    self[key] = nil
  end
end

-- ---- dry run ------------------------------------------------------------------------------------------

-- One micro-batch that fills the capacity; memory goes by capacity, so its content does not matter.
local function full_micro(self)
  local n, ids, labels = self.cfg.micro_tokens, {}, {}
  for i = 1, n do ids[i], labels[i] = 0, 0 end
  return { row_len = { n }, ids = ids, labels = labels }
end

-- The arena and the fixed regions of this very job, from running its step on `meta`.
local function dry_run(self)
  local m, homes = self.model, {}
  for b = 0, m.n_blocks - 1 do homes[b] = b == m.norm.block and "gpu" or "disk" end
  local choice = { homes = homes, dev_slots = 1, host_slots = 1, boundaries = "device", rows = "disk" }
  local device = bs.device.open("meta", {})
  use(self, build(self, device, choice, 0))
  local fixed = self.engine:stats().fixed_bytes
  local store = bs.store.bytes(self:batch_config(), self:store_keys("device"))
  local other = fixed - self.plan:device_bytes() - store
  local micros = {}
  for j = 1, self.cfg.micros do micros[j] = full_micro(self) end
  if self.cfg.trainable ~= "none" then self:forward_backward(micros, { step = 1 }) end
  self:walk(micros, "loss")
  if self.cfg.logits then self:walk(micros, "logits") end
  local arena = self.engine:stats().arena_peak
  close_objects(self)
  device:close()
  return { arena = arena, other = other }
end

-- ---- making a job ----------------------------------------------------------------------------------------

local function load_parameters(self)
  if self.cfg.trainable ~= "lora" then return end
  for _, a in ipairs(self.adapters) do
    local given = self.initial and self.initial[a.full]
    if given then
      self.params:set(a.a, given.a)
      self.params:set(a.b, given.b)
    else
      self.params:init_kaiming(a.a, self.cfg.seed)
    end
  end
end

-- The device, and what it is to compute in: "auto" is left to the checkpoint where there is a choice.
local function open_device(cfg)
  local options = { threads = cfg.threads }
  for key, value in pairs(cfg.device_options or {}) do options[key] = value end
  local ok, device = pcall(bs.device.open, cfg.device, options)
  if not ok then bs.fail(2, "device=%s: %s", tostring(cfg.device), tostring(device)) end
  if device:props().bf16 then return device, cfg.dtype end
  if cfg.dtype == "bf16" then bs.fail(2, "dtype=bf16: device %s computes in f32", cfg.device) end
  return device, "f32"
end

--- A new job. cfg: see job.defaults; lora = {r, alpha, targets, top_fraction or layers, rslora, dropout,
-- rank_pattern, alpha_pattern} or adapter = folder.
function job.new(cfg)
  local self = setmetatable({ cfg = settings(cfg), steps_done = 0 }, mt)
  local device, compute = open_device(self.cfg)
  self.device = device
  self.model = model.open(self.cfg.model, {
    family = self.cfg.family, group = self.cfg.group, compute = compute,
  })
  choose_trainables(self)
  local trains = self.cfg.trainable ~= "none"
  self.walk_program = program.walk(self.model)
  self.program = trains and program.train(self.model, self.lowest, self.cfg.trainable == "base")
    or self.walk_program
  self.choice = plan.choose(self, dry_run(self))
  use(self, build(self, self.device, self.choice, self.choice.peak))
  load_parameters(self)
  return self
end

function methods:close()
  if self.stream then self.stream:abort() end
  close_objects(self)
  if self.device then self.device:close() end
  self.device = nil
end
mt.__close = methods.close
mt.__gc = nil

-- Passes and steps have a file of their own.
for name, fn in pairs(require "bs.step") do methods[name] = fn end

--- Bytes of all blocks as stored.
function methods:weight_bytes()
  local n = 0
  for b = 0, self.model.n_blocks - 1 do n = n + self.model.manifest:block_info(b).payload end
  return n
end

--- Save the adapter as a PEFT folder.
function methods:save(dir) adapter.save(self, dir) end

return job
