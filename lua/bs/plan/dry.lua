-- SPDX-License-Identifier: Apache-2.0
--- Dry runs: the passes of a spec on `meta`, which has the same allocator and computes nothing, give the memory that a
-- job will need to the byte, before anything is read.
local bs = require "bs"
local instance = require "bs.instance.instance"
local store_keys = require "bs.instance.store_keys"

local dry = {}

-- A micro-batch that fills the capacity, or of `most` tokens; memory goes by capacity, so its content does not matter.
local function full_micro(spec, most)
  local n, ids, labels = math.min(spec.batch.tokens, most), {}, {}
  for i = 1, n do ids[i], labels[i] = 0, 0 end
  return { row_len = { n }, ids = ids, labels = labels }
end

-- Run every pass that a job may run; decode is one of them where there is a cache.
local function run_passes(inst, keep)
  local spec, batch = inst.spec, inst.spec.batch
  -- Every micro-batch takes the same ranges of the arena, so two stand for all, unless something of each is kept.
  local micros = { full_micro(spec, math.huge) }
  for j = 2, keep > 0 and batch.micros or math.min(2, batch.micros) do micros[j] = micros[1] end
  if spec.trainable ~= "none" then inst:forward_backward(micros, { step = 1 }) end
  inst:walk(micros, { mode = "loss" })
  if spec.logits and not spec.stack then inst:walk(micros, { mode = "logits" }) end
  if inst.cache then inst:decode { full_micro(spec, spec.cache.tokens) } end
end

-- Bytes with `keep` layers kept: the arena, and the fixed regions beside slots, homes and boundaries.
local function run(spec, keep, o)
  local m, homes = spec.model, {}
  for b = 0, m.n_blocks - 1 do homes[b] = b == m.norm.block and "gpu" or "disk" end
  local plan = { homes = homes, dev_slots = 1, host_slots = 1, boundaries = "device", rows = "disk", keep = keep }
  local device <close> = bs.device.open("meta", {})
  local inst <close> = instance.open(spec, plan, device, {
    pool_bytes = 0, workspace_bytes = o.workspace_bytes, cache_channels = o.cache_channels, on_attend = o.on_attend,
  })
  local fixed = inst.engine:stats().fixed_bytes
  local store = bs.store.bytes(spec.batch, (store_keys.list(spec, "device", keep)))
  local other = fixed - inst.placement:device_bytes() - store
  run_passes(inst, keep)
  return { arena = inst.engine:stats().arena_peak, other = other }
end

--- What a spec needs, as fn(keep) -> {arena, other} in bytes: the arena, and the fixed regions beside slots, homes and
-- boundaries, with the activations of `keep` layers kept. Each is measured once. workspace_bytes: of the kernels of
-- the real device; cache_channels: of dry.cache_channels, with a cache.
function dry.needs(spec, workspace_bytes, cache_channels)
  local known = {}
  return function(keep)
    known[keep] = known[keep]
      or run(spec, keep, { workspace_bytes = workspace_bytes, cache_channels = cache_channels })
    return known[keep]
  end
end

--- Channels that the cache of each layer has: what the layers hand to attend, known after passes without a cache.
function dry.cache_channels(spec, workspace_bytes)
  local channels = {}
  for i = 1, spec.model.config.layers do channels[i] = 0 end
  run(spec, 0, { workspace_bytes = workspace_bytes, on_attend = function(layer, n) channels[layer + 1] = n end })
  return channels
end

return dry
