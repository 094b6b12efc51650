-- SPDX-License-Identifier: Apache-2.0
--- The order of rows and how they are packed: which rows make a step is a function of the seed, the step and the
-- settings alone. o: {micro_tokens, step_tokens, micros, rows, switch}, as data.open has checked them.
local packing = {}

-- The finaliser of splitmix64.
local function mix(x)
  x = (x ~ (x >> 30)) * 0xBF58476D1CE4E5B9
  x = (x ~ (x >> 27)) * 0x94D049BB133111EB
  return x ~ (x >> 31)
end

local ROUNDS, GOLDEN = 6, 0x9E3779B97F4A7C15

--- A permutation of 0..n-1 as a function, without a table: a Feistel network on the smallest even number of bits that
-- holds n, walked until it lands below n (Black and Rogaway 2002).
function packing.permutation(n, seed, epoch)
  local half = 1
  while 1 << 2 * half < n do half = half + 1 end
  local mask, key = (1 << half) - 1, {}
  for round = 1, ROUNDS do key[round] = mix(mix(seed + GOLDEN) + mix(epoch) + round * GOLDEN) end
  return function(v)
    repeat
      local l, r = v >> half, v & mask
      for round = 1, ROUNDS do l, r = r, l ~ (mix(r + key[round]) & mask) end
      v = l << half | r
    until v < n
    return v
  end
end

-- The fullest micro-batch that has room for a row of n tokens (best fit), a new one where none has; nil
-- when none may be added. Rows on both sides of o.switch are never in one.
local function place(o, bins, n)
  local best
  local long = o.switch ~= nil and n > o.switch
  for _, b in ipairs(bins) do
    if b.left >= n and #b < o.rows and b.long == long and (not best or b.left < best.left) then best = b end
  end
  if not best then
    if #bins >= o.micros then return nil end
    best = { left = o.micro_tokens, long = long }
    bins[#bins + 1] = best
  end
  best.left = best.left - n
  return best
end

local function pack_in_order(o, rows)
  local bins = {}
  for _, row in ipairs(rows) do
    local b = place(o, bins, row.n)
    if not b then return nil end
    b[#b + 1] = row
  end
  return bins
end

--- Rows ({n = tokens, arrival = their order}) in micro-batches, a list of lists. Longest first needs the fewest almost
-- always; the order of arrival always fits, since the rows were cut for it.
function packing.pack(o, rows)
  local sorted = table.move(rows, 1, #rows, 1, {})
  table.sort(sorted, function(a, b)
    if a.n ~= b.n then return a.n > b.n end
    return a.arrival < b.arrival
  end)
  local by_length, by_arrival = pack_in_order(o, sorted), pack_in_order(o, rows)
  return by_length and #by_length <= #by_arrival and by_length or by_arrival
end

--- Cut rows ({n, tokens = fn(row)}) in an order (position -> row) into parts: a part ends where the next row exceeds
-- o.step_tokens or fits no micro-batch. Returns {order, start = position of each part's first row, then their number}.
function packing.cut(o, rows, order)
  local start, bins, used = { 0 }, {}, 0
  for position = 0, rows.n - 1 do
    local tokens = rows.tokens(order(position))
    local fits = used == 0 or used + tokens <= o.step_tokens
    local bin = fits and place(o, bins, tokens)
    if not bin then
      start[#start + 1] = position
      bins, used = {}, 0
      bin = place(o, bins, tokens)
    end
    bin[#bin + 1] = true
    used = used + tokens
  end
  start[#start + 1] = rows.n
  return { order = order, start = start }
end

return packing
