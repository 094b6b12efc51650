-- SPDX-License-Identifier: Apache-2.0
local bs = require "bs"
local family = require "bs.model.find_family"
local put_folder = require "bs.model.put_folder"
local write_model = require "bs.model.write_model"

--- Write a checkpoint folder with random weights for a config.json table: matrices uniform in +-1/sqrt(columns),
-- an embedding of its own in +-1, vectors so that they change nothing. opts.seed, opts.family.
local function create(dir, hf, opts)
  local fam = opts and opts.family or family.find(hf)
  local c, seed, arrays = fam.config(hf), opts and opts.seed or 1, {}
  local function add(name, dims, bound)
    local a = bs.array.new("f32", dims)
    if #dims > 1 and bound ~= 0 then
      a:uniform(bound or 1 / math.sqrt(dims[#dims]), seed, name)
    elseif #dims == 1 and not name:match("bias$") and not c.norm_one_plus then
      for i = 1, dims[1] do a:set(i, 1) end
    end
    arrays[name] = a
  end
  local function add_all(prefix, specs)
    for _, t in ipairs(specs) do add(prefix .. t.name, t.dims) end
  end
  -- Tensors of the experts of layer i, or those that they are slices of, whose matrices lie as [in, out] where they
  -- may.
  local function add_experts(i)
    local n = fam.routing(c).experts
    for _, t in ipairs(fam.expert_tensors(c, i)) do
      local d = t.transposed and #t.dims == 2 and { t.dims[2], t.dims[1] } or t.dims
      if t.stored then
        add(fam.prefix(i) .. t.stored, { n, table.unpack(d) }, #d > 1 and 1 / math.sqrt(t.dims[2]) or 0)
      else
        for e = 0, n - 1 do add(fam.expert_prefix(i, e) .. t.name, t.dims) end
      end
    end
  end
  for i = 0, c.layers - 1 do
    add_all(fam.prefix(i), fam.tensors(c, i))
    if fam.stages and (not fam.staged or fam.staged(c, i)) then add_experts(i) end
  end
  add(fam.embed.name, { c.vocab, c.channels }, not c.tied and 1 or nil)
  if not c.tied then add(fam.head.weight, { c.vocab, c.channels }) end
  add(fam.head.norm, { c.channels })
  if fam.head.norm_bias then add(fam.head.norm_bias, { c.channels }) end
  if fam.head.bias then add(fam.head.bias, { c.vocab }) end
  put_folder(dir, write_model.names(), function(written)
    bs.safetensors.write(written .. "/model.safetensors", arrays, { format = "pt" })
    write_model.config(written, hf, "f32")
  end)
end

return create
