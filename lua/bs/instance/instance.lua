-- SPDX-License-Identifier: Apache-2.0
--- An instance: a spec in the memory of a device. It owns everything that lives on an engine (batch, store, embedding,
-- parameters, head, cache, weights, stream) and runs passes: gradients of a step, forward walks, decoding. A dry run
-- owns one on `meta`, a job one on its device; both are built here, in one order, so that the regions are the same.
local bs = require "bs"
local guard = require "bs.settings.guard"
local store_keys = require "bs.instance.store_keys"
local options = require "bs.settings.options"
local parameters = require "bs.instance.parameters"
local pass = require "bs.instance.pass"
local rotations = require "bs.instance.rotations"
local staged = require "bs.instance.staged"
local weights = require "bs.model.weights"

local instance = {}
local methods = {}
local mt = { __index = methods, __name = "bs.instance" }

-- ---- making and ending -----------------------------------------------------------------------------

local function open_head(self)
  local m = self.spec.model
  return bs.head.open(self.engine, {
    channels = m.config.channels, vocab = m.config.vocab, softcap = m.config.final_softcap or 0,
    tile_rows = m.tile_rows, logits = self.spec.logits == true, batch = self.batch,
  })
end

local function open_cache(self, channels)
  local c = self.spec.cache
  return bs.cache.open(self.engine, { rows = c.rows, capacity = c.tokens, channels = channels })
end

-- The order decides where regions lie. Each part is held at once, so that close ends them whatever fails here.
local function build(self, plan, device, o)
  local spec, m = self.spec, self.spec.model
  self.placement = spec:placement(plan)
  self.engine = bs.engine.open {
    device = device, compute = m.compute, pool_bytes = o.pool_bytes, expand_bytes = m.expand_bytes,
    workspace_bytes = o.workspace_bytes, n_blocks = m.n_blocks, seed = spec.seed,
  }
  local e, list, key = self.engine, store_keys.list(spec, plan.boundaries, plan.keep)
  self.batch, self.keys = bs.batch.open(e, spec.batch), key
  self.store = bs.store.open(e, self.batch, list)
  self.embedding = bs.embedding.open(e, {
    manifest = m.manifest, rows = m.row_table, home = plan.rows, batch = self.batch, io = spec.io,
  })
  local trainer
  if spec.trainable ~= "none" or #spec.adapters > 0 then
    trainer, self.base_homes = parameters.open(spec, e)
    self.params, self.base, self.adapter = trainer.params, trainer.base, trainer.adapter
  end
  if not spec.stack then self.head = open_head(self) end
  self.rotations = rotations.open(e, m.config)
  if m.family.stages then
    local route = m.family.routing(m.config)
    self.piece = staged.piece_rows(spec.batch.tokens, route.chosen)
    self.routing = bs.routing.open(e, self.batch, {
      experts = route.experts, chosen = route.chosen, piece = self.piece,
    })
  end
  if o.cache_channels then self.cache = open_cache(self, o.cache_channels) end
  self.weights = weights.bind(m, e, trainer)
  self.stream = bs.stream.open { engine = e, placement = self.placement, io = spec.io }
  e:seal()
end

