-- SPDX-License-Identifier: Apache-2.0
--- Dry runs: the passes of a job on `meta`, which has the same allocator and computes nothing, give the memory that
-- the job will need to the byte, before anything is read.
local bs = require "bs"

local dry = {}

-- One micro-batch that fills the capacity; memory goes by capacity, so its content does not matter.
local function full_micro(job, most)
  local n, ids, labels = math.min(job.cfg.micro_tokens, most), {}, {}
  for i = 1, n do ids[i], labels[i] = 0, 0 end
  return { row_len = { n }, ids = ids, labels = labels }
end

--- The arena and the fixed regions (beside slots, homes and boundaries) of a job with `keep` layers kept, in bytes.
-- build(job, device, choice, pool_bytes) makes its objects, close(job) ends them.
function dry.measure(job, keep, build, close)
  local m, cfg, homes = job.model, job.cfg, {}
  for b = 0, m.n_blocks - 1 do homes[b] = b == m.norm.block and "gpu" or "disk" end
  local choice = {
    homes = homes, dev_slots = 1, host_slots = 1, boundaries = "device", rows = "disk", keep = keep,
  }
  local device <close> = bs.device.open("meta", {})
  build(job, device, choice, 0)
  local fixed = job.engine:stats().fixed_bytes
  local store = bs.store.bytes(job:batch_config(), job:store_keys("device", keep))
  local other = fixed - job.placement:device_bytes() - store
  -- Every micro-batch takes the same ranges of the arena, so two stand for all, unless something of each is kept.
  local micros = { full_micro(job, math.huge) }
  for j = 2, keep > 0 and cfg.micros or math.min(2, cfg.micros) do micros[j] = micros[1] end
  if cfg.trainable ~= "none" then job:forward_backward(micros, { step = 1 }) end
  job:walk(micros, "loss")
  if cfg.logits and not cfg.stack then job:walk(micros, "logits") end
  if job.cache then job:decode { full_micro(job, cfg.cache.tokens) } end
  local arena = job.engine:stats().arena_peak
  close(job)
  return { arena = arena, other = other }
end

--- Channels of the cache of each layer: what the layers hand to attend, known after one pass without it.
function dry.cache(job, build, close)
  local seen = {}
  for i = 1, job.model.config.layers do seen[i] = 0 end
  job.kv_seen = seen
  dry.measure(job, 0, build, close)
  job.kv_seen = nil
  return seen
end

return dry
