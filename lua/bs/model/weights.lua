-- SPDX-License-Identifier: Apache-2.0
--- The weight objects of a model on an engine: what stages see as `w`.
local bs = require "bs"

local weights = {}

-- A linear applies itself when called, and adds to a residual: w.o_proj(x), w.o_proj(x, residual). Everything else
-- of `w` is the weight object.
local linear_mt = { __call = function(self, x, residual) return bs.op.linear(x, self.linear, residual) end }

local function place(tree, path, value)
  local keys = {}
  for key in path:gmatch("[^.]+") do keys[#keys + 1] = key end
  for i = 1, #keys - 1 do
    tree[keys[i]] = tree[keys[i]] or {}
    tree = tree[keys[i]]
  end
  tree[keys[#keys]] = value
end

-- A weight object; `tile`: which rows of the parameter, and where it is a part also of the block's tensor.
local function bind_weight(self, e, block, id, trainer, full, tile)
  local param = trainer and trainer.base[full]
  return bs.weight.new(e, self.manifest, block, id, param and trainer.params, param, tile and tile.first,
    tile and tile.part and tile.n)
end

-- A vector, or {weight, bias} of a norm that has both.
local function bind_norm(self, e, part, weight, bias, trainer)
  local w = bind_weight(self, e, part.block, part.tensor[weight].id, trainer, part.prefix .. weight)
  local b = bias and part.tensor[bias]
  if not b then return w end
  return { weight = w, bias = bind_weight(self, e, part.block, b.id, trainer, part.prefix .. bias) }
end

local function bind_part(self, e, part, trainer)
  local w = {}
  for _, name in ipairs(part.order) do
    local t, full = part.tensor[name], part.prefix .. name
    local base = name:match("^(.*)%.weight$")
    if base and #t.dims == 2 then
      local bias = part.tensor[base .. ".bias"]
      local a = trainer and trainer.adapter[part.prefix .. base] or {}
      local l = bs.linear.new(e, {
        manifest = self.manifest, block = part.block, weight = t.id, bias = bias and bias.id,
        params = trainer and trainer.params, lora_a = a.a, lora_b = a.b, scale = a.scale,
        dropout = a.dropout, transposed = t.transposed, base_weight = trainer and trainer.base[full],
        base_bias = trainer and bias and trainer.base[part.prefix .. base .. ".bias"],
        name = part.prefix .. base,
      })
      place(w, base, setmetatable({ linear = l }, linear_mt))
    elseif not name:match("%.bias$") or not part.tensor[name:gsub("bias$", "weight")] then
      place(w, base or name, bind_norm(self, e, part, name, base and base .. ".bias", trainer))
    end
  end
  return w
end

-- Ids of one tensor in all experts of a group but the first.
local function others(g, name)
  local list = {}
  for e = g.first + 1, g.first + g.n - 1 do list[#list + 1] = g.expert[e].tensor[name].id end
  return list
end

-- The weights of a group of experts as those of one expert, for rows of all of them; nil where one has an adapter or
-- trains, or where an expert is more than linears.
local function bind_group(self, e, g, trainer)
  local w, first = {}, g.expert[g.first]
  for _, part in pairs(trainer and g.expert or {}) do
    for _, name in ipairs(part.order) do
      local full = part.prefix .. name
      if trainer.base[full] or trainer.adapter[full:match("^(.*)%.weight$") or ""] then return nil end
    end
  end
  for _, name in ipairs(first.order) do
    local t, base = first.tensor[name], name:match("^(.*)%.weight$")
    if base and #t.dims == 2 then
      local bias = first.tensor[base .. ".bias"]
      local l = bs.linear.new(e, {
        manifest = self.manifest, block = g.block, weight = t.id, bias = bias and bias.id, transposed = t.transposed,
        grouped = true, first_expert = g.first, next = others(g, name), next_bias = bias and others(g, base .. ".bias"),
        name = first.prefix .. base,
      })
      place(w, base, setmetatable({ linear = l }, linear_mt))
    elseif not name:match("%.bias$") then
      return nil
    end
  end
  return w
end

--- Weight objects on an engine. trainer: nil or {params, adapter = {linear name -> {a, b, scale,
-- dropout}}, base = {tensor name -> parameter}}. Returns {layers[i] = {trunk, expert[e], group[stage]}, head = {norm},
-- tiles[i] = {weight, bias}}; a norm with a bias is {weight, bias}. A group that nothing trains has no experts of its
-- own: its weights are applied to rows of all of them at once.
function weights.bind(self, e, trainer)
  local w = { layers = {}, tiles = {} }
  for i = 0, self.config.layers - 1 do
    local layer = self.layers[i]
    w.layers[i] = { trunk = bind_part(self, e, layer.trunk, trainer), expert = {}, group = {} }
    for stage, g in ipairs(layer.groups or {}) do
      local group = bind_group(self, e, g, trainer)
      w.layers[i].group[stage] = group
      for k, part in pairs(group and {} or g.expert) do w.layers[i].expert[k] = bind_part(self, e, part, trainer) end
    end
  end
  local head, embed = self.family.head, self.embed
  if embed then w.embed = bind_weight(self, e, embed.block, embed.id, trainer, self.family.embed.name) end
  w.head = { norm = bind_norm(self, e, self.norm, head.norm, head.norm_bias, trainer) }
  for i, tile in ipairs(self.tiles) do
    w.tiles[i] = { weight = bind_weight(self, e, tile.block, tile.id, trainer, self.head_name, tile) }
    if tile.bias then
      w.tiles[i].bias = bind_weight(self, e, tile.block, tile.bias, trainer, head.bias, tile)
    end
  end
  return w
end

return weights
