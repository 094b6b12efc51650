-- SPDX-License-Identifier: Apache-2.0
--- What an instance computes, whatever it computes it on: the model, what of it is trained, the programs, and the
-- sizes of a batch. The home of a block, slots and budgets are none of it: two instances of one spec give the
-- same bits. Two settings of a plan are looked at: home="gpu" with trainable="base" changes the cut into blocks, so
-- that weights can be updated in their homes, and keep is checked against the layers that can be kept.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local guard = require "bs.settings.guard"
local lora = require "bs.model.lora"
local model = require "bs.model.model"
local program = require "bs.instance.program"

local spec = {}
local methods = {}
local mt = { __index = methods, __name = "bs.spec" }

local function choose_trainables(self, cfg)
  local m = self.model
  self.lowest, self.adapters = m.config.layers, {}
  if cfg.trainable == "base" then
    if cfg.adapter then bs.fail("usage", "adapter= with trainable=base; one of them is expected") end
    self.lowest = 0
  elseif cfg.adapter then
    self.saved = adapter.open(m, cfg.adapter)
    self.adapters, self.lora = self.saved.list, self.saved.spec
  elseif cfg.trainable == "lora" then
    self.lora = lora.spec(cfg.lora)
    self.adapters = lora.select(m, self.lora)
  end
  if cfg.trainable ~= "lora" then return end
  for _, a in ipairs(self.adapters) do self.lowest = math.min(self.lowest, a.layer) end
end

-- Why the weights of trainable="base" get gradients and no updates, or nil.
local function why_fixed(self, home)
  local m = self.model
  if self.trainable ~= "base" or m.updatable then return nil end
  if home ~= "gpu" then return ('here home="%s", home="gpu" is needed'):format(home) end
  return ("here '%s' is stored as %s"):format(m.not_f32, m.checkpoint.tensors[m.not_f32].dtype)
end

local function choose_programs(self)
  self.walk_program = program.walk(self.model, self.stack)
  if self.trainable == "none" then
    self.program = self.walk_program
  elseif self.stack then
    self.program = program.stack(self.model, self.lowest)
  else
    self.program = program.train(self.model, self.lowest, self.trainable == "base")
  end
end

-- Layers whose activations can be kept: those with a backward pass in one visit.
local function keepable(self, keep)
  local staged, most = self.model.family.stages, self.model.config.layers - self.lowest
  if staged then most = 0 end
  if keep ~= "auto" and keep > most then
    bs.fail("usage", "keep=%d; at most %d layers of this job can keep their activations%s", keep, most,
      staged and ": its layers are staged" or "")
  end
  return most
end

--- A spec from the settings of a job (bs.train.job_settings); the caller closes it. compute: "f32", "bf16", or "auto",
-- which the checkpoint decides. Returns
--   model, name          the model, and its folder
--   trainable            "lora", "base" or "none"
--   adapters, lora       of lora.select, and the specification that they come from
--   lowest               the lowest layer with a backward pass; config.layers: none
--   program, walk_program    of a step, and of a forward walk
--   keepable             how many upper layers can keep their activations
--   fixed                why base weights get gradients and no updates, or nil
--   batch                {micros, tokens, rows}, at most
--   seed, logits, stack, cache, io    as in the settings
function spec.new(cfg, compute)
  local self = setmetatable({
    name = cfg.model, trainable = cfg.trainable, stack = cfg.stack, logits = cfg.logits, cache = cfg.cache,
    seed = cfg.seed, io = cfg.io, batch = { micros = cfg.micros, tokens = cfg.micro_tokens, rows = cfg.rows },
  }, mt)
  local _ <close> = guard(self)
  self.model = model.open(cfg.model, {
    family = cfg.family, ignore = cfg.ignore, check = cfg.check, group = cfg.group, compute = compute,
    update = cfg.trainable == "base" and cfg.home == "gpu",
  })
  choose_trainables(self, cfg)
  self.fixed = why_fixed(self, cfg.home)
  choose_programs(self)
  self.keepable = keepable(self, cfg.keep)
  return self
end

--- The homes and slots of a plan ({homes, dev_slots, host_slots}) for the program of a step, checked and counted. The
-- plan is chosen by it, and the instance streams by it, so that what is counted is what moves; the caller closes it.
function methods:placement(plan)
  return bs.placement.new {
    manifest = self.model.manifest, homes = plan.homes, dev_slots = plan.dev_slots, host_slots = plan.host_slots,
    program = self.program, cyclic = true,
  }
end

--- Forget the adapter's file, once its values have been read.
function methods:close()
  if self.saved then self.saved:close() end
  self.saved = nil
end

return spec
