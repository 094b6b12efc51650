-- SPDX-License-Identifier: Apache-2.0
--- Event simulation of a step: three in-order resources (disk, link, compute) and the slots between them. It scores
-- plans; it decides nothing. Times in seconds, rates in bytes/s and FLOP/s.
local sim = {}

-- Bytes of the requests that a reader has in flight. With one host slot it cannot run ahead: each block begins and
-- ends with an empty queue, which was measured to cost as long as reading these.
local IN_FLIGHT <const> = 64 << 20

-- The state: when disk, link and compute are free, how long each was busy, and for each host slot (taken in turn) when
-- its block has left it.
local function new_state(o)
  return {
    o = o, disk = 0.0, link = 0.0, compute = 0.0, busy = { disk = 0.0, link = 0.0, compute = 0.0 }, slot_free = {},
    turn = 0,
  }
end

-- Read a block of raw bytes into the next host slot. Returns when it is there.
local function read(s, raw)
  local o = s.o
  s.turn = s.turn % math.max(o.host_slots, 1) + 1
  local start = math.max(s.disk, s.slot_free[s.turn] or 0.0)
  if o.host_slots == 1 then start = start + math.min(raw, IN_FLIGHT) / o.rates.disk end
  s.disk = start + raw / o.rates.disk
  s.busy.disk = s.busy.disk + raw / o.rates.disk
  return s.disk
end

-- Bring the block of a transfer into its device slot, which is free from `free` on. Returns when it is there. Pieces
-- are copied as they arrive: the copy ends with the read, or later if the link is the slower one.
local function load(s, t, free)
  local o = s.o
  local payload, raw = o.size(t.block)
  local read_end = t.read and read(s, raw) or 0.0
  s.link = math.max(math.max(s.link, free) + payload / o.rates.link, read_end)
  if t.read then s.slot_free[s.turn] = s.link end
  s.busy.link = s.busy.link + payload / o.rates.link
  return s.link
end

--- Time of one steady step.
-- o: transfers = placement:transfers(true); size(block) -> payload bytes, raw bytes; work: FLOPs of each visit; back:
-- other bytes that cross the link before each visit, or nil; host_slots; rates. Returns seconds of a steady segment,
-- and busy seconds {disk, link, compute} in it.
function sim.step(o)
  local s, n, ends, steady = new_state(o), #o.transfers, {}, 0.0
  -- The first segment fills homes and slots, the second one meets what the first has left, the third is like all later
  -- ones.
  for segment = 0, 2 do
    if segment == 2 then
      steady = s.compute
      s.busy.disk, s.busy.link, s.busy.compute = 0.0, 0.0, 0.0
    end
    for i, t in ipairs(o.transfers) do
      local ready = 0.0
      if t.load then ready = load(s, t, ends[segment * n + (t.slot_free_after or -n) + 1] or 0.0) end
      local back = o.back and o.back[i] or 0
      if back > 0 then
        s.link = s.link + back / o.rates.link
        ready = math.max(ready, s.link)
        s.busy.link = s.busy.link + back / o.rates.link
      end
      s.compute = math.max(s.compute, ready) + o.work[i] / o.rates.flops
      s.busy.compute = s.busy.compute + o.work[i] / o.rates.flops
      ends[segment * n + i] = s.compute
    end
  end
  return s.compute - steady, s.busy
end

return sim
