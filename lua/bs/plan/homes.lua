-- SPDX-License-Identifier: Apache-2.0
--- Where homes are chosen: which blocks live on the device, which in ram, which on disk, for so many bytes of each.
-- A home above the lowest trained layer saves two loads of a step and one below it saves one, but work and loads have
-- to meet. So there are several orders in which blocks may get homes, which choose.lua has simulated.
local homes = {}

-- n of a list, evenly spread, so that the link works all the time.
local function spread(list, n)
  local picked = {}
  for i = 0, n - 1 do picked[i + 1] = list[math.floor((i + 0.5) * #list / n) + 1] end
  return picked
end

local function head(list, n) return table.move(list, 1, n, 1, {}) end

-- As many blocks of `list` as fit `budget` bytes, chosen by `pick`, and their bytes. bytes: of each block.
local function fill(list, pick, budget, bytes)
  local least = math.huge
  for _, b in ipairs(list) do least = math.min(least, bytes[b]) end
  for n = math.min(#list, budget // least), 1, -1 do
    local picked, sum = pick(list, n // 1 | 0), 0
    for _, b in ipairs(picked) do sum = sum + bytes[b] end
    if sum <= budget then return picked, sum end
  end
  return {}, 0
end

local function without(list, taken)
  local set, rest = {}, {}
  for _, b in ipairs(taken) do set[b] = true end
  for _, b in ipairs(list) do
    if not set[b] then rest[#rest + 1] = b end
  end
  return rest
end

--- Orders in which the blocks of a program may get homes: {all, first, rest, pick}, where `rest` follows when all of
-- `first` has one. Over all, evenly; the blocks that a step visits twice first, evenly; and these from the one that a
-- step leaves last on, so that the next forward is loaded meanwhile. norm: the block of the final norm, whose home is
-- always the device. forced: all homes are one, so that one order will do.
function homes.orders(program, norm, forced)
  local visits, last, all = {}, {}, {}
  for i, v in ipairs(program) do
    if v.block ~= norm then
      if not visits[v.block] then all[#all + 1] = v.block end
      visits[v.block], last[v.block] = (visits[v.block] or 0) + 1, i
    end
  end
  local twice, once = {}, {}
  for _, b in ipairs(all) do
    if visits[b] > 1 then twice[#twice + 1] = b else once[#once + 1] = b end
  end
  local even = { all = all, first = all, rest = {}, pick = spread }
  if forced or #twice == 0 then return { even } end
  local late = table.move(twice, 1, #twice, 1, {})
  table.sort(late, function(a, b) return last[a] > last[b] end)
  return { even, { all = all, first = twice, rest = once, pick = spread },
           { all = all, first = late, rest = once, pick = head } }
end

-- Blocks of an order, out of those that are left, for one kind of home.
local function choose(order, left, budget, bytes)
  local open, first, rest = {}, {}, {}
  for _, b in ipairs(left) do open[b] = true end
  for _, b in ipairs(order.first) do first[#first + 1] = open[b] and b or nil end
  for _, b in ipairs(order.rest) do rest[#rest + 1] = open[b] and b or nil end
  local picked, used = fill(first, order.pick, budget, bytes)
  if #picked == #first then
    table.move((fill(rest, spread, budget - used, bytes)), 1, #rest, #picked + 1, picked)
  end
  return picked
end

--- The home of every block, 0-based: "gpu", "ram" or "disk". forced: the home of all but the norm, or "auto": as many
-- as fit gpu_bytes on the device, and of the others as many as fit ram_bytes in ram. sizes: {slot, raw}, bytes of
-- each block in either.
function homes.place(model, order, sizes, forced, gpu_bytes, ram_bytes)
  local home = {}
  for b = 0, model.n_blocks - 1 do home[b] = "disk" end
  home[model.norm.block] = "gpu"
  if forced ~= "auto" then
    for _, b in ipairs(order.all) do home[b] = forced end
    return home
  end
  local gpu = choose(order, order.all, gpu_bytes, sizes.slot)
  for _, b in ipairs(gpu) do home[b] = "gpu" end
  for _, b in ipairs(choose(order, without(order.all, gpu), ram_bytes, sizes.raw)) do home[b] = "ram" end
  return home
end

return homes
