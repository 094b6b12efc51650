-- SPDX-License-Identifier: Apache-2.0
--- How fast this machine copies, multiplies and reads, each measured alone through the device layer and the reader
-- of a step, and how its GPU's memory adds up. For plans (rates="measure"), `bslua --doctor` and the benches.
local bs = require "bs"

local measure = {}

local MIB <const> = 1 << 20

--- Is it a GPU's device?
function measure.is_gpu(device) return device:props().name:find("cuda", 1, true) ~= nil end

--- Bytes/s of copies of `bytes` between pinned memory and the device; out: from the device.
function measure.copies(device, bytes, n, out)
  return bytes / bs.rates.copy(device, { bytes = bytes, n = n, out = out or false })
end

--- FLOP/s of products [m, k] x [n, k]^T of one dtype.
function measure.product(device, dtype, m, n, k, times)
  return 2.0 * m * n * k / bs.rates.gemm(device, { dtype = dtype, m = m, n = n, k = k, ["repeat"] = times })
end

--- Bytes/s of reading blocks of a manifest, and how they were read ("uring+direct").
function measure.reads(device, manifest, blocks, io)
  local r = bs.rates.read(device, manifest, blocks, io)
  return r.bytes / r.seconds, r.io, r.bytes
end

-- The first blocks of the layers: at least one, no more than `most` bytes together.
local function some_layers(m, most)
  local blocks, sum = {}, 0
  for i = 0, m.config.layers - 1 do
    local b = m.layers[i].trunk.block
    sum = sum + m.manifest:block_info(b).raw_bytes
    if #blocks > 0 and sum > most then break end
    blocks[#blocks + 1] = b
  end
  return blocks
end
measure.some_layers = some_layers

--- The rates that a plan is scored with (sim.lua), in well under a second where the disk reads a block in that:
-- copies in, products of the shape of the job's own, reads of its first blocks.
function measure.rates(device, m, micro_tokens, io)
  local gpu = measure.is_gpu(device)
  local width = gpu and m.config.channels or math.min(m.config.channels, 512)
  local rows = math.min(micro_tokens, gpu and 8192 or 128)
  return {
    link = gpu and measure.copies(device, 64 * MIB, 4) or measure.copies(device, 16 * MIB, 2),
    flops = measure.product(device, m.compute, rows, width, width, gpu and 20 or 2),
    disk = (measure.reads(device, m.manifest, some_layers(m, 64 * MIB), io)),
  }
end

--- What this process holds of the GPU's memory, as NVML sees it, against pool bytes + what the context was measured
-- to take when it was made. nil: NVML does not tell.
function measure.memory(pool_bytes)
  local g = bs.gpu.status()
  if not g.held_bytes or not g.context_bytes then return nil end
  local accounted = g.context_bytes + pool_bytes
  return {
    held = g.held_bytes, by = g.own_bytes and "process" or "difference", context = g.context_bytes,
    pool = pool_bytes, ratio = g.held_bytes / accounted, within = math.abs(g.held_bytes / accounted - 1) <= 0.02,
  }
end

return measure
