-- SPDX-License-Identifier: Apache-2.0
--- Chooses a plan under the budgets: homes, slots, where boundaries wait, how many layers are kept. Candidates are
-- made complete with the homes that fit (homes.lua), counted by bs.placement, and scored by a simulated step
-- (sim.lua). A plan is plain data.
local bs = require "bs"
local budget = require "bs.plan.budget"
local homes = require "bs.plan.homes"
local refuse = require "bs.plan.refuse"
local store_keys = require "bs.instance.store_keys"
local sim = require "bs.plan.sim"
local costs = require "bs.plan.costs"

local choose = {}
local mib <const> = budget.mib
-- Small pinned buffers of an engine (three of 1 MiB), and parsed headers, placements, stacks and the heap of a run: a
-- run of 86 MiB was measured to have up to 2.5 MiB of these.
local STAGING <const> = 11 << 19

-- Sizes of all blocks, by number.
local function sizes_of(m)
  local s = { payload = {}, raw = {}, slot = {} }
  for b = 0, m.n_blocks - 1 do
    local info = m.manifest:block_info(b)
    s.payload[b], s.raw[b], s.slot[b] = info.payload, info.raw_bytes, info.slot_bytes
  end
  return s
end

local function needs_host_slots(home)
  for _, h in pairs(home) do
    if h ~= "ram" then return true end
  end
  return false
end

-- Bytes of a candidate: device regions outside slots and homes, and host bytes outside them.
local function other_bytes(s, c)
  local spec, needs = s.spec, s.needs(c.keep)
  local batch, m = spec.batch, spec.model
  local store_dev, store_host = bs.store.bytes(batch, (store_keys.list(spec, c.boundaries, c.keep)))
  local _, rows_host = bs.embedding.bytes(m.manifest, m.row_table, c.rows, batch)
  local batch_host = batch.micros * batch.tokens * 48
  return needs.other + store_dev + needs.arena, store_host + rows_host + STAGING + batch_host
end

local function simulate(s, c, placed)
  local spec, sizes = s.spec, s.sizes
  return sim.step {
    transfers = placed:transfers(true), size = function(b) return sizes.payload[b], sizes.raw[b] end,
    work = costs.flops(spec, spec.program, c.keep), host_slots = c.host_slots, rates = s.rates,
    back = c.boundaries == "host" and costs.returns(spec, spec.program, c.keep) or nil,
  }
end

-- The plan of a candidate, or nil and the least budgets that it would need. What is left of the budgets when every
-- block is on disk is for homes.
local function complete(s, c)
  local dev_other, host_other = other_bytes(s, c)
  local bare <close> = s.spec:placement {
    homes = homes.place(s.spec.model, c.order, s.sizes, s.home, 0, 0), dev_slots = c.dev_slots,
    host_slots = c.host_slots,
  }
  local need_dev, need_host = dev_other + bare:device_bytes(), host_other + bare:host_bytes()
  if need_dev > s.vram or need_host > s.ram then return nil, need_dev, need_host end
  local home = homes.place(s.spec.model, c.order, s.sizes, s.home, s.vram - need_dev, s.ram - need_host)
  local plan = {
    homes = home, dev_slots = c.dev_slots, host_slots = needs_host_slots(home) and c.host_slots or 0,
    boundaries = c.boundaries, rows = c.rows, keep = c.keep, rates = s.rates,
  }
  local placed <close> = s.spec:placement(plan)
  plan.peak, plan.host = dev_other + placed:device_bytes(), host_other + placed:host_bytes()
  if plan.peak > s.vram or plan.host > s.ram then return nil, plan.peak, plan.host end
  plan.seconds, plan.busy = simulate(s, plan, placed)
  return plan
end

local function one_of(wish, options) return wish == "auto" and options or { wish } end

-- Everything that the settings leave open, in an order in which the first of equals is taken.
local function candidates(s)
  local m, list = s.spec.model, {}
  -- While the mix of a staged layer is computed for all micro-batches, many groups of experts can come.
  local slots = m.family.stages and { 3, 2, 1, 8, 16 } or { 3, 2, 1 }
  local orders = homes.orders(s.spec.program, m.norm.block, s.home ~= "auto")
  local rows = { "ram", "disk" }
  if s.home == "disk" or m.updatable then rows = { "disk" } elseif s.home ~= "auto" then rows = { "ram" } end
  for _, dev_slots in ipairs(one_of(s.dev_slots, slots)) do
    for _, host_slots in ipairs(one_of(s.host_slots, { 3, 2, 1 })) do
      for _, boundaries in ipairs(one_of(s.boundaries, { "device", "host" })) do
        for _, row_home in ipairs(rows) do
          for _, order in ipairs(orders) do
            list[#list + 1] = {
              order = order, dev_slots = dev_slots, host_slots = host_slots, boundaries = boundaries, rows = row_home,
              keep = s.keep == "auto" and 0 or s.keep,
            }
          end
        end
      end
    end
  end
  return list
