-- SPDX-License-Identifier: Apache-2.0
--- Programs: the visits of a step in their order, known before it starts. A visit names a block and
-- what is computed in it (`kind`, see visits.lua), for all micro-batches at once. Embeddings are gathered on the host
-- before the first visit, but where they can be updated: there the table is a block (`embed`).
local program = {}

--- Kinds of visits. `remix` is a mix forward without tape in the backward half of a staged layer; `turn`
-- ends the forward half of a stack without head.
program.kind = {
  forward = 1, backward = 2, mix = 3, experts = 4, remix = 5, experts_backward = 6, mix_backward = 7,
  norm = 8, tile = 9, tile_gradient = 10, norm_backward = 11, embed = 12, turn = 13,
}
local K = program.kind
program.kind_name = {}
for name, n in pairs(K) do program.kind_name[n] = name end

local function visit(list, block, kind, layer, stage)
  list[#list + 1] = { block = block, kind = kind, layer = layer, stage = stage or 0 }
end

local function forward_layers(list, m)
  if m.embed then visit(list, m.embed.block, K.embed, 0) end
  for i = 0, m.config.layers - 1 do
    local layer = m.layers[i]
    if layer.groups then
      visit(list, layer.trunk.block, K.mix, i)
      for g, group in ipairs(layer.groups) do visit(list, group.block, K.experts, i, g) end
    else
      visit(list, layer.trunk.block, K.forward, i)
    end
  end
end

local function head(list, m)
  visit(list, m.norm.block, K.norm, m.config.layers)
  for t, tile in ipairs(m.tiles) do visit(list, tile.block, K.tile, m.config.layers, t) end
end

local function backward_layers(list, m, lowest)
  for i = m.config.layers - 1, lowest, -1 do
    local layer = m.layers[i]
    if layer.groups then
      visit(list, layer.trunk.block, K.remix, i)
      for g, group in ipairs(layer.groups) do visit(list, group.block, K.experts_backward, i, g) end
      visit(list, layer.trunk.block, K.mix_backward, i)
    else
      visit(list, layer.trunk.block, K.backward, i)
    end
  end
end

--- Forward walk with the head: evaluation, logits. stack: the layers alone.
function program.walk(m, stack)
  local list = {}
  forward_layers(list, m)
  if not stack then head(list, m) end
  return list
end

--- Training step: forward, head, backward down to layer `lowest` (config.layers: none).
-- head_gradient: the tiles are read a second time for the gradient of the head itself.
function program.train(m, lowest, head_gradient)
  local list = program.walk(m)
  if head_gradient then
    for t, tile in ipairs(m.tiles) do
      visit(list, tile.block, K.tile_gradient, m.config.layers, t)
    end
  end
  visit(list, m.norm.block, K.norm_backward, m.config.layers)
  backward_layers(list, m, lowest)
  return list
end

--- Training step of the layers alone: the loss is half the mean square of the last hidden state, so that
-- the gradient needs no head. For measurements.
function program.stack(m, lowest)
  local list = program.walk(m, true)
  visit(list, m.norm.block, K.turn, m.config.layers)
  backward_layers(list, m, lowest)
  return list
end

return program
