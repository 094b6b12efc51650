-- SPDX-License-Identifier: Apache-2.0
--- After a non-finite loss or gradient: one forward walk that finds the first place where a hidden state
-- is not finite, then a look at that block's weights in the files. Always ends with exit status 5.
local bs = require "bs"
local files = require "bs.settings.files"

local diagnose = {}
local PIECE <const> = 1 << 20 -- bytes of a file that are looked at together; whole elements of every dtype

--- Is it a finite number?
function diagnose.finite(v) return v == v and v ~= math.huge and v ~= -math.huge end

-- The first boundary (0 = embeddings, i = output of layer i-1) that is not finite, or nil.
local function first_bad_boundary(inst, micros)
  local first
  inst:walk(micros, { mode = "loss", observe = function(_, i, _, a)
    if not first and not a:is_finite() then first = i end
  end })
  return first
end

local function suspect_blocks(m, boundary)
  local blocks = {}
  if boundary == nil then
    blocks[1] = m.norm.block
    for _, t in ipairs(m.tiles) do blocks[#blocks + 1] = t.block end
  elseif boundary > 0 then
    local layer = m.layers[boundary - 1]
    blocks[1] = layer.trunk.block
    for _, g in ipairs(layer.groups or {}) do blocks[#blocks + 1] = g.block end
  end
  return blocks
end

-- Are the bytes of a tensor (or of the rows of one that a tile has) all finite? Never all in memory.
local function finite_in_file(path, t)
  local file <close> = files.open(path)
  local left, per = t.bytes, bs.array.new(t.dtype, { 1 }):bytes()
  files.seek(file, path, "set", t.offset)
  while left > 0 do
    local bytes = file:read(math.min(left, PIECE))
    if not bytes then bs.fail("error", "%s ends inside tensor '%s'", path, t.name) end
    if not bs.array.new(t.dtype, { #bytes // #per }, bytes):is_finite() then return false end
    left = left - #bytes
  end
  return true
end

local function bad_tensor(m, blocks)
  for _, block in ipairs(blocks) do
    local info = m.manifest:block_info(block)
    for i = 0, info.n_tensors - 1 do
      local t = m.manifest:tensor_info(block, i)
      local path = m.checkpoint.tensors[t.name].path
      if not finite_in_file(path, t) then return info.name, t.name, path end
    end
  end
end

local function bad_parameter(inst)
  local names, values = {}, inst:parameters()
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    if not values[name]:is_finite() then return name end
  end
end

--- Name what made `what` ("loss", ...) non-finite; raises with exit status 5. ending: what has become of the work, of a
-- step by default.
function diagnose.run(inst, micros, what, ending)
  local unchanged = ending or "nothing was changed by this step"
  local parameter = bad_parameter(inst)
  if parameter then
    bs.fail("nonfinite", "%s is not finite: %s '%s' holds NaN or infinity; %s", what,
      inst.spec.model.updatable and "the weight" or "the adapter's", parameter, unchanged)
  end
  local boundary = first_bad_boundary(inst, micros)
  local m = inst.spec.model
  local block, name, path = bad_tensor(m, suspect_blocks(m, boundary))
  if not block and boundary == 0 then
    block, name = "embedding rows", m.family.embed.name
    path = m.checkpoint.tensors[name].path
  end
  if block then
    bs.fail("nonfinite", "%s is not finite: block '%s', tensor '%s' of %s holds NaN or infinity; %s", what, block, name,
      path, unchanged)
  end
  bs.fail("nonfinite", "%s is not finite, though the weights are%s; %s: %slook at its data", what,
    boundary and (" (first seen in the output of layer %d)"):format(boundary - 1) or "", unchanged,
    ending and "" or "lower lr= or ")
end

return diagnose
