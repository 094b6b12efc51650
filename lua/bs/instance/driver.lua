-- SPDX-License-Identifier: Apache-2.0
--- The step loop. It takes visits from the stream in plan order, runs every micro-batch of the step in
-- each, and hands boundaries from one visit to the next. It issues ops and never sees a slot, an event
-- or a transfer. Handlers get (job, run, visit): job owns the objects, run is this pass.
local bs = require "bs"
local program = require "bs.instance.program"

local driver = {}
local K, kind_name = program.kind, program.kind_name

-- The input of layer 0: embedding rows from the host, gathered while the device computes the micro-batch before.
local function gather(job, run, j)
  if not job.model.embed and not run.gathered[j] then
    job.rows:gather(job.store, job.keys.h[0], j, job.model.embed_scale)
    run.gathered[j] = true
  end
end

-- The input of a layer's forward visit.
local function input(job, run, v, j)
  if v.layer == 0 then gather(job, run, j) end
  return job.store:get(job.keys.h[v.layer], j)
end

-- What stages see of micro-batch j beside their arguments. One for all visits of a pass; only `layer` changes.
-- A rotation whose frequencies depend on the length goes by the longest row of the micro-batch, for all rows.
local function context(job, run, j)
  local longest = job.batch:longest(j)
  local function rotation(name)
    local r = job.ropes[name or "default"]
    return longest > r.most and r.long or r.short
  end
  local ctx = {
    micro = j, attend = bs.op.attention,
    rope = function(x, heads, name) return bs.op.rope(x, rotation(name), heads) end,
    norm_rope = function(x, w, eps, heads, name, one_plus)
      return bs.op.norm_rope(x, w, eps, one_plus or false, rotation(name), heads)
    end,
    scope = { batch = job.batch, micro = j, train = run.train, step = run.step },
  }
  if run.cache or job.kv_seen then
    ctx.attend = function(q, k, v, cfg)
      if job.kv_seen then job.kv_seen[ctx.layer + 1] = cfg.kv_heads * cfg.head_dim end
      return bs.op.attention(q, k, v, cfg, run.cache, ctx.layer)
    end
  end
  return ctx
end

-- Scope of one (visit, micro-batch), and its context.
local function enter(job, run, v, j, tape, suffix)
  if run.prepare then run.prepare(v.layer, j) end
  local ctx = run.contexts[j]
  if not ctx then
    ctx = context(job, run, j)
    run.contexts[j] = ctx
  end
  local o = ctx.scope
  o.label = ("layer %d %s%s, micro-batch %d"):format(v.layer, kind_name[v.kind], suffix or "", j)
  o.tape, ctx.layer = tape, v.layer
  return job.engine:scope(o), ctx
end

-- A stage must be pure: its recompute issues the same ops as its forward did.
local function remember(run, key, scope) run.hashes[key] = scope:hash() end

local function compare(run, key, scope, v)
  if run.hashes[key] ~= scope:hash() then
    bs.fail(1, "layer %d: the recompute of this stage issued other ops than its forward; a stage "
      .. "must be a pure function of (config, weights, x, ctx)", v.layer)
  end
end

local function observe(run, job, kind, layer)
  if not run.observe then return end
  for j = 0, run.micros - 1 do run.observe(kind, layer, j, job.store:read(job.keys.h[layer], j)) end
end

-- A sum of a staged layer as ops take it: sums are f32 whatever is computed in.
local function get_sum(job, key, j) return bs.op.activation(job.store:get(key, j)) end

local handler = {}

handler[K.embed] = function(job, run, v)
  local scale = job.model.embed_scale
  for j = 0, run.micros - 1 do
    local _ <close> = enter(job, run, v, j, false)
    local x = bs.op.embed(job.engine, job.weights.embed)
    job.store:put(job.keys.h[0], j, scale ~= 1 and x * scale or x)
  end
  observe(run, job, "hidden", 0)
end

handler[K.forward] = function(job, run, v)
  local fam, c, w, h = job.model.family, job.model.config, job.weights.layers[v.layer].mix, job.keys.h
  local keep = run.train and v.layer >= job.keep_from
  for j = 0, run.micros - 1 do
    local scope <close>, ctx = enter(job, run, v, j, keep)
    local x = input(job, run, v, j)
    if keep and run.input_gradient(v.layer) then x:want_grad() end
    local y = fam.layer(c, w, x, ctx)
    remember(run, v.layer .. "/" .. j, scope)
    job.store:put(h[v.layer + 1], j, y)
    if keep then run.kept[v.layer .. "/" .. j] = scope:keep(x, y) end
  end
  observe(run, job, "hidden", v.layer + 1)
end

