-- SPDX-License-Identifier: Apache-2.0
--- Visits of staged layers: `mix` hands (h, u, r) on, experts add to y in their order, `join` closes the layer.
-- There is a scope for each expert, so that a group's size changes no sum.
local bs = require "bs"
local program = require "bs.instance.program"
local scopes = require "bs.instance.scopes"

local staged = { handler = {} }
local K <const>, handler = program.kind, staged.handler
local enter = scopes.enter

-- A sum as ops take it: sums are f32, whatever is computed in.
local function get_sum(inst, key, j) return bs.op.activation(inst.store:get(key, j)) end

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
end

local function group_of(inst, visit) return inst.spec.model.layers[visit.layer].groups[visit.stage] end

local function expert(inst, visit, e, u, r, ctx)
  local m = inst.spec.model
  return m.family.stages.expert(m.config, inst.weights.layers[visit.layer].expert[e], e, u, r, ctx)
end

-- The last group of a layer also closes it.
handler[K.experts] = function(inst, p, visit)
  local m, keys, store, group = inst.spec.model, inst.keys, inst.store, group_of(inst, visit)
  for j = 0, p.micros - 1 do
    for e = group.first, group.first + group.n - 1 do
      local scope <close>, ctx = enter(inst, p, visit, j, false, " " .. e)
      local y = expert(inst, visit, e, store:get(keys.mix_u, j), store:get(keys.mix_r, j), ctx)
      scopes.remember(p, scope, visit.layer, j, e)
      bs.op.accumulate(store:get(keys.y, j), y)
    end
  end
  if visit.stage ~= #m.layers[visit.layer].groups then return end
  for j = 0, p.micros - 1 do
    local scope <close>, ctx = enter(inst, p, visit, j, false, " join")
    local y = m.family.stages.join(m.config, store:get(keys.mix_h, j), get_sum(inst, keys.y, j), ctx)
    scopes.remember(p, scope, visit.layer, j, "join")
    store:put(keys.h[visit.layer + 1], j, y)
  end
  scopes.observe(inst, p, "hidden", visit.layer + 1)
end

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
end

handler[K.experts_backward] = function(inst, p, visit)
  local keys, store, group = inst.keys, inst.store, group_of(inst, visit)
  for j = 0, p.micros - 1 do
    for e = group.first, group.first + group.n - 1 do
      local scope <close>, ctx = enter(inst, p, visit, j, true, " " .. e)
      local u, r = store:get(keys.mix_u, j), store:get(keys.mix_r, j)
      u:want_grad()
      r:want_grad()
      local y = expert(inst, visit, e, u, r, ctx)
      scopes.compare(p, scope, visit.layer, j, e)
      scope:backward { { y, store:get(keys.dy, j) } }
      bs.op.accumulate(store:get(keys.mix_du, j), u:grad())
      bs.op.accumulate(store:get(keys.mix_dr, j), r:grad())
    end
  end
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
