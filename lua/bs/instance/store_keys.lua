-- SPDX-License-Identifier: Apache-2.0
--- The keys of an instance's store: tensors that outlive the scope of a (visit, micro-batch).
local store_keys = {}

--- The list that bs.store.open and bs.store.bytes take, and its names: a table name -> number of the key, counted
-- from 0, in which h is a table layer -> number. boundaries: "device" or "host", where the inputs of layers wait for
-- the backward pass. keep: the inputs of so many upper layers stay on the device whatever `boundaries` says, because
-- their kept activations refer to them.
function store_keys.list(spec, boundaries, keep)
  local m, c, list, key = spec.model, spec.model.config, {}, { h = {} }
  local function add(name, channels, stay, dtype)
    list[#list + 1] = { name = name, channels = channels, dtype = dtype or m.compute, stay = stay }
    return #list - 1
  end
  -- h[i] is the input of layer i, h[layers] the last output. Below the lowest trained layer there is no backward
  -- pass, so that an input is only passed on.
  for i = 0, c.layers do
    local stay = "pass"
    if i >= spec.lowest and i < c.layers then
      stay = boundaries == "host" and i < c.layers - keep and "host" or "device"
    end
    key.h[i] = add("h." .. i, c.channels, stay)
  end
  key.g = add("g", c.channels, "device") -- the gradient that travels down
  if m.family.stages then
    local hand = { h = c.channels, u = c.channels, r = m.family.routing(c).chosen }
    -- Sums over experts are f32, whatever is computed in: y, and the gradients of u and r.
    local sums = { u = "f32", r = "f32" }
    for _, name in ipairs { "h", "u", "r" } do
      key["mix_" .. name] = add("mix." .. name, hand[name], "device")
      key["mix_d" .. name] = add("mix.d" .. name, hand[name], "device", sums[name])
    end
    key.y, key.dy = add("y", c.channels, "device", "f32"), add("dy", c.channels, "device")
  end
  return list, key
end

return store_keys
