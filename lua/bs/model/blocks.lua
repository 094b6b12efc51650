-- SPDX-License-Identifier: Apache-2.0
--- How a checkpoint is cut into blocks: which tensors form a layer, a stage, a group of experts, a tile of the head.
-- The cut depends on the model's shapes only, never on a budget. `self` is the model that is being opened.
local bs = require "bs"
local checkpoint = require "bs.model.checkpoint"
local head = require "bs.model.head"

local blocks = {}

local GROUP_ENTRIES <const> = 128 << 20 -- 256 MiB of bf16

-- The tensor of the file that a spec means, behind `prefix`: its entry, whether it lies transposed, and where it is
-- packed the entry of its scales. With spec.stored it holds a slice for each of at.count.
local function find_tensor(self, spec, at)
  local name, count = at.prefix .. (spec.stored or spec.name), spec.stored and at.count
  if spec.packed and not self.checkpoint.tensors[name] then
    local values, scales = checkpoint.packed(self.checkpoint, name, spec.dims, count, spec.packed)
    return values, false, scales
  end
  return checkpoint.slices(self.checkpoint, name, spec.dims, count, spec.transposed)
end

-- Returns its id and whether it lies transposed.
local function add_tensor(self, block, spec, at)
  local m, t, transposed, scales = self.manifest, find_tensor(self, spec, at)
  local full, count = at.name .. spec.name, spec.stored and at.count or 1
  local function place(x) return { m:file(x.path), x.offset + (spec.stored and at.index or 0) * (x.bytes // count) } end
  self.read[t.name] = true
  if scales then self.read[scales.name] = true end
  if t.dtype ~= "f32" then self.not_f32 = self.not_f32 or t.name end
  if scales then return m:packed(block, full, spec.packed, spec.dims, place(t), place(scales)), false end
  local dims, to = transposed and { spec.dims[2], spec.dims[1] } or spec.dims, place(t)
  return m:tensor(block, full, t.dtype, dims, to[1], to[2]), transposed
end

-- Entries of the weights of a part.
local function entries_of(specs)
  local n = 0
  for _, spec in ipairs(specs) do
    local each = 1
    for _, d in ipairs(spec.dims) do each = each * d end
    n = n + each
  end
  return n
end

-- One part of a layer (its trunk, one expert): where its tensors ended up. at: {prefix = of the names of tensors in the
-- file, name = before those of the part, index and count where stored tensors hold one slice for each of so many}.
local function add_part(self, block, at, specs)
  local part = { block = block, prefix = at.name, tensor = {}, order = {}, entries = entries_of(specs) }
  for _, spec in ipairs(specs) do
    local id, transposed = add_tensor(self, block, spec, at)
    part.tensor[spec.name] = {
      id = id, dims = spec.dims, transposed = transposed, stored = spec.stored and at.prefix .. spec.stored,
    }
    part.order[#part.order + 1] = spec.name
  end
  return part
end

local function trunk_at(self, i)
  local prefix = self.family.prefix(i)
  return { prefix = prefix, name = prefix }
end

-- Tensors of an expert of its own begin with expert_prefix(i, e); slices are of tensors of the layer.
local function expert_at(self, i, e, count, specs)
  local name = self.family.expert_prefix(i, e)
  return { prefix = specs[1].stored and self.family.prefix(i) or name, name = name, index = e, count = count }
end

local function add_dense(self, i)
  local fam, c = self.family, self.config
  local block = self.manifest:block("layers." .. i, "layer")
  return { trunk = add_part(self, block, trunk_at(self, i), fam.tensors(c, i)) }
end

-- Experts are grouped so that one launch serves enough rows to fill a device, and a group is neither a large slot nor,
-- packed, a large region to be expanded in: about four trunks, of GROUP_ENTRIES at most, unless a trunk has more.
-- `group` overrides it.
local function add_staged(self, i, group)
  local fam, c = self.family, self.config
  local mix_specs, expert_specs = fam.tensors(c, i), fam.expert_tensors(c, i)
  local count = fam.routing(c).experts
  local mix = self.manifest:block(("layers.%d.mix"):format(i), "mix")
  local layer = { groups = {}, experts = count }
  layer.trunk = add_part(self, mix, trunk_at(self, i), mix_specs)
  if not group then
    local trunk = entries_of(mix_specs)
    group = math.max(1, math.max(trunk, math.min(4 * trunk, GROUP_ENTRIES)) // entries_of(expert_specs))
  end
  for first = 0, count - 1, group do
    local n = math.min(group, count - first)
    local block = self.manifest:block(("layers.%d.experts.%d"):format(i, first), "experts")
    local g = { block = block, first = first, n = n, expert = {} }
    for e = first, first + n - 1 do
      g.expert[e] = add_part(self, block, expert_at(self, i, e, count, expert_specs), expert_specs)
    end
    layer.groups[#layer.groups + 1] = g
  end
  return layer
end

-- Rows of the vocabulary as a block of their own.
local function add_vocab(self, name, kind, t, first, n, bias)
  local c, row = self.config, t.bytes // self.config.vocab
  local b = { block = self.manifest:block(name, kind), first = first, n = n }
  b.id = self.manifest:tensor(b.block, t.name, t.dtype, { n, c.channels }, self.manifest:file(t.path),
    t.offset + first * row)
  if bias then
    b.bias = self.manifest:tensor(b.block, bias.name, bias.dtype, { n }, self.manifest:file(bias.path),
      bias.offset + first * (bias.bytes // c.vocab))
  end
  return b
end

-- Head tiles: as many vocabulary rows as the largest trunk has bytes, in steps of 64. Groups of
-- experts do not count, so that their size changes no bits of the head. Each tile is a block; with `whole`
-- the head is one block and tiles are rows of it, the embedding another, or the same where they are tied.
local function add_tiles(self, largest, update)
  local c, fam = self.config, self.family
  local embed = checkpoint.tensor(self.checkpoint, fam.embed.name, { c.vocab, c.channels })
  local name = head.name_of(self)
  self.head_name = name
  self.tied = name == fam.embed.name
  local t = checkpoint.tensor(self.checkpoint, name, { c.vocab, c.channels })
  local bias = fam.head.bias and checkpoint.tensor(self.checkpoint, fam.head.bias, { c.vocab })
  for _, x in ipairs { embed, t, bias } do
    self.read[x.name] = true
    if x.dtype ~= "f32" then self.not_f32 = self.not_f32 or x.name end
  end
  self.updatable = update and not self.not_f32
  local whole
  if self.updatable then
    self.embed = add_vocab(self, "embed", "embed", embed, 0, c.vocab, self.tied and bias)
    whole = self.tied and self.embed or add_vocab(self, "head", "tile", t, 0, c.vocab, bias)
  end
  local rows = math.min(math.max(largest // (t.bytes // c.vocab) // 64 * 64, 64), c.vocab)
  self.tile_rows, self.tiles = rows, {}
  for first = 0, c.vocab - 1, rows do
    local n = math.min(rows, c.vocab - first)
    self.tiles[#self.tiles + 1] = whole
      and { block = whole.block, id = whole.id, bias = whole.bias, first = first, n = n, part = true }
      or add_vocab(self, ("head.%d"):format(first), "tile", t, first, n, bias)
  end
  self.row_table = self.manifest:row_table(fam.embed.name, embed.dtype, c.vocab, c.channels,
    self.manifest:file(embed.path), embed.offset)
end

-- The block of the final norm, and what applies it: the family's function, or RMS norm.
local function add_norm(self)
  local names, C = self.family.head, self.config.channels
  local specs = { { name = names.norm, dims = { C } } }
  if names.norm_bias then specs[2] = { name = names.norm_bias, dims = { C } } end
  self.norm = add_part(self, self.manifest:block("norm", "norm"), { prefix = "", name = "" }, specs)
  self.final_norm = names.apply or function(c, w, x)
    return bs.op.rmsnorm(x, w.norm, c.eps, c.norm_one_plus)
  end
end

-- Bytes of the trunk of layer i.
local function trunk_bytes(self, i)
  local n, part = 0, self.layers[i].trunk
  for _, t in pairs(part.tensor) do n = n + self.manifest:tensor_info(part.block, t.id).bytes end
  return n
end

--- Cut a model whose family, config, checkpoint and manifest are there. o: see model.open. self.read gets the names of
-- all tensors that are in a block.
function blocks.cut(self, o)
  local c, fam, largest = self.config, self.family, 0
  for i = 0, c.layers - 1 do
    local staged = fam.stages and (not fam.staged or fam.staged(c, i))
    self.layers[i] = staged and add_staged(self, i, o.group) or add_dense(self, i)
  end
  add_norm(self)
  for i = 0, c.layers - 1 do
    largest = math.max(largest, trunk_bytes(self, i))
  end
  add_tiles(self, largest, o.update)
end

return blocks
