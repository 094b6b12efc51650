-- SPDX-License-Identifier: Apache-2.0
--- Choosing the next token from logits: greedy, or at random after temperature, top-k, top-p (Holtzman et al.
-- 2020) and min-p (Nguyen et al. 2024), in this order. Which token is drawn depends on the logits, the seed and
-- the caller's two counters alone.
local bs = require "bs"

local sample = {}

-- The k-th largest of a list; k is small against #v. A heap of k, its smallest on top.
local function kth_largest(v, k)
  local heap = {}
  local function down(i)
    local x = heap[i]
    while true do
      local c = 2 * i
      if c > k then break end
      if c < k and heap[c + 1] < heap[c] then c = c + 1 end
      if heap[c] >= x then break end
      heap[i], i = heap[c], c
    end
    heap[i] = x
  end
  for i = 1, k do heap[i] = v[i] end
  for i = k // 2, 1, -1 do down(i) end
  for i = k + 1, #v do
    if v[i] > heap[1] then
      heap[1] = v[i]
      down(1)
    end
  end
  return heap[1]
end

-- The smallest set of the most probable entries that has at least top_p of all. Entries below (1 - top_p) / n
-- have less than 1 - top_p together, so they are in no such set and need no sorting.
local function nucleus(list, total, top_p)
  local least, some, sum = total * (1 - top_p) / #list, {}, 0
  for _, e in ipairs(list) do
    if e.p >= least then some[#some + 1] = e end
  end
  table.sort(some, function(a, b)
    if a.p ~= b.p then return a.p > b.p end
    return a.id < b.id
  end)
  for i, e in ipairs(some) do
    sum = sum + e.p
    if sum >= top_p * total then return table.move(some, 1, i, 1, {}) end
  end
  return some
end

--- The tokens that may be drawn: a list of {id (from 0), p} by id; their p sum up to the second result.
-- v: list of logits. o: {temperature, top_k (0: all), top_p, min_p}.
function sample.filter(v, o)
  local max, least, list, total = -math.huge, -math.huge, {}, 0
  for i = 1, #v do
    if v[i] > max then max = v[i] end
    if v[i] ~= v[i] then max = math.huge end
  end
  if max == math.huge or max == -math.huge then
    bs.fail("nonfinite", "the logits are not finite: no token can be chosen")
  end
  if o.top_k > 0 and o.top_k < #v then least = kth_largest(v, o.top_k) end
  for i = 1, #v do
    if v[i] >= least then
      local p = math.exp((v[i] - max) / o.temperature)
      list[#list + 1] = { id = i - 1, p = p }
      total = total + p
    end
  end
  if o.top_p < 1 then list = nucleus(list, total, o.top_p) end
  local kept = {}
  for _, e in ipairs(list) do -- the most probable has p = 1
    if e.p >= o.min_p then kept[#kept + 1] = e end
  end
  table.sort(kept, function(a, b) return a.id < b.id end)
  total = 0
  for _, e in ipairs(kept) do total = total + e.p end
  return kept, total
end

-- Uniform in [0, 1) with 53 bits.
local function uniform(seed, row, step)
  return (bs.hash(string.pack("<i8i8", row, step), seed) >> 11) * 2.0 ^ -53
end

--- A chooser: fn(logits array, its row from 1, row counter, step counter) -> token id.
-- o: {temperature (0: the most probable token), top_k, top_p, min_p, seed}.
function sample.new(o)
  return function(logits, index, row, step)
    local mine <close> = logits:slice_rows(index, index)
    if o.temperature == 0 then
      local best, gap = mine:argmax_rows()
      if gap[1] ~= gap[1] then bs.fail("nonfinite", "the logits are not finite: no token can be chosen") end
      return best[1] - 1
    end
    local list, total = sample.filter(mine:table(), o)
    local left = uniform(o.seed, row, step) * total
    for _, e in ipairs(list) do
      left = left - e.p
      if left < 0 then return e.id end
    end
    return list[#list].id
  end
end

return sample