end

-- Clearly less time (more slots come first, and stand more than is simulated); of the same slots also less that
-- moves in the same time.
local function better(a, b)
  if a.seconds < b.seconds * 0.99 then return true end
  if a.dev_slots ~= b.dev_slots or a.host_slots ~= b.host_slots then return false end
  return a.seconds < b.seconds * 0.999
    or a.seconds <= b.seconds and a.busy.link + a.busy.disk < b.busy.link + b.busy.disk
end

-- The best plan with activations of upper layers kept, where that is faster. Not where boundaries="host" was asked
-- for: the inputs of kept layers stay on the device.
local function keep_more(s, best, order)
  local most = s.spec.keepable
  if s.keep ~= "auto" or s.boundaries == "host" or most == 0 then return best end
  local chosen, last = best, 0
  for quarter = 4, 1, -1 do
    local n = most * quarter // 4
    if n > 0 and n ~= last then
      local plan = complete(s, {
        order = order, dev_slots = best.dev_slots, host_slots = best.host_slots, rows = best.rows,
        boundaries = best.boundaries, keep = n,
      })
      if plan and plan.seconds < chosen.seconds * 0.999 then chosen = plan end
      last = n
    end
  end
  return chosen
end

-- Is there a plan with these settings changed?
local function works(s, changes)
  local wish = setmetatable(changes, { __index = s })
  for _, c in ipairs(candidates(wish)) do
    if complete(wish, c) then return true end
  end
  return false
end

-- No candidate fits. needs: the least budgets of each.
local function fail(s, needs)
  local instead = {}
  for _, name in ipairs { "home", "boundaries", "dev_slots", "host_slots", "keep" } do
    local free = name ~= "home" or not s.spec.model.updatable -- which its home has decided
    if free and s[name] ~= "auto" and works(s, { [name] = "auto" }) then instead[#instead + 1] = name .. "=auto" end
  end
  refuse.fail {
    vram = s.vram, ram = s.ram, note = s.note, needs = needs, arena = s.needs(s.keep == "auto" and 0 or s.keep).arena,
    tokens = s.spec.batch.tokens, instead = instead, knobs = s.knobs,
    works = function(vram, ram) return works(s, { vram = vram, ram = ram }) end,
  }
end

--- Choose a plan for a spec. o: {needs (dry.needs), vram, ram (bytes), note (why vram is less than was asked for, or
-- nil), rates {disk, link, flops}, and the settings that are to be kept to or "auto": home, boundaries, dev_slots,
-- host_slots, keep; knobs: the caller's settings of which less needs less memory, in words}. Returns {homes, dev_slots,
-- host_slots, boundaries, rows, keep, peak, host (bytes), seconds, busy (of a simulated step), rates}. Budgets that
-- cannot work end with exit status 3, which says what does (refuse.lua).
function choose.plan(spec, o)
  local s = setmetatable({ spec = spec, sizes = sizes_of(spec.model) }, { __index = o })
  local best, order
  local needs = {}
  for _, c in ipairs(candidates(s)) do
    local plan, dev, host = complete(s, c)
    if not plan then
      needs[#needs + 1] = { vram = dev, ram = host }
    elseif not best or better(plan, best) then
      best, order = plan, c.order
    end
  end
  if not best then fail(s, needs) end
  return keep_more(s, best, order)
end

--- One line: what is where.
function choose.describe(model, plan)
  local n = { gpu = 0, ram = 0, disk = 0 }
  for b, h in pairs(plan.homes) do
    if b ~= model.norm.block then n[h] = n[h] + 1 end
  end
  return ("%d blocks: %d gpu, %d ram, %d disk; %d device slots, %d host slots; boundaries on %s%s; "
    .. "embedding rows from %s; device peak %s, host %s"):format(n.gpu + n.ram + n.disk, n.gpu, n.ram, n.disk,
    plan.dev_slots, plan.host_slots, plan.boundaries,
    plan.keep > 0 and (", activations of %d layers kept"):format(plan.keep) or "", plan.rows, mib(plan.peak),
    mib(plan.host))
end

return choose
