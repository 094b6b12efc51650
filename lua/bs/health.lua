-- SPDX-License-Identifier: Apache-2.0
--- After a non-finite loss or gradient: one forward walk that finds the first place where a hidden state
-- is not finite, then a look at that block's weights in the files. Always ends with exit status 5.
local bs = require "bs"

local health = {}

local function finite_number(v) return v == v and v ~= math.huge and v ~= -math.huge end
health.finite_number = finite_number

local function finite(a)
  for i = 1, a:count() do
    if not finite_number(a:get(i)) then return false end
  end
  return true
end

-- The first boundary (0 = embeddings, i = output of layer i-1) that is not finite, or nil.
local function first_bad_boundary(job, micros)
  local first
  job:walk(micros, "loss", function(_, i, _, a)
    if not first and not finite(a) then first = i end
  end)
  return first
end

local function suspect_blocks(job, boundary)
  local m, blocks = job.model, {}
  if boundary == nil then
    blocks[1] = m.norm.block
    for _, t in ipairs(m.tiles) do blocks[#blocks + 1] = t.block end
  elseif boundary > 0 then
    local layer = m.layers[boundary - 1]
    blocks[1] = layer.mix.block
    for _, g in ipairs(layer.groups or {}) do blocks[#blocks + 1] = g.block end
  end
  return blocks
end

local function bad_tensor(m, blocks)
  for _, block in ipairs(blocks) do
    for t = 0, m.manifest:block_info(block).n_tensors - 1 do
      local name = m.manifest:tensor_info(block, t).name
      local file <close> = assert(bs.safetensors.open(m.checkpoint.tensors[name].path))
      if not finite(file:read(name)) then return m.manifest:block_info(block).name, name, file:path() end
    end
  end
end

--- Name what made `what` ("loss", ...) non-finite; raises with exit status 5.
function health.diagnose(job, micros, what)
  local boundary = first_bad_boundary(job, micros)
  local m = job.model
  local block, name, path = bad_tensor(m, suspect_blocks(job, boundary))
  if not block and boundary == 0 then
    block, name = "embedding rows", m.family.embed.name
    path = m.checkpoint.tensors[name].path
  end
  if block then
    bs.fail(5, "%s is not finite: block '%s', tensor '%s' of %s holds NaN or infinity; nothing was "
      .. "changed by this step", what, block, name, path)
  end
  bs.fail(5, "%s is not finite, though the weights are%s; nothing was changed by this step: lower lr= or "
    .. "look at its data", what,
    boundary and (" (first seen in the output of layer %d)"):format(boundary - 1) or "")
end

return health
