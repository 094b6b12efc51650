-- SPDX-License-Identifier: Apache-2.0
--- Visits of staged layers: `mix` hands (h, u, r) on and routes each token to some experts; the rows of all
-- micro-batches that chose an expert of a group pass through it together, in pieces (`piece_rows`); what experts give
-- is added to y in their order; `join` closes the layer. Where experts of a group train, a piece is of one of them.
local bs = require "bs"
local program = require "bs.instance.program"
local scopes = require "bs.instance.scopes"

local staged = { handler = {} }
local PIECE_ROWS <const> = 8192
local K <const>, handler = program.kind, staged.handler
local enter, enter_rows = scopes.enter, scopes.enter_rows

-- A sum as ops take it: sums are f32, whatever is computed in.
local function get_sum(inst, key, j) return bs.op.activation(inst.store:get(key, j)) end

--- Routed rows of a piece, at most: all of a micro-batch's, while that is not more than fills any device; never less
-- than it has tokens. It depends on shapes only, since sums of gradients over rows are made piece by piece.
function staged.piece_rows(tokens, chosen) return math.max(tokens, math.min(tokens * chosen, PIECE_ROWS)) end

-- ---- mix and routing -----------------------------------------------------------------------------------

local function mix(inst, p, visit, j)
  local m, keys = inst.spec.model, inst.keys
  local scope <close>, ctx = enter(inst, p, visit, j, false)
  local x = scopes.input(inst, p, visit, j)
  local h, u, r = m.family.stages.mix(m.config, inst.weights.layers[visit.layer].trunk, x, ctx)
  local check = visit.kind == K.mix and scopes.remember or scopes.compare
  check(p, scope, visit.layer, j)
  inst.store:put(keys.mix_h, j, h)
  inst.store:put(keys.mix_u, j, u)
  inst.store:put(keys.mix_r, j, r)
end

handler[K.mix] = function(inst, p, visit)
  for j = 0, p.micros - 1 do
    mix(inst, p, visit, j)
    inst.store:zero(inst.keys.y, j)
  end
  inst.routing:sort()
end

-- Where each expert's rows begin in the order of experts: the only wait of a layer, in its forward half. A dry run
-- computes nothing that could be routed; one full piece of one expert is what any piece takes.
local function offsets(inst, p, layer)
  local known = p.offsets[layer]
  if not known and inst.dry then
    known = { 0 }
    for e = 1, inst.spec.model.layers[layer].experts do known[e + 1] = inst.piece end
  end
  known = known or inst.routing:offsets()
  p.offsets[layer] = known
  return known
end

-- fn(w, begin, rows, name) for every piece of the rows of a visit's group: its weights, its rows and what it is called.
-- Pieces end at multiples of their capacity, counted over all rows of the layer, and where it is a piece of
-- one expert at its end: the rows that an expert computes together do not depend on the group that it is in.
local function each_piece(inst, p, visit, fn)
  local layer, at = inst.weights.layers[visit.layer], offsets(inst, p, visit.layer)
  local group, most = inst.spec.model.layers[visit.layer].groups[visit.stage], inst.piece
  local function run(w, first, last)
    local begin = at[first + 1]
    while begin < at[last + 2] do
      local rows = math.min((begin // most + 1) * most, at[last + 2]) - begin
      fn(w, begin, rows, first)
      begin = begin + rows
    end
  end
  local all, last = layer.group[visit.stage], group.first + group.n - 1
  if all then return run(all, group.first, last) end
  for e = group.first, last do run(layer.expert[e], e, e) end
end

local function expert(inst, w, x, weight, ctx)
  local m = inst.spec.model
  return m.family.stages.expert(m.config, w, x, weight, ctx)
end

-- ---- forward -------------------------------------------------------------------------------------------

local function join(inst, p, visit)
  local m, keys, store = inst.spec.model, inst.keys, inst.store
  for j = 0, p.micros - 1 do
    local scope <close>, ctx = enter(inst, p, visit, j, false, " join")
    local y = m.family.stages.join(m.config, store:get(keys.mix_h, j), get_sum(inst, keys.y, j), ctx)
    scopes.remember(p, scope, visit.layer, j, "join")
    store:put(keys.h[visit.layer + 1], j, y)
  end
  scopes.observe(inst, p, "hidden", visit.layer + 1)
end

-- The last group of a layer also closes it.
handler[K.experts] = function(inst, p, visit)
  local keys, store, routing = inst.keys, inst.store, inst.routing
  each_piece(inst, p, visit, function(w, begin, rows, name)
    local scope <close>, ctx = enter_rows(inst, p, visit, begin, rows, false)
    local y = expert(inst, w, routing:take_rows(store, keys.mix_u), routing:take_weights(store, keys.mix_r), ctx)
    scopes.remember(p, scope, visit.layer, name, begin)
    routing:add_rows(store, keys.y, y)
  end)
  if visit.stage == #inst.spec.model.layers[visit.layer].groups then join(inst, p, visit) end
end

-- ---- backward ------------------------------------------------------------------------------------------

-- The backward half of a layer begins with its mix without a tape, for what experts read, and with the gradients of
-- join. join is linear in (h, y): its gradients do not depend on their values, so that y is not computed again.
handler[K.remix] = function(inst, p, visit)
  local m, keys, store = inst.spec.model, inst.keys, inst.store
  for j = 0, p.micros - 1 do
    mix(inst, p, visit, j)
    local scope <close>, ctx = enter(inst, p, visit, j, true, " join")
    local h, y = store:get(keys.mix_h, j), get_sum(inst, keys.y, j)
    h:want_grad()
    y:want_grad()
    local out = m.family.stages.join(m.config, h, y, ctx)
    scopes.compare(p, scope, visit.layer, j, "join")
    scope:backward { { out, store:get(keys.g, j) } }
    store:put(keys.mix_dh, j, h:grad())
    store:put(keys.dy, j, y:grad())
    store:zero(keys.mix_du, j)
    store:zero(keys.mix_dr, j)
  end
  inst.routing:sort()
end

handler[K.experts_backward] = function(inst, p, visit)
  local keys, store, routing = inst.keys, inst.store, inst.routing
  each_piece(inst, p, visit, function(w, begin, rows, name)
    local scope <close>, ctx = enter_rows(inst, p, visit, begin, rows, true)
    local x, weight = routing:take_rows(store, keys.mix_u), routing:take_weights(store, keys.mix_r)
    local dy = routing:take_rows(store, keys.dy)
    x:want_grad()
    weight:want_grad()
    local y = expert(inst, w, x, weight, ctx)
    scopes.compare(p, scope, visit.layer, name, begin)
    scope:backward { { y, dy } }
    routing:add_rows(store, keys.mix_du, x:grad())
    routing:add_weights(store, keys.mix_dr, weight:grad())
  end)
end

handler[K.mix_backward] = function(inst, p, visit)
  local m, keys, store = inst.spec.model, inst.keys, inst.store
  for j = 0, p.micros - 1 do
    local scope <close>, ctx = enter(inst, p, visit, j, true)
    local x = store:get(keys.h[visit.layer], j)
    local wanted = p.input_gradient(visit.layer)
    if wanted then x:want_grad() end
    local h, u, r = m.family.stages.mix(m.config, inst.weights.layers[visit.layer].trunk, x, ctx)
    scopes.compare(p, scope, visit.layer, j)
    scope:backward { { h, store:get(keys.mix_dh, j) }, { u, get_sum(inst, keys.mix_du, j) },
                     { r, get_sum(inst, keys.mix_dr, j) } }
    if wanted then store:put(keys.g, j, x:grad()) end
  end
end

return staged