-- The layer once more with a tape, for its backward pass: its input and its output.
local function recompute(job, run, v, j, scope)
  local x = job.store:get(job.keys.h[v.layer], j)
  if run.input_gradient(v.layer) then x:want_grad() end
  local y = job.model.family.layer(job.model.config, job.weights.layers[v.layer].mix, x, run.contexts[j])
  compare(run, v.layer .. "/" .. j, scope, v)
  return x, y
end

-- The scope of a layer's backward pass; with the input and the output where the forward visit has kept it.
local function enter_backward(job, run, v, j)
  local key = v.layer .. "/" .. j
  local kept = run.kept[key]
  if not kept then return (enter(job, run, v, j, true)) end
  run.kept[key] = nil
  return kept:resume()
end

handler[K.backward] = function(job, run, v)
  local keys = job.keys
  for j = 0, run.micros - 1 do
    local scope <close>, x, y = enter_backward(job, run, v, j)
    if not x then x, y = recompute(job, run, v, j, scope) end
    scope:backward { { y, job.store:get(keys.g, j) } }
    if run.input_gradient(v.layer) then job.store:put(keys.g, j, x:grad()) end
  end
end

-- Staged layers: mix hands (h, u, r) on; experts add to y in expert order; join closes the layer.
local function mix_forward(job, run, v, j, scope_key)
  local fam, c, w, keys = job.model.family, job.model.config, job.weights.layers[v.layer].mix, job.keys
  local scope <close>, ctx = enter(job, run, v, j, false)
  local h, u, r = fam.stages.mix(c, w, input(job, run, v, j), ctx)
  if v.kind == K.mix then remember(run, scope_key, scope) else compare(run, scope_key, scope, v) end
  job.store:put(keys.mix_h, j, h)
  job.store:put(keys.mix_u, j, u)
  job.store:put(keys.mix_r, j, r)
end

handler[K.mix] = function(job, run, v)
  for j = 0, run.micros - 1 do
    mix_forward(job, run, v, j, v.layer .. "/" .. j)
    job.store:zero(job.keys.y, j)
  end
end

local function group_of(job, v) return job.model.layers[v.layer].groups[v.stage] end

handler[K.experts] = function(job, run, v)
  local fam, c, keys = job.model.family, job.model.config, job.keys
  local layer, group = job.model.layers[v.layer], group_of(job, v)
  for j = 0, run.micros - 1 do
    for e = group.first, group.first + group.n - 1 do
      local scope <close>, ctx = enter(job, run, v, j, false, " " .. e)
      local w = job.weights.layers[v.layer].expert[e]
      local y = fam.stages.expert(c, w, e, job.store:get(keys.mix_u, j), job.store:get(keys.mix_r, j), ctx)
      remember(run, v.layer .. "/" .. j .. "/" .. e, scope)
      bs.op.accumulate(job.store:get(keys.y, j), y)
    end
  end
  if v.stage ~= #layer.groups then return end
  for j = 0, run.micros - 1 do
    local scope <close>, ctx = enter(job, run, v, j, false, " join")
    local y = fam.stages.join(c, job.store:get(keys.mix_h, j), get_sum(job, keys.y, j), ctx)
    remember(run, v.layer .. "/" .. j .. "/join", scope)
    job.store:put(keys.h[v.layer + 1], j, y)
  end
  observe(run, job, "hidden", v.layer + 1)
end

-- join is linear in (h, y): its gradients do not depend on their values, so y need not be kept.
handler[K.remix] = function(job, run, v)
  local fam, c, keys = job.model.family, job.model.config, job.keys
  for j = 0, run.micros - 1 do
    mix_forward(job, run, v, j, v.layer .. "/" .. j)
    local scope <close>, ctx = enter(job, run, v, j, true, " join")
    local h, y = job.store:get(keys.mix_h, j), get_sum(job, keys.y, j)
    h:want_grad()
    y:want_grad()
    local out = fam.stages.join(c, h, y, ctx)
    compare(run, v.layer .. "/" .. j .. "/join", scope, v)
    scope:backward { { out, job.store:get(keys.g, j) } }
    job.store:put(keys.mix_dh, j, h:grad())
    job.store:put(keys.dy, j, y:grad())
    job.store:zero(keys.mix_du, j)
    job.store:zero(keys.mix_dr, j)
  end
end

