-- SPDX-License-Identifier: Apache-2.0
--- Event simulation of a step: three in-order resources (disk, link, compute) and the slots between
-- them. It scores placements; it decides nothing. Times in seconds, rates in bytes/s and FLOP/s.
local sim = {}

-- Bytes of the requests that a reader has in flight. With one staging slot it cannot run ahead: each block begins
-- and ends with an empty queue, which was measured to cost as long as reading these.
local IN_FLIGHT <const> = 64 << 20

--- Time of one steady step.
-- o: transfers = plan:transfers(true); size(block) -> payload bytes, raw bytes; work: FLOPs of each visit; back:
-- other bytes that cross the link before each visit, or nil; host_slots; rates. Returns seconds of a steady
-- segment, and busy seconds {disk, link, compute} in it.
function sim.step(o)
  local transfers, size, rates, back = o.transfers, o.size, o.rates, o.back or {}
  local disk, link, compute = 0.0, 0.0, 0.0
  local n, ends, staging, mark = #transfers, {}, {}, 0.0
  local busy = { disk = 0.0, link = 0.0, compute = 0.0 }
  local turn = 0
  for segment = 0, 2 do
    if segment == 2 then
      mark = compute
      busy.disk, busy.link, busy.compute = 0.0, 0.0, 0.0
    end
    for i, t in ipairs(transfers) do
      local at, ready = segment * n + i, 0.0
      if t.load then
        local payload, raw = size(t.block)
        local free = ends[segment * n + (t.slot_free_after or -n) + 1] or 0.0
        local read_end = 0.0
        if t.read then
          turn = turn % math.max(o.host_slots, 1) + 1
          local start = math.max(disk, staging[turn] or 0.0)
          if o.host_slots == 1 then start = start + math.min(raw, IN_FLIGHT) / rates.disk end
          read_end = start + raw / rates.disk
          disk = read_end
          busy.disk = busy.disk + raw / rates.disk
        end
        -- Pieces are copied as they arrive: the copy ends a little after the read, or runs at link speed.
        ready = math.max(math.max(link, free) + payload / rates.link, read_end)
        link = ready
        if t.read then staging[turn] = ready end
        busy.link = busy.link + payload / rates.link
      end
      if (back[i] or 0) > 0 then
        link = link + back[i] / rates.link
        ready = math.max(ready, link)
        busy.link = busy.link + back[i] / rates.link
      end
      compute = math.max(compute, ready) + o.work[i] / rates.flops
      busy.compute = busy.compute + o.work[i] / rates.flops
      ends[at] = compute
    end
  end
  return compute - mark, busy
end

return sim
