-- SPDX-License-Identifier: Apache-2.0
--- What all visits share: the scope of a (visit, micro-batch), the context that a stage sees, the input of a layer,
-- and the promise that a recompute repeats its forward.
local bs = require "bs"
local program = require "bs.instance.program"

local scopes = {}

-- ---- input of a layer ----------------------------------------------------------------------------------

--- Rows of the embedding, from the host into the input of layer 0. Gathered one micro-batch at a time, while the
-- device computes the one before.
function scopes.gather(inst, p, j)
  if inst.spec.model.embed or p.gathered[j] then return end
  inst.embedding:gather(inst.store, inst.keys.h[0], j, inst.spec.model.embed_scale)
  p.gathered[j] = true
end

--- The input of a layer's forward visit.
function scopes.input(inst, p, visit, j)
  if visit.layer == 0 then scopes.gather(inst, p, j) end
  return inst.store:get(inst.keys.h[visit.layer], j)
end

--- Show a hidden state to the observer of the pass.
function scopes.observe(inst, p, kind, layer)
  if not p.observe then return end
  for j = 0, p.micros - 1 do p.observe(kind, layer, j, inst.store:read(inst.keys.h[layer], j)) end
end

-- ---- scope and context ---------------------------------------------------------------------------------

-- Attention that looks at the cache. on_attend: a dry run learns from the first layers what a cache has to hold.
local function attend_cached(inst, p, ctx)
  return function(q, k, v, cfg)
    if inst.on_attend then inst.on_attend(ctx.layer, cfg.kv_heads * cfg.head_dim) end
    return bs.op.attention(q, k, v, cfg, p.cache, ctx.layer)
  end
end

-- What stages see of micro-batch j beside their arguments. One for all visits of a pass; only `layer` changes.
-- A rotation whose frequencies depend on the length goes by the longest row of the micro-batch, for all rows, or by
-- what the pass says.
local function context(inst, p, j)
  local longest = p.lengths and p.lengths[j + 1] or inst.batch:longest(j)
  local function rotation(name)
    local r = inst.rotations[name or "default"]
    return longest > r.most and r.long or r.short
  end
  local ctx = {
    micro = j, attend = bs.op.attention,
    rope = function(x, heads, name) return bs.op.rope(x, rotation(name), heads) end,
    norm_rope = function(x, w, eps, heads, name, one_plus)
      return bs.op.norm_rope(x, w, eps, one_plus or false, rotation(name), heads)
    end,
    scope = { batch = inst.batch, micro = j, train = p.train, step = p.step },
  }
  if inst.routing then
    local m = inst.spec.model
    ctx.route = function(logits, bias)
      local o = m.family.routing(m.config)
      return bs.op.route(logits, inst.routing, {
        chosen = o.chosen, kind = o.kind, groups = o.groups, kept = o.kept, renorm = o.renorm, scale = o.scale,
        bias = bias,
      })
    end
  end
  if p.cache or inst.on_attend then ctx.attend = attend_cached(inst, p, ctx) end
  return ctx
end

--- Open the scope of a (visit, micro-batch); tape: for a backward pass; suffix: of its label in messages. Returns it
-- and the context of the micro-batch.
function scopes.enter(inst, p, visit, j, tape, suffix)
  if p.prepare then p.prepare(visit.layer, j) end
  local ctx = p.context[j]
  if not ctx then
    ctx = context(inst, p, j)
    p.context[j] = ctx
  end
  local o = ctx.scope
  o.label = ("layer %d %s%s, micro-batch %d"):format(visit.layer, program.kind_name[visit.kind], suffix or "", j)
  o.tape, ctx.layer = tape, visit.layer
  return inst.engine:scope(o), ctx
end

--- Open the scope of routed rows [begin, begin + rows). Returns it and the context of the stage of experts.
function scopes.enter_rows(inst, p, visit, begin, rows, tape)
  if p.prepare then p.prepare(visit.layer, 0) end
  local scope = inst.engine:scope {
    routing = inst.routing, begin = begin, rows = rows, tape = tape, train = p.train, step = p.step,
    label = ("layer %d %s, rows %d to %d"):format(visit.layer, program.kind_name[visit.kind], begin, begin + rows - 1),
  }
  return scope, { layer = visit.layer }
end

-- ---- recompute -----------------------------------------------------------------------------------------

--- Name of a stage's work on a micro-batch; part: "join", or where a
-- piece begins; j is its expert then.
function scopes.work_name(layer, j, part)
  local name = layer .. "/" .. j
  return part and name .. "/" .. part or name
end

--- Remember which ops a stage's forward has issued. Returns the name of the work.
function scopes.remember(p, scope, layer, j, part)
  local name = scopes.work_name(layer, j, part)
  p.op_hash[name] = scope:hash()
  return name
end

--- A stage must be pure: its recompute issues the ops of its forward, or gradients would be of something else.
function scopes.compare(p, scope, layer, j, part)
  if p.op_hash[scopes.work_name(layer, j, part)] == scope:hash() then return end
  bs.fail("error", "layer %d: the recompute of this stage issued other ops than its forward; a stage must be a pure "
    .. "function of (config, weights, x, ctx)", layer)
end

return scopes
