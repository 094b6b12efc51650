-- SPDX-License-Identifier: Apache-2.0
--- The rotary embeddings of a model on an engine.
local bs = require "bs"
local rope = require "bs.nn.rope"

local rotations = {}

--- By name ("default" where the config has one only): {short, long, most}. `long` is for forwards whose longest row
-- has more than `most` tokens; where the frequencies do not depend on the length both are one.
function rotations.open(engine, config)
  local out, names = {}, {}
  local function open(spec, longest)
    local f, scaling = rope.inv_freq(spec, longest)
    return bs.rope.new(engine, bs.array.new("f32", { #f }, f), scaling, config.rope_style or "half")
  end
  local specs = config.ropes or { default = config.rope }
  for name in pairs(specs) do names[#names + 1] = name end
  table.sort(names) -- the order of allocation must not depend on a hash
  for _, name in ipairs(names) do
    local spec, most = specs[name], rope.switch(specs[name])
    local short = open(spec, 1)
    out[name] = { short = short, long = most and open(spec, most + 1) or short, most = most or math.huge }
  end
  return out
end

return rotations
