-- SPDX-License-Identifier: Apache-2.0
--- Passes and steps of a job: forward walks, gradients, the optimizer step as a transaction. The functions
-- here are methods of the job (see job.lua).
local bs = require "bs"
local args = require "bs.settings.args"
local driver = require "bs.instance.driver"
local health = require "bs.train.diagnose"

local methods = {}

local function set_batch(self, micros)
  local count = 0
  if #micros > self.cfg.micros then
    bs.fail(1, "a step of %d micro-batches; the job was planned for %d (micros=)", #micros, self.cfg.micros)
  end
  for j, micro in ipairs(micros) do
    self.batch:set(j - 1, micro)
    count = count + self.batch:labelled(j - 1)
  end
  self.batch:begin(#micros)
  return count
end

-- Forget what is pushed and the gradients so far. A lost device refuses both: the first error tells more.
local function drop(self)
  self.pushed, self.pushed_next = nil, nil
  pcall(self.stream.abort, self.stream)
  if self.params then pcall(self.params.zero_grad, self.params) end
end

-- The same program follows: push it before the last visits, so that its first blocks arrive meanwhile.
local function follow(self, run, list)
  run.cyclic, run.early = true, math.min(2, #list - 1)
  run.ahead = function()
    self.stream:push(list, true)
    self.pushed_next = list
  end
end

-- Run a pass over a pushed program; whatever is raised in it leaves the job usable.
local function pass(self, run, list)
  if self.pushed ~= list then
    if self.pushed then self.stream:abort() end
    self.stream:push(list, run.cyclic == true)
  end
  self.pushed = nil
  local ok, err = xpcall(driver.segment, bs.traceback, self, run, #list)
  for _, kept in pairs(run.kept) do kept:close() end -- of a pass that failed
  if ok then
    self.pushed, self.pushed_next = self.pushed_next, nil
    return
  end
  drop(self)
  error(err, 0)
end

--- Gradients of a step into the accumulators; nothing is applied. Returns the mean loss.
-- opts: {step = dropout counter, next = bool: push the same program before the last visits}.
function methods:forward_backward(micros, opts)
  local list, trainable = self.program, self.cfg.trainable
  self.params:zero_grad()
  local count = set_batch(self, micros)
  if count == 0 then bs.fail(1, "the step has no trained token; at least one label must be >= 0") end
  local embedding = trainable == "base"
  local run = {
    micros = #micros, count = count, train = true, step = opts.step or 0, head_mode = "train",
    lowest = self.lowest, early = 0, cyclic = true,
    input_gradient = function(i) return i > self.lowest or embedding end,
  }
  if opts.next then follow(self, run, list) end
  pass(self, run, list)
  if embedding then
    local id = self.base[self.model.family.embed.name]
    for j = 0, #micros - 1 do
      self.rows:grad(self.store, self.keys.g, j, self.model.embed_scale, self.params, id)
    end
  end
  return self.head and self.head:loss(), count
end

local function walk(self, micros, mode, o)
  local count = set_batch(self, micros)
  if mode == "loss" and count == 0 then bs.fail(1, "no labelled token to evaluate") end
  local list = self.walk_program
  local run = {
    micros = #micros, count = math.max(count, 1), train = false, step = 0, head_mode = self.head and mode,
    lowest = self.model.config.layers, early = 0, observe = o.observe, prepare = o.prepare, cache = o.cache,
  }
  if o.next then follow(self, run, list) end
  pass(self, run, list)
  if not self.head then return self.engine:wait() end
  if mode == "loss" then return self.head:loss(), count end
  local out = {}
  for j = 1, #micros do out[j] = self.head:logits(j - 1) end
  return out
end

--- Forward walk. mode "loss" returns the mean loss; "logits" a list of arrays [tokens, vocab], "last" of
-- [rows, vocab]: the last token of each row. observe(kind, i, micro, array): hidden states after embedding (0)
-- and each layer. A stack has no head: its walk waits for the last layer and returns nothing. next: the same
-- walk follows. prepare(layer, micro) is called before ops of a layer are issued.
function methods:walk(micros, mode, observe, next, prepare)
  return walk(self, micros, mode, { observe = observe, next = next, prepare = prepare })
end

--- Walk of rows that go on: a micro-batch also holds row_id (rows of the job's cache, from 0) and start (the
-- position of each row's first token; all earlier ones have been decoded). Returns what a walk for "last" does.
-- next: another decode follows.
function methods:decode(micros, next)
  if not self.cache then bs.fail(2, "decode: the job was made without cache=") end
  return walk(self, micros, "last", { cache = self.cache, next = next })
end

local optimizer_defaults = {
  lr = 2e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, clip = 1.0,
}

local step_options = { apply = true, next = true }
for key in pairs(optimizer_defaults) do step_options[key] = true end

-- Where weights can be updated their parameters are told the homes, once a pass has filled them.
local function find_homes(self)
  for _, h in ipairs(self.base_homes) do self.params:update_base(h.id, self.stream, h.block, h.tensor) end
  self.base_homes = {}
end

local function check_update(self)
  local m = self.model
  if self.cfg.trainable ~= "base" or m.updatable then return end
  bs.fail(2, 'trainable="base": weights are updated where every block\'s home is the device and every tensor '
    .. "is stored as f32; %s (apply=false gives the gradients)", self.cfg.home ~= "gpu"
    and ('here home="%s", home="gpu" is needed'):format(self.cfg.home)
    or ("here '%s' is stored as %s"):format(m.not_f32, m.checkpoint.tensors[m.not_f32].dtype))
end

--- One optimizer step over a list of micro-batches. opts: lr, beta1, beta2, eps, weight_decay, clip,
-- apply (default true), next (the same program follows). Returns {loss, norm, tokens, labelled}.
-- A step is a transaction: if anything is raised, parameters are what they were before it.
function methods:step(micros, opts)
  opts = opts or {}
  for key in pairs(opts) do
    if not step_options[key] then
      bs.fail(2, "step: unknown option '%s'; did you mean %s?", tostring(key),
        table.concat(args.nearest(tostring(key), step_options), ", "))
    end
  end
  if opts.apply ~= false then check_update(self) end
  local loss, count = self:forward_backward(micros, { step = self.steps_done + 1, next = opts.next })
  local norm = self.params:norm()
  for _, check in ipairs { { "loss", loss }, { "the gradient's norm", norm } } do
    local what, v = table.unpack(check)
    if not health.finite_number(v) then
      drop(self)
      health.diagnose(self, micros, what)
    end
  end
  if opts.apply ~= false then
    local o = { step = self.steps_done + 1 }
    for key, default in pairs(optimizer_defaults) do o[key] = opts[key] or default end
    if self.base_homes then find_homes(self) end
    self.params:apply(o, norm)
    self.steps_done = self.steps_done + 1
  end
  local tokens = 0
  for j = 0, #micros - 1 do tokens = tokens + self.batch:tokens(j) end
  return { loss = loss, norm = norm, labelled = count, tokens = tokens }
end

--- Gradients in the accumulators: parameter name -> array.
function methods:gradients()
  local out = {}
  for id = 0, self.params:count() - 1 do out[self.params:name(id)] = self.params:grad(id) end
  return out
end

--- Parameter values: name -> array: of adapters, and of weights that are updated (after a first pass).
function methods:parameters()
  local out = {}
  if self.model.updatable then
    find_homes(self)
    for name, id in pairs(self.base) do out[name] = self.params:get(id) end
  end
  for _, a in ipairs(self.adapters) do
    for _, id in ipairs { a.a, a.b } do out[self.params:name(id)] = self.params:get(id) end
  end
  return out
end

return methods
