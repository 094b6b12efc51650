-- SPDX-License-Identifier: Apache-2.0
--- A checkpoint seen through its family: which tensors form which block, and the weight objects that
-- stages use. The cut into blocks depends on the model's shapes only, never on a budget.
local bs = require "bs"
local checkpoint = require "bs.model.checkpoint"
local family = require "bs.model.family"

local model = {}

local function add_tensor(self, block, spec, full)
  local t = checkpoint.tensor(self.checkpoint, full, spec.dims)
  if t.dtype ~= "f32" then self.not_f32 = self.not_f32 or full end
  return self.manifest:tensor(block, full, t.dtype, spec.dims, self.manifest:file(t.path), t.offset)
end

-- One part of a layer (a whole dense layer, its mix, one expert): where its tensors ended up.
local function add_part(self, block, prefix, specs)
  local part = { block = block, prefix = prefix, tensor = {}, order = {} }
  for _, spec in ipairs(specs) do
    part.tensor[spec.name] = { id = add_tensor(self, block, spec, prefix .. spec.name), dims = spec.dims }
    part.order[#part.order + 1] = spec.name
  end
  return part
end

local function bytes_of(self, prefix, specs)
  local n = 0
  for _, spec in ipairs(specs) do
    n = n + checkpoint.tensor(self.checkpoint, prefix .. spec.name, spec.dims).bytes
  end
  return n
end

local function add_dense(self, i)
  local fam, c = self.family, self.config
  local block = self.manifest:block("layers." .. i, "layer")
  return { mix = add_part(self, block, fam.prefix(i), fam.tensors(c, i)) }
end

-- Experts are grouped so that a group is about as large as the mix part; `group` overrides it.
local function add_staged(self, i, group)
  local fam, c = self.family, self.config
  local mix_specs, expert_specs = fam.tensors(c, i), fam.expert_tensors(c, i)
  local count = fam.experts(c, i)
  local mix = self.manifest:block(("layers.%d.mix"):format(i), "mix")
  local layer = { groups = {}, experts = count }
  layer.mix = add_part(self, mix, fam.prefix(i), mix_specs)
  if not group then
    local one = bytes_of(self, fam.expert_prefix(i, 0), expert_specs)
    group = math.max(1, bytes_of(self, fam.prefix(i), mix_specs) // one)
  end
  for first = 0, count - 1, group do
    local n = math.min(group, count - first)
    local block = self.manifest:block(("layers.%d.experts.%d"):format(i, first), "experts")
    local g = { block = block, first = first, n = n, expert = {} }
    for e = first, first + n - 1 do
      g.expert[e] = add_part(self, block, fam.expert_prefix(i, e), expert_specs)
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

-- Head tiles: as many vocabulary rows as the largest dense or mix block has bytes, in steps of 64. Groups of
-- experts do not count, so that their size changes no bits of the head. Each tile is a block; with `whole`
-- the head is one block and tiles are rows of it, the embedding another, or the same where they are tied.
local function add_tiles(self, largest, update)
  local c, fam = self.config, self.family
  local embed = checkpoint.tensor(self.checkpoint, fam.embed.name, { c.vocab, c.channels })
  local name = fam.head.weight
  -- A head that the file lacks is the embedding even where the config does not say so.
  if c.tied or not self.checkpoint.tensors[name] then name = fam.embed.name end
  self.head_name = name
  self.tied = name == fam.embed.name
  local t = checkpoint.tensor(self.checkpoint, name, { c.vocab, c.channels })
  local bias = fam.head.bias and checkpoint.tensor(self.checkpoint, fam.head.bias, { c.vocab })
  for _, x in ipairs { embed, t, bias } do
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
  self.rows = self.manifest:row_table(fam.embed.name, embed.dtype, c.vocab, c.channels,
    self.manifest:file(embed.path), embed.offset)
end

-- The block of the final norm, and what applies it: the family's function, or RMS norm.
local function add_norm(self)
  local head, C = self.family.head, self.config.channels
  local specs = { { name = head.norm, dims = { C } } }
  if head.norm_bias then specs[2] = { name = head.norm_bias, dims = { C } } end
  self.norm = add_part(self, self.manifest:block("norm", "norm"), "", specs)
  self.final_norm = head.apply or function(c, w, x)
    return bs.op.rmsnorm(x, w.norm, c.eps, c.norm_one_plus)
  end
end

-- Bytes of the dense or mix block of layer i.
local function mix_bytes(self, i)
  local n, part = 0, self.layers[i].mix
  for _, t in pairs(part.tensor) do n = n + self.manifest:tensor_info(part.block, t.id).bytes end
  return n
end

-- Is most of a checkpoint stored as bf16?
local function mostly_bf16(ckpt)
  local all, bf16 = 0, 0
  for _, t in pairs(ckpt.tensors) do
    all = all + t.bytes
    if t.dtype == "bf16" then bf16 = bf16 + t.bytes end
  end
  return 2 * bf16 > all
end

-- The models' authors multiply embedding rows by a number of the rows' own type: 25.25 in bf16 for sqrt(640).
local function embed_scale(self)
  return bs.array.new("f32", { 1 }, { self.config.embed_scale or 1.0 }):cast(self.compute):get(1)
end

--- Open a checkpoint folder. opts.group: experts per block (tests). opts.compute: what engines will compute
-- in, "f32" (default), "bf16", or "auto": bf16 where most of the checkpoint is. opts.update: lay blocks out so
-- that gpu homes can be updated, which `updatable` says was possible; `not_f32` names a tensor that is in the
-- way. Returns the model: family, config (the family's numbers), compute, embed_scale, manifest, layers[i]
-- (0-based), norm, final_norm(c, w, x), tiles, rows, and with updatable: embed.
function model.open(dir, opts)
  local self = { checkpoint = checkpoint.open(dir), layers = {}, dir = dir }
  self.family = opts and opts.family and family.check(opts.family, "family=") or family.find(self.checkpoint.config)
  self.config = self.family.config(self.checkpoint.config)
  self.compute = opts and opts.compute or "f32"
  if self.compute == "auto" then
    self.compute = mostly_bf16(self.checkpoint) and "bf16" or "f32"
  end
  self.embed_scale = embed_scale(self)
  self.manifest = bs.manifest.new()
  self.manifest:compute(self.compute)
  local c, largest = self.config, 0
  for i = 0, c.layers - 1 do
    local staged = self.family.stages and (not self.family.staged or self.family.staged(c, i))
    self.layers[i] = staged and add_staged(self, i, opts and opts.group) or add_dense(self, i)
  end
  add_norm(self)
  for i = 0, c.layers - 1 do
    largest = math.max(largest, mix_bytes(self, i))
  end
  add_tiles(self, largest, opts and opts.update)
  self.manifest:finish()
  self.n_blocks = self.manifest:blocks()
  self.expand_bytes = 0
  for b = 0, self.n_blocks - 1 do
    self.expand_bytes = math.max(self.expand_bytes, self.manifest:block_info(b).expand_bytes)
  end
  return self
end

--- Every part (dense layer, mix, expert) in order: calls fn(part, layer index).
function model.each_part(self, fn)
  for i = 0, self.config.layers - 1 do
    local layer = self.layers[i]
    fn(layer.mix, i)
    for _, g in ipairs(layer.groups or {}) do
      for e = g.first, g.first + g.n - 1 do fn(g.expert[e], i) end
    end
  end
end

--- Every linear of the layers in order: calls fn{full, name, part, layer, out, inn, weight, bias}.
function model.each_linear(self, fn)
  model.each_part(self, function(part, i)
    for _, name in ipairs(part.order) do
      local base = name:match("^(.*)%.weight$")
      local t = part.tensor[name]
      if base and #t.dims == 2 then
        local bias = part.tensor[base .. ".bias"]
        fn { full = part.prefix .. base, name = base, part = part, layer = i, out = t.dims[1],
             inn = t.dims[2], weight = t.id, bias = bias and bias.id }
      end
    end
  end)
end

--- Write a checkpoint folder with random weights for a config.json table: matrices uniform in +-1/sqrt(columns),
-- an embedding of its own in +-1, vectors so that they change nothing. opts.seed, opts.family.
function model.create(dir, hf, opts)
  local fam = opts and opts.family or family.find(hf)
  local c, seed, arrays = fam.config(hf), opts and opts.seed or 1, {}
  local function add(name, dims, bound)
    local a = bs.array.new("f32", dims)
    if #dims > 1 then
      a:uniform(bound or 1 / math.sqrt(dims[#dims]), seed, name)
    elseif not name:match("bias$") and not c.norm_one_plus then
      for i = 1, dims[1] do a:set(i, 1) end
    end
    arrays[name] = a
  end
  local function add_all(prefix, specs)
    for _, t in ipairs(specs) do add(prefix .. t.name, t.dims) end
  end
  for i = 0, c.layers - 1 do
    add_all(fam.prefix(i), fam.tensors(c, i))
    if fam.stages and (not fam.staged or fam.staged(c, i)) then
      for e = 0, fam.experts(c, i) - 1 do add_all(fam.expert_prefix(i, e), fam.expert_tensors(c, i)) end
    end
  end
  add(fam.embed.name, { c.vocab, c.channels }, not c.tied and 1 or nil)
  if not c.tied then add(fam.head.weight, { c.vocab, c.channels }) end
  add(fam.head.norm, { c.channels })
  if fam.head.norm_bias then add(fam.head.norm_bias, { c.channels }) end
  if fam.head.bias then add(fam.head.bias, { c.vocab }) end
  checkpoint.write(dir, hf, arrays, "f32")
end

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
        dropout = a.dropout, base_weight = trainer and trainer.base[full],
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

--- Weight objects on an engine. trainer: nil or {params, adapter = {linear name -> {a, b, scale,
-- dropout}}, base = {tensor name -> parameter}}. Returns {layers[i] = {mix, expert[e]}, head = {norm},
-- tiles[i] = {weight, bias}}; a norm with a bias is {weight, bias}.
function model.bind(self, e, trainer)
  local w = { layers = {}, tiles = {} }
  for i = 0, self.config.layers - 1 do
    local layer = self.layers[i]
    w.layers[i] = { mix = bind_part(self, e, layer.mix, trainer), expert = {} }
    for _, g in ipairs(layer.groups or {}) do
      for k, part in pairs(g.expert) do w.layers[i].expert[k] = bind_part(self, e, part, trainer) end
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

return model