-- One scope per expert: sums over experts run in expert order whatever the group size.
handler[K.experts_backward] = function(job, run, v)
  local fam, c, keys, group = job.model.family, job.model.config, job.keys, group_of(job, v)
  for j = 0, run.micros - 1 do
    for e = group.first, group.first + group.n - 1 do
      local scope <close>, ctx = enter(job, run, v, j, true, " " .. e)
      local u, r = job.store:get(keys.mix_u, j), job.store:get(keys.mix_r, j)
      u:want_grad()
      r:want_grad()
      local y = fam.stages.expert(c, job.weights.layers[v.layer].expert[e], e, u, r, ctx)
      compare(run, v.layer .. "/" .. j .. "/" .. e, scope, v)
      scope:backward { { y, job.store:get(keys.dy, j) } }
      bs.op.accumulate(job.store:get(keys.mix_du, j), u:grad())
      bs.op.accumulate(job.store:get(keys.mix_dr, j), r:grad())
    end
  end
end

handler[K.mix_backward] = function(job, run, v)
  local fam, c, w, keys = job.model.family, job.model.config, job.weights.layers[v.layer].mix, job.keys
  for j = 0, run.micros - 1 do
    local scope <close>, ctx = enter(job, run, v, j, true)
    local x = job.store:get(keys.h[v.layer], j)
    local want = run.input_gradient(v.layer)
    if want then x:want_grad() end
    local h, u, r = fam.stages.mix(c, w, x, ctx)
    compare(run, v.layer .. "/" .. j, scope, v)
    scope:backward { { h, job.store:get(keys.mix_dh, j) }, { u, get_sum(job, keys.mix_du, j) },
                     { r, get_sum(job, keys.mix_dr, j) } }
    if want then job.store:put(keys.g, j, x:grad()) end
  end
end

local function final_norm(job, x)
  return job.model.final_norm(job.model.config, job.weights.head, x)
end

handler[K.norm] = function(job, run, v)
  local keys = job.keys
  job.head:begin(run.head_mode, run.count)
  for j = 0, run.micros - 1 do
    local _ <close> = enter(job, run, v, j, false)
    local x = final_norm(job, job.store:get(keys.h[v.layer], j))
    if run.head_mode == "last" then x = bs.op.last(x)
    elseif run.head_mode ~= "logits" then x = bs.op.labelled(x) end
    job.head:put(j, x)
  end
end

handler[K.tile] = function(job, run, v)
  local tile, w = job.model.tiles[v.stage], job.weights.tiles[v.stage]
  for j = 0, run.micros - 1 do job.head:tile(j, w.weight, tile.first, w.bias) end
end

handler[K.tile_gradient] = function(job, run, v)
  local tile, w = job.model.tiles[v.stage], job.weights.tiles[v.stage]
  for j = 0, run.micros - 1 do job.head:tile_grad(j, w.weight, tile.first, w.bias) end
end

handler[K.norm_backward] = function(job, run, v)
  local c, keys = job.model.config, job.keys
  for j = 0, run.micros - 1 do
    local scope <close> = enter(job, run, v, j, true)
    local x = job.store:get(keys.h[v.layer], j)
    if run.lowest < c.layers then x:want_grad() end
    local y = bs.op.labelled(final_norm(job, x))
    scope:backward { { y, job.head:finish(j) } }
    if run.lowest < c.layers then
      local g = x:grad()
      if g then job.store:put(keys.g, j, g) else job.store:zero(keys.g, j) end
    end
  end
end

-- The gradient of half the mean square of h is h over the number of its entries.
handler[K.turn] = function(job, run, v)
  local keys, entries = job.keys, 0
  for j = 0, run.micros - 1 do entries = entries + job.batch:tokens(j) * job.model.config.channels end
  for j = 0, run.micros - 1 do
    local _ <close> = enter(job, run, v, j, false)
    job.store:put(keys.g, j, bs.op.scale(job.store:get(keys.h[v.layer], j), 1 / entries))
  end
end

local descends = { [K.norm_backward] = true, [K.turn] = true, [K.backward] = true, [K.mix_backward] = true }

--- Run one pushed segment of n visits. run: {micros, count (labelled tokens), train, step, head_mode,
-- lowest, input_gradient(layer) -> bool, observe, ahead = fn called before the last visits}.
function driver.segment(job, run, n)
  run.hashes, run.contexts, run.kept, run.gathered = {}, {}, {}, {}
  if run.observe and not job.model.embed then
    for j = 0, run.micros - 1 do gather(job, run, j) end
    observe(run, job, "hidden", 0)
  end
  for i = 1, n do
    local v = job.stream:next()
    -- Boundaries that left the device come back one visit ahead.
    if descends[v.kind] and v.layer - 1 >= run.lowest then job.store:fetch(job.keys.h[v.layer - 1]) end
    handler[v.kind](job, run, v)
    if i == n - run.early and run.ahead then run.ahead() end
  end
  job.stream:end_visit()
  if run.head_mode == "loss" then
    for j = 0, run.micros - 1 do job.head:finish(j) end
  end
end

return driver
