-- SPDX-License-Identifier: Apache-2.0
--- What is computed in a visit, for each kind of it: dense layers, the embedding, the final norm, the head's tiles.
-- Staged layers are in staged.lua. A handler gets (inst, p, visit): the instance, the pass (pass.lua), and {block,
-- kind, layer, stage}.
local bs = require "bs"
local program = require "bs.instance.program"
local scopes = require "bs.instance.scopes"
local staged = require "bs.instance.staged"

local visits = {}
local K <const> = program.kind
local enter = scopes.enter

local handler = {}
for kind, fn in pairs(staged.handler) do handler[kind] = fn end

handler[K.embed] = function(inst, p, visit)
  local scale = inst.spec.model.embed_scale
  for j = 0, p.micros - 1 do
    local _ <close> = enter(inst, p, visit, j, false)
    local x = bs.op.embed(inst.engine, inst.weights.embed)
    inst.store:put(inst.keys.h[0], j, scale ~= 1 and x * scale or x)
  end
  scopes.observe(inst, p, "hidden", 0)
end

-- ---- dense layers --------------------------------------------------------------------------------------

-- Of a layer whose activations are kept the forward visit already records the tape: its scope is set aside with it.
handler[K.forward] = function(inst, p, visit)
  local m, layer = inst.spec.model, visit.layer
  local keep = p.train and layer >= inst.keep_from
  for j = 0, p.micros - 1 do
    local scope <close>, ctx = enter(inst, p, visit, j, keep)
    local x = scopes.input(inst, p, visit, j)
    if keep and p.input_gradient(layer) then x:want_grad() end
    local y = m.family.layer(m.config, inst.weights.layers[layer].trunk, x, ctx)
    local name = scopes.remember(p, scope, layer, j)
    inst.store:put(inst.keys.h[layer + 1], j, y)
    if keep then p.kept[name] = scope:keep(x, y) end
  end
  scopes.observe(inst, p, "hidden", layer + 1)
end

-- The layer once more with a tape, for its backward pass: its input and its output.
local function recompute(inst, p, visit, j, scope)
  local m = inst.spec.model
  local x = inst.store:get(inst.keys.h[visit.layer], j)
  if p.input_gradient(visit.layer) then x:want_grad() end
  local y = m.family.layer(m.config, inst.weights.layers[visit.layer].trunk, x, p.context[j])
  scopes.compare(p, scope, visit.layer, j)
  return x, y
end

-- The scope of a layer's backward pass, its input and its output: those that the forward visit has kept, or computed
-- again.
local function enter_backward(inst, p, visit, j)
  local name = scopes.work_name(visit.layer, j)
  local kept = p.kept[name]
  if not kept then return (enter(inst, p, visit, j, true)) end
  p.kept[name] = nil
  return kept:resume()
end

handler[K.backward] = function(inst, p, visit)
  for j = 0, p.micros - 1 do
    local scope <close>, x, y = enter_backward(inst, p, visit, j)
    if not x then x, y = recompute(inst, p, visit, j, scope) end
    scope:backward { { y, inst.store:get(inst.keys.g, j) } }
    if p.input_gradient(visit.layer) then inst.store:put(inst.keys.g, j, x:grad()) end
  end
end

-- ---- final norm and head -------------------------------------------------------------------------------

local function final_norm(inst, x)
  local m = inst.spec.model
  return m.final_norm(m.config, inst.weights.head, x)
end

-- The head computes logits only of the rows that are asked for.
handler[K.norm] = function(inst, p, visit)
  inst.head:begin(p.head, p.labelled)
  for j = 0, p.micros - 1 do
    local _ <close> = enter(inst, p, visit, j, false)
    local x = final_norm(inst, inst.store:get(inst.keys.h[visit.layer], j))
    if p.head == "last" then x = bs.op.last(x)
    elseif p.head ~= "logits" then x = bs.op.labelled(x) end
    inst.head:put(j, x)
  end
end

handler[K.tile] = function(inst, p, visit)
  local tile, w = inst.spec.model.tiles[visit.stage], inst.weights.tiles[visit.stage]
  for j = 0, p.micros - 1 do inst.head:tile(j, w.weight, tile.first, w.bias) end
end

handler[K.tile_gradient] = function(inst, p, visit)
  local tile, w = inst.spec.model.tiles[visit.stage], inst.weights.tiles[visit.stage]
  for j = 0, p.micros - 1 do inst.head:tile_grad(j, w.weight, tile.first, w.bias) end
end

-- The head is outside the tape: its gradient enters the norm's here.
handler[K.norm_backward] = function(inst, p, visit)
  local trained_below = p.lowest < inst.spec.model.config.layers
  for j = 0, p.micros - 1 do
    local scope <close> = enter(inst, p, visit, j, true)
    local x = inst.store:get(inst.keys.h[visit.layer], j)
    if trained_below then x:want_grad() end
    local y = bs.op.labelled(final_norm(inst, x))
    scope:backward { { y, inst.head:finish(j) } }
    if trained_below then
      local g = x:grad() -- nil: no token of this micro-batch has a label
      if g then inst.store:put(inst.keys.g, j, g) else inst.store:zero(inst.keys.g, j) end
    end
  end
end

-- A stack's loss is half the mean square of its last hidden state h, whose gradient is h over the number of entries.
handler[K.turn] = function(inst, p, visit)
  local entries = 0
  for j = 0, p.micros - 1 do entries = entries + inst.batch:tokens(j) * inst.spec.model.config.channels end
  for j = 0, p.micros - 1 do
    local _ <close> = enter(inst, p, visit, j, false)
    local h = inst.store:get(inst.keys.h[visit.layer], j)
    inst.store:put(inst.keys.g, j, bs.op.scale(h, 1 / entries))
  end
end

--- Compute what a visit is for.
function visits.run(inst, p, visit) handler[visit.kind](inst, p, visit) end

--- Show the embedding of a model whose table is no block: its rows are gathered now, not micro-batch by micro-batch.
function visits.observe_embedding(inst, p)
  for j = 0, p.micros - 1 do scopes.gather(inst, p, j) end
  scopes.observe(inst, p, "hidden", 0)
end

return visits