--- Build a spec on a device. plan: {homes, dev_slots, host_slots, boundaries, rows (home of the embedding's rows),
-- keep}. o: {pool_bytes (0 on meta: as much as it takes), workspace_bytes (of the real device's kernels),
-- cache_channels (a list, one number a layer: with a cache), on_attend(layer, channels) or nil}. Raises what the
-- device refuses, with nothing left behind. The device must outlive the instance.
function instance.open(spec, plan, device, o)
  local self = setmetatable({
    spec = spec, keep_from = spec.model.config.layers - plan.keep, on_attend = o.on_attend,
    dry = device:props().name == "meta",
  }, mt)
  local _ <close> = guard(self)
  build(self, plan, device, o)
  return self
end

local parts = { "stream", "cache", "routing", "head", "params", "embedding", "store", "batch", "engine" }

function methods:close()
  self.weights, self.rotations = nil, nil
  for _, name in ipairs(parts) do
    if self[name] then self[name]:close() end
    self[name] = nil
  end
end
mt.__close = methods.close

-- ---- passes ------------------------------------------------------------------------------------------

-- Hand the micro-batches of a pass to the engine. Returns how many tokens have a label.
local function set_batch(self, micros)
  local labelled, most = 0, self.spec.batch.micros
  if type(micros) ~= "table" or type(micros[1]) ~= "table" then
    bs.fail("usage", "a list of micro-batches {row_len =, ids =, ...} is expected")
  end
  if #micros > most then
    bs.fail("error", "a step of %d micro-batches; the job was planned for %d (micros=)", #micros, most)
  end
  for j, micro in ipairs(micros) do
    self.batch:set(j - 1, micro)
    labelled = labelled + self.batch:labelled(j - 1)
  end
  self.batch:begin(#micros)
  return labelled
end

--- Gradients of a step into the accumulators; nothing is applied. o: {step = counter of dropout, next = the same
-- program follows, so that its first blocks are read meanwhile}. Returns the mean loss (nil of a stack, which has
-- none) and the number of labelled tokens.
function methods:forward_backward(micros, o)
  local spec = self.spec
  o = options.read("forward_backward: ", o, { step = { type = "integer", default = 0 }, next = { type = "boolean" } })
  self.params:zero_grad()
  local labelled = set_batch(self, micros)
  if labelled == 0 then bs.fail("error", "the step has no trained token; at least one label must be >= 0") end
  local embedding = spec.trainable == "base"
  pass.run(self, spec.program, {
    micros = #micros, labelled = labelled, train = true, step = o.step, head = "train", lowest = spec.lowest,
    input_gradient = function(layer) return layer > spec.lowest or embedding end, next = o.next,
    cyclic = true, -- so that every step moves the bytes that the plan says, with `next` or without
  })
  if embedding then
    local m = spec.model
    for j = 0, #micros - 1 do
      self.embedding:grad(self.store, self.keys.g, j, m.embed_scale, self.params, self.base[m.family.embed.name])
    end
  end
  return self.head and self.head:loss(), labelled
end

local function walk(self, micros, o)
  local labelled = set_batch(self, micros)
  if o.mode == "loss" and labelled == 0 then bs.fail("error", "no labelled token to evaluate") end
  pass.run(self, self.spec.walk_program, {
    micros = #micros, labelled = math.max(labelled, 1), train = false, step = 0, head = self.head and o.mode,
    lowest = self.spec.model.config.layers, observe = o.observe, prepare = o.prepare, cache = o.cache,
    lengths = o.lengths, next = o.next,
  })
  if not self.head then return self.engine:wait() end
  if o.mode == "loss" then return self.head:loss(), labelled end
  local out = {}
  for j = 1, #micros do out[j] = self.head:logits(j - 1) end
  return out
end

local walk_rules <const> = {
  mode = { words = { "loss", "logits", "last" }, required = true }, next = { type = "boolean" },
  observe = { type = "function" }, prepare = { type = "function" },
}

--- Forward walk. o.mode: "loss" returns the mean loss and the number of labelled tokens; "logits" a list of arrays
-- [tokens, vocab]; "last" of [rows, vocab], the last token of each row. o.observe(kind, layer, micro, array): hidden
-- states after the embedding (0) and after each layer. o.prepare(layer, micro) is called before the ops of a layer
-- are issued. o.next: the same walk follows. A stack has no head: its walk waits for the last layer and returns
-- nothing.
function methods:walk(micros, o)
  o = options.read("walk: ", o, walk_rules)
  if o.mode == "logits" and not self.spec.logits then
    bs.fail("usage", 'walk: mode="logits": the job was made without logits=true; loss or last is expected')
  end
  return walk(self, micros, o)
end

--- Walk of rows that go on: a micro-batch also holds row_id (rows of the cache, from 0) and start (the position of
-- each row's first token; all earlier ones have been decoded). o.next: another decode follows. o.lengths: for each
-- micro-batch the tokens that a rotation which depends on the length goes by (default: its longest row so far); a row
-- must keep to one table, since earlier keys are in the cache as they were rotated. Returns what a walk for "last"
-- does.
function methods:decode(micros, o)
  o = options.read("decode: ", o, { next = { type = "boolean" }, lengths = { type = "table" } })
  if not self.cache then bs.fail("usage", "decode: the job was made without cache=") end
  return walk(self, micros, { mode = "last", cache = self.cache, lengths = o.lengths, next = o.next })
end

--- Drop what a failed pass has left: visits that are on their way, gradients so far.
function methods:undo() pass.undo(self) end

-- ---- parameters --------------------------------------------------------------------------------------

-- Where weights can be updated their parameters are told the homes, once a pass has filled them.
local function find_homes(self)
  for _, h in ipairs(self.base_homes or {}) do self.params:update_base(h.id, self.stream, h.block, h.tensor) end
  self.base_homes = nil
end

--- One AdamW step with the gradients of the last pass. adamw: see params:apply; norm: their global norm.
function methods:apply(adamw, norm)
  find_homes(self)
  self.params:apply(adamw, norm)
end

--- Gradients in the accumulators: parameter name -> array.
function methods:gradients()
  local out = {}
  for id = 0, self.params:count() - 1 do out[self.params:name(id)] = self.params:grad(id) end
  return out
end

--- The ids of parameters that have values, by name: of adapters, and of weights that are updated (after a first pass).
function methods:parameter_ids()
  local out = {}
  if self.spec.model.updatable then
    find_homes(self)
    for name, id in pairs(self.base) do out[name] = id end
  end
  for _, a in pairs(self.adapter or {}) do
    for _, id in ipairs { a.a, a.b } do out[self.params:name(id)] = id end
  end
  return out
end

--- Their values, name -> array.
function methods:parameters()
  local out = self:parameter_ids()
  for name, id in pairs(out) do out[name] = self.params:get(id) end
  return out
end

return instance
