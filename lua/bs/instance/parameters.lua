-- SPDX-License-Identifier: Apache-2.0
--- The trained parameters of an instance: matrices of adapters, or every weight of the model.
local bs = require "bs"
local lora = require "bs.model.lora"
local model = require "bs.model.model"

local parameters = {}

-- Every weight as a parameter: name -> id. Of a model that can be updated also where its values are, a list of
-- {id, block, tensor}: the addresses are not known before a pass has filled the homes.
local function register_base(m, params)
  local base, homes = {}, {}
  local function add(name, rows, cols, block, tensor)
    if base[name] then return end -- a tied head is the embedding
    local id = params:add_base(name, rows, cols)
    base[name] = id
    if m.updatable then
      params:update_base(id, rows, cols)
      homes[#homes + 1] = { id = id, block = block, tensor = tensor }
    end
  end
  local function add_part(part)
    for _, name in ipairs(part.order) do
      local t, rows = part.tensor[name], 1
      local dims = t.transposed and { t.dims[2], t.dims[1] } or t.dims -- as it lies
      for i = 1, #dims - 1 do rows = rows * dims[i] end
      add(part.prefix .. name, rows, dims[#dims], part.block, t.id)
    end
  end
  model.each_part(m, add_part)
  add_part(m.norm)
  local c, embed, tile = m.config, m.embed or {}, m.tiles[1]
  add(m.family.embed.name, c.vocab, c.channels, embed.block, embed.id)
  add(m.head_name, c.vocab, c.channels, tile.block, tile.id)
  if m.family.head.bias then add(m.family.head.bias, c.vocab, 1, tile.block, tile.bias) end
  return base, homes
end

--- Make the parameters of a spec on an engine. Returns what weights.bind takes, {params, adapter, base}, and the homes
-- of weights that are updated.
function parameters.open(spec, engine)
  local params = bs.params.open(engine)
  local base, homes = {}, nil
  if spec.trainable == "none" then params:freeze() end
  if spec.trainable == "base" then base, homes = register_base(spec.model, params) end
  local trainer = { params = params, adapter = lora.register(spec.model, spec.adapters, params), base = base }
  params:seal()
  return trainer, homes
end

--- Their first values: those of the adapter that the spec names, or Kaiming-uniform A and B = 0. holder: has
-- `params` and `adapter` of `open`, as an instance does.
function parameters.load(spec, holder)
  local params = holder.params
  for _, a in ipairs(spec.adapters) do
    local id = holder.adapter[a.full]
    if spec.saved then
      local first, second = spec.saved:read(a.full)
      params:set(id.a, first)
      params:set(id.b, second)
      first:close() -- an adapter is not in memory twice
      second:close()
    else
      params:init_kaiming(id.a, spec.seed)
    end
  end
end

return parameters
