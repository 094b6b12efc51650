-- SPDX-License-Identifier: Apache-2.0
--- What the visits of a program compute and move beside blocks: the numbers that a step is simulated with.
local program = require "bs.instance.program"

local costs = {}
local K <const> = program.kind

-- Of the entries of a visit's weights, as many as a token passes on the average: where tokens are routed evenly, the
-- `chosen` of a layer's experts.
local function active(m, v)
  if v.kind == K.tile or v.kind == K.tile_gradient then return m.tiles[v.stage].n * m.config.channels end
  local layer = m.layers[v.layer]
  if v.kind == K.experts or v.kind == K.experts_backward then
    local group = layer.groups[v.stage]
    return group.expert[group.first].entries * group.n * m.family.routing(m.config).chosen / layer.experts
  end
  return layer and layer.trunk.entries or 0
end

--- FLOPs of each visit of a list where `keep` upper layers are kept: 2 per active parameter and token, twice more for
-- recompute and input gradient; those of an embedding and of norms alone are left out. tokens: of a step; nil: as many
-- as the batch can hold. Returns the list and its sum.
function costs.flops(spec, list, keep, tokens)
  local m, flops, sum = spec.model, {}, 0
  tokens = tokens or spec.batch.tokens * spec.batch.micros
  for i, v in ipairs(list) do
    local factor = 2
    if v.kind == K.backward and v.layer >= m.config.layers - keep then factor = 2
    elseif v.kind == K.backward or v.kind == K.experts_backward or v.kind == K.mix_backward then factor = 6
    elseif v.kind == K.tile then factor = 4
    elseif v.kind == K.embed then factor = 0 end
    flops[i] = factor * active(m, v) * tokens
    sum = sum + flops[i]
  end
  return flops, sum
end

--- Bytes of layer inputs that come back over the link before each visit of a list, where they wait on the host; those
-- of kept layers stay on the device.
function costs.returns(spec, list, keep)
  local m, bytes = spec.model, {}
  local each = spec.batch.micros * spec.batch.tokens * m.config.channels * (m.compute == "bf16" and 2 or 4)
  for i, v in ipairs(list) do
    local back = v.kind == K.backward or v.kind == K.remix
    bytes[i] = back and v.layer < m.config.layers - keep and each or 0
  end
  return bytes
end

return costs
