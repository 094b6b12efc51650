-- SPDX-License-Identifier: Apache-2.0
--- Budgets that no plan fits: which of them is too small, and what works. What is named as working has been planned
-- with, as it is printed.
local bs = require "bs"
local budget = require "bs.plan.budget"

local refuse = {}
local mib <const> = budget.mib
local UNBOUNDED <const> = 1 << 50 -- a budget of more is none, and is not printed

-- The least of one budget that some candidate needs, of those that need no more than `most` of the other one; and what
-- that candidate needs of both. needs: a list of {vram =, ram =}.
local function least(needs, of, other, most)
  local best
  for _, n in ipairs(needs) do
    if n[other] <= most and (not best or n[of] < best[of]) then best = n end
  end
  return best and best[of], best
end

-- The candidate that needs least of both together.
local function smallest(needs)
  local best = needs[1]
  for _, n in ipairs(needs) do
    if n.vram + n.ram < best.vram + best.ram then best = n end
  end
  return best
end

local function words(vram, ram)
  local parts = { "vram=" .. budget.typed(vram) }
  if ram < UNBOUNDED then parts[2] = "ram=" .. budget.typed(ram) end
  if vram >= UNBOUNDED then table.remove(parts, 1) end
  return table.concat(parts, " ")
end

-- Pairs of budgets that work, as words of a command line: more of one, more of the other, and the smallest of all.
-- Where the device has no more memory (o.note), none that asks it for more.
local function pairs_that_work(o, more_vram, more_ram, both)
  local list, known = {}, {}
  local function add(vram, ram)
    if o.note and vram > o.vram then return end
    local text = words(vram, ram)
    if not known[text] and o.works(budget.rounded(vram), budget.rounded(ram)) then
      known[text], list[#list + 1] = true, text
    end
  end
  if more_vram then add(more_vram, o.ram) end
  if more_ram then add(o.vram, more_ram) end
  add(both.vram, both.ram)
  return list
end

-- What is too small, in words.
local function problem(o, more_vram, more_ram)
  if more_vram and not more_ram then
    return ("vram=%s is too small: the smallest that works is %s (%d bytes; %s of it are activations of one "
      .. "micro-batch of %d tokens)"):format(mib(o.vram), mib(more_vram), more_vram, mib(o.arena), o.tokens)
  elseif more_ram and not more_vram then
    return ("ram=%s is too small: the smallest that works is %s (%d bytes)"):format(mib(o.ram), mib(more_ram),
      more_ram)
  end
  return ("vram=%s with ram=%s is too small: %s"):format(mib(o.vram), mib(o.ram),
    more_vram and "each would do with more of the other" or "both are")
end

--- End the script with exit status 3. o: {vram, ram (bytes), note (why vram cannot be more, or nil), needs (list of
-- {vram =, ram =}: the least budgets of each candidate), works(vram, ram) -> is there a plan?, arena (bytes), tokens
-- (of a micro-batch); in words: instead (settings that work with these budgets), knobs (what needs less memory when
-- there is less of it)}.
function refuse.fail(o)
  local more_vram = least(o.needs, "vram", "ram", o.ram)
  local more_ram = least(o.needs, "ram", "vram", o.vram)
  local parts = { problem(o, more_vram, more_ram) }
  parts[#parts + 1] = o.note
  local work = pairs_that_work(o, more_vram, more_ram, smallest(o.needs))
  if #work > 0 then parts[#parts + 1] = table.concat(work, ", or ") .. (#work > 1 and " work" or " works") end
  if #o.instead > 0 then parts[#parts + 1] = table.concat(o.instead, ", or ") .. " works with these budgets" end
  if #o.knobs > 0 then
    parts[#parts + 1] = "less is needed with a smaller " .. table.concat(o.knobs, " or ")
  end
  bs.fail("plan", "%s", table.concat(parts, "; "))
end

return refuse
