-- SPDX-License-Identifier: Apache-2.0
--- The experts of a layer in one tensor, gate_up_proj [E, 2I, H] and down_proj [E, H, I], and in one tensor for each
-- expert and projection, gate_proj and up_proj [I, H], down_proj [H, I]: values that are held one way, asked for by the
-- names of the other.
local bs = require "bs"

local fused_experts = {}

-- What one tensor holds of each expert, top to bottom, by the names of several families.
local parts = {
  gate_up_proj = { { "gate_proj", "up_proj" }, { "w1", "w3" } },
  down_proj = { { "down_proj" }, { "w2" } },
}

-- A family's checkpoint may call the place otherwise than the model in memory.
local function places(place) return { place, (place:gsub("%.mlp%.experts%.$", ".block_sparse_moe.experts.")) } end

-- The tensors of one expert in a row, or nil where one is missing.
local function expert(values, place, e, names)
  local list = {}
  for i, name in ipairs(names) do list[i] = values[("%s%d.%s.weight"):format(place, e, name)] end
  return #list == #names and list or nil
end

local function fuse(values, place, names)
  local count, rows, columns, bytes = 0, nil, nil, {}
  while true do
    local list = expert(values, place, count, names)
    if not list then break end
    local n = 0
    for _, a in ipairs(list) do
      local dims = a:dims()
      n, columns = n + dims[1], columns or dims[2]
      if dims[2] ~= columns then return nil end
      bytes[#bytes + 1] = a:bytes()
    end
    rows = rows or n
    if n ~= rows then return nil end
    count = count + 1
  end
  return count > 0 and bs.array.new("f32", { count, rows, columns }, table.concat(bytes)) or nil
end

-- Part `part` of `of` of expert e in a tensor of dims [E, rows, columns].
local function slice(a, dims, e, part, of)
  if #dims ~= 3 or e >= dims[1] or dims[2] % of ~= 0 then return nil end
  local rows = dims[2] // of
  local size, from = rows * dims[3] * 4, (e * dims[2] + (part - 1) * rows) * dims[3] * 4
  return bs.array.new("f32", { rows, dims[3] }, a:bytes():sub(from + 1, from + size))
end

--- The value by a name that `values` (name -> f32 array) holds in the other form, or nil. dims(name): the dims of a
-- tensor of three, where `values` have it as two.
function fused_experts.find(values, name, dims)
  local place, kind = name:match("^(.*%.experts%.)(%a[%w_]*)$")
  for _, names in ipairs(parts[kind] or {}) do
    for _, at in ipairs(places(place)) do
      local made = fuse(values, at, names)
      if made then return made end
    end
  end
  local e, part
  place, e, part = name:match("^(.*%.experts%.)(%d+)%.([%w_]+)%.weight$")
  for fused, forms in pairs(place and parts or {}) do
    local whole = values[place .. fused]
    for _, names in ipairs(whole and forms or {}) do
      for i, own in ipairs(names) do
        if own == part then return slice(whole, dims(place .. fused), math.tointeger(e), i, #names) end
      end
    end
  end
end

return fused_experts
