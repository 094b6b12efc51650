-- SPDX-License-Identifier: Apache-2.0
--- Public name: what a family file is written with. Nothing here knows a particular family.
local bs = require "bs"
local config = require "bs.nn.config"
local layers = require "bs.nn.layers"
local rope = require "bs.nn.rope"

local nn = {
  -- Reading config.json.
  reader = config.reader, text_config = config.text,
  rope_config = rope.config, inv_freq = rope.inv_freq, rope_switch = rope.switch,
  rope_lengths = rope.lengths,
  -- Ops under short names.
  rmsnorm = bs.op.rmsnorm, glu = bs.op.glu, glu_clamped = bs.op.glu_clamped, act = bs.op.act, softmax = bs.op.softmax,
  columns = bs.op.columns, row_scale = bs.op.row_scale, scale = bs.op.scale,
}

-- Tensors and parts of layers.
for name, part in pairs(layers) do nn[name] = part end

return nn
