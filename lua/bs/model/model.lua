-- SPDX-License-Identifier: Apache-2.0
--- A checkpoint seen through its family: its numbers, its blocks, its linears.
local bs = require "bs"
local blocks = require "bs.model.blocks"
local checkpoint = require "bs.model.checkpoint"
local family = require "bs.model.find_family"
local head = require "bs.model.head"
local keys = require "bs.model.keys"
local reads = require "bs.nn.reads"
local unread = require "bs.model.unread"

local model = {}

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

-- The numbers that the family makes of config.json, all of whose keys are accounted for.
local function read_config(self)
  local ckpt, count = self.checkpoint, 0
  keys.check_architectures(ckpt.config, self.dir)
  self.config = self.family.config(reads.over(ckpt.config))
  keys.check(self)
  for _ in pairs(ckpt.tensors) do count = count + 1 end
  if self.config.layers > count then
    bs.fail("error", "%s: config.json says %d layers; the checkpoint holds %d tensors", self.dir, self.config.layers,
      count)
  end
end

-- The blocks, and what becomes of the tensors that are in none.
local function cut(self, o)
  local patterns = unread.patterns(o.ignore)
  self.read = {}
  blocks.cut(self, o)
  head.check_tied(self, o.check == "full", patterns)
  unread.check(self, patterns)
end

--- Open a checkpoint folder. opts.family: a family's table or the path of its file, in place of the one that
-- config.json names. opts.group: experts per block (tests). opts.compute: what engines will compute
-- in, "f32" (default), "bf16", or "auto": bf16 where most of the checkpoint is. opts.update: lay blocks out so
-- that gpu homes can be updated, which `updatable` says was possible; `not_f32` names a tensor that is in the
-- way. opts.ignore: patterns of tensors (* and ?) to go on without where nothing reads them, else they are refused.
-- opts.check: "sampled" (default) or "full": how many rows of a head that is stored twice are compared. Returns the
-- model: family, config (the family's numbers), compute, embed_scale, manifest, layers[i] (0-based), norm,
-- final_norm(c, w, x), tiles, row_table, and with updatable: embed.
function model.open(dir, opts)
  local self = { checkpoint = checkpoint.open(dir), layers = {} }
  self.dir = self.checkpoint.dir
  self.family = opts and opts.family and family.given(opts.family)
    or family.find(self.checkpoint.config, self.dir)
  read_config(self)
  self.compute = opts and opts.compute or "f32"
  if self.compute == "auto" then
    self.compute = mostly_bf16(self.checkpoint) and "bf16" or "f32"
  end
  self.embed_scale = embed_scale(self)
  self.manifest = bs.manifest.new()
  self.manifest:compute(self.compute)
  cut(self, opts or {})
  self.manifest:finish()
  self.n_blocks = self.manifest:blocks()
  self.expand_bytes = 0
  for b = 0, self.n_blocks - 1 do
    self.expand_bytes = math.max(self.expand_bytes, self.manifest:block_info(b).expand_bytes)
  end
  return self
end

--- Every part (trunk, expert) in order: calls fn(part, layer index).
function model.each_part(self, fn)
  for i = 0, self.config.layers - 1 do
    local layer = self.layers[i]
    fn(layer.trunk, i)
    for _, g in ipairs(layer.groups or {}) do
      for e = g.first, g.first + g.n - 1 do fn(g.expert[e], i) end
    end
  end
end

--- What belongs to tensors of the model, by the names of its file: name -> list of values, one, or one for each slice
-- of the tensor in their order.
function model.in_file(self, values)
  local out, stored = {}, {}
  model.each_part(self, function(part)
    for name, t in pairs(part.tensor) do
      if t.stored then stored[part.prefix .. name] = t.stored end
    end
  end)
  model.each_part(self, function(part)
    for _, name in ipairs(part.order) do
      local full = part.prefix .. name
      if stored[full] and values[full] ~= nil then
        local list = out[stored[full]] or {}
        out[stored[full]], list[#list + 1] = list, values[full]
      end
    end
  end)
  for name, value in pairs(values) do
    if not stored[name] then out[name] = { value } end
  end
  return out
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

return model
