-- SPDX-License-Identifier: Apache-2.0
--- Chooses homes, slots and boundary placement under the budgets. A dry run of the job on `meta` gives
-- the arena and the fixed regions; candidates are scored by sim.lua; bs.plan validates and counts.
local bs = require "bs"
local args = require "bs.settings.args"
local measure = require "bs.plan.measure"
local program = require "bs.instance.program"
local sim = require "bs.plan.sim"

local plan = {}
local K = program.kind
local MIB = 1024 * 1024
-- Pinned staging of an engine (three buffers of 1 MiB) and parsed headers, plans and small host state.
local STAGING = 4 * MIB

local function mib(n) return ("%.1f MiB"):format(n / MIB) end
plan.mib = mib

--- A budget among the settings of a recipe as a job takes it: bytes, a fraction, or "auto".
function plan.budget(cfg, name)
  local text = cfg[name]
  local value = text == "auto" and text or args.size(text) or args.fraction(text)
  if not value or type(value) == "number" and (value < 0 or math.type(value) == "float" and value > 1) then
    bs.fail(2, "%s=%s: a size such as 800MiB, auto, or a fraction of what is free such as 0.5 is expected", name,
      text)
  end
  return value
end

-- What "auto" takes of the free memory. The pool of a CPU device and everything else share one memory.
local AUTO <const> = { gpu = { vram = 1.0, ram = 0.75 }, cpu = { vram = 0.5, ram = 0.25 } }

--- Bytes for those budgets of a job that are "auto" or a fraction of what is free; of a GPU, less what kernels and
-- libraries load later.
function plan.set_budgets(cfg, device)
  local gpu = cfg.device:match("cuda") ~= nil
  local most = gpu and math.floor(device:props().total_bytes * 0.95)
  for _, name in ipairs { "vram", "ram" } do
    local share = cfg[name] == "auto" and AUTO[gpu and "gpu" or "cpu"][name] or cfg[name]
    if math.type(share) == "float" then
      cfg[name] = math.floor(share * (gpu and name == "vram" and most or bs.memory_available()))
    end
  end
end

--- rates= of a job: {link, disk (bytes/s), flops (FLOP/s)}, what is absent being fixed (sim.lua), or "measure":
-- those of this machine now. Anything else ends with exit status 2.
function plan.check_rates(rates)
  if rates == nil or rates == "measure" then return end
  local names = "measure, or a table of link, disk and flops"
  if type(rates) ~= "table" then bs.fail(2, "rates=%s; %s is expected", tostring(rates), names) end
  for name, v in pairs(rates) do
    if not sim.rates.cpu[name] then bs.fail(2, "rates.%s: unknown; %s is expected", tostring(name), names) end
    if type(v) ~= "number" or not (v > 0 and v < math.huge) then
      bs.fail(2, "rates.%s=%s; a number above 0 is expected", name, tostring(v))
    end
  end
end

local function rates_of(job)
  local cfg = job.cfg
  if cfg.rates == "measure" then return measure.rates(job.device, job.model, cfg.micro_tokens, cfg.io) end
  local out = {}
  for name, v in pairs(cfg.device:find "cuda" and sim.rates.cuda or sim.rates.cpu) do out[name] = v end
  for name, v in pairs(cfg.rates or {}) do out[name] = v end
  return out
end

--- FLOPs of each visit of a list where `keep` upper layers are kept: 2 per parameter and token, twice more for
-- recompute and input gradient. tokens: of a step; nil: as many as the job can take. Returns the list and its sum.
function plan.work(job, list, keep, tokens)
  local m, work, sum = job.model, {}, 0
  tokens = tokens or job.cfg.micro_tokens * job.cfg.micros
  for i, v in ipairs(list) do
    local params = m.manifest:block_info(v.block).payload / 2
    local factor = 2
    if v.kind == K.backward and v.layer >= m.config.layers - keep then factor = 2
    elseif v.kind == K.backward or v.kind == K.experts_backward or v.kind == K.mix_backward then factor = 6
    elseif v.kind == K.tile then factor = 4
    elseif v.kind == K.embed then factor = 0 end
    work[i] = factor * params * tokens
    sum = sum + work[i]
  end
  return work, sum
end

-- Bytes of layer inputs that come back over the link before each visit of a list; those of kept layers stay.
local function returns(job, list, keep)
  local m, cfg, bytes = job.model, job.cfg, {}
  local each = cfg.micros * cfg.micro_tokens * m.config.channels * (m.compute == "bf16" and 2 or 4)
  for i, v in ipairs(list) do
    local back = v.kind == K.backward or v.kind == K.remix
    bytes[i] = back and v.layer < m.config.layers - keep and each or 0
  end
  return bytes
end

-- n of a list, evenly spread, so that the link works all the time.
local function spread(list, n)
  local picked = {}
  for i = 0, n - 1 do picked[i + 1] = list[math.floor((i + 0.5) * #list / n) + 1] end
  return picked
end

local function head(list, n) return table.move(list, 1, n, 1, {}) end

-- As many blocks of `list` as fit `budget` bytes, chosen by `pick`. bytes: of each block.
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

-- Orders in which blocks may get homes: {first, rest, pick}. A home above the lowest trained layer saves two loads
-- of a step and one below it saves one, but work and loads have to meet: over all, even; where a step visits twice,
-- even; there, from the block that a step leaves last on, so that the next forward is loaded meanwhile.
local function orders(job)
  local norm, visits, last, all = job.model.norm.block, {}, {}, {}
  for i, v in ipairs(job.program) do
    if v.block ~= norm then
      if not visits[v.block] then all[#all + 1] = v.block end
      visits[v.block], last[v.block] = (visits[v.block] or 0) + 1, i
    end
  end
  local twice, once, late = {}, {}, {}
  for _, b in ipairs(all) do
    if visits[b] > 1 then twice[#twice + 1] = b else once[#once + 1] = b end
  end
  table.move(twice, 1, #twice, 1, late)
  table.sort(late, function(a, b) return last[a] > last[b] end)
  local even = { all = all, first = all, rest = {}, pick = spread }
  if job.cfg.home ~= "auto" or #twice == 0 then return { even } end
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

-- Sizes of all blocks, by number.
local function sizes_of(job)
  local m, s = job.model, { payload = {}, raw = {}, slot = {} }
  for b = 0, m.n_blocks - 1 do
    local info = m.manifest:block_info(b)
    s.payload[b], s.raw[b], s.slot[b] = info.payload, info.raw_bytes, info.slot_bytes
  end
  return s
end

-- Homes of a candidate: on the device, and in ram out of what is left.
local function place(job, sizes, order, gpu_budget, ram_budget)
  local m, homes = job.model, {}
  for b = 0, m.n_blocks - 1 do homes[b] = "disk" end
  homes[m.norm.block] = "gpu"
  local forced = job.cfg.home
  if forced ~= "auto" then
    for _, b in ipairs(order.all) do homes[b] = forced end
    return homes
  end
  local gpu = choose(order, order.all, gpu_budget, sizes.slot)
  for _, b in ipairs(gpu) do homes[b] = "gpu" end
  for _, b in ipairs(choose(order, without(order.all, gpu), ram_budget, sizes.raw)) do homes[b] = "ram" end
  return homes
end

local function place_blocks(job, homes, dev_slots, host_slots)
  return bs.placement.new {
    manifest = job.model.manifest, homes = homes, dev_slots = dev_slots, host_slots = host_slots,
    program = job.program, cyclic = true,
  }
end

local function needs_staging(homes)
  for _, h in pairs(homes) do
    if h ~= "ram" then return true end
  end
  return false
end

-- Bytes of a choice: device regions outside slots and homes, and host bytes outside them.
local function other_bytes(job, choice)
  local batch, dry = job:batch_config(), job:needs(choice.keep)
  local store_dev, store_host = bs.store.bytes(batch, job:store_keys(choice.boundaries, choice.keep))
  local _, rows_host = bs.embedding.bytes(job.model.manifest, job.model.rows, choice.rows, batch)
  local batch_host = batch.micros * batch.tokens * 48
  return dry.other + store_dev + dry.arena, store_host + rows_host + STAGING + batch_host
end

-- One candidate made complete, or nil and the least budgets that it would need.
local function complete(job, choice, sizes, rates)
  local cfg, order = job.cfg, choice.order
  local dev_other, host_other = other_bytes(job, choice)
  local bare <close> = place_blocks(job, place(job, sizes, order, 0, 0), choice.dev_slots, choice.host_slots)
  local need_dev, need_host = dev_other + bare:device_bytes(), host_other + bare:host_bytes()
  if need_dev > cfg.vram or need_host > cfg.ram then return nil, need_dev, need_host end
  local homes = place(job, sizes, order, cfg.vram - need_dev, cfg.ram - need_host)
  choice.homes = homes
  if not needs_staging(homes) then choice.host_slots = 0 end
  local p <close> = place_blocks(job, homes, choice.dev_slots, choice.host_slots)
  choice.peak = dev_other + p:device_bytes()
  choice.host = host_other + p:host_bytes()
  if choice.peak > cfg.vram or choice.host > cfg.ram then
    return nil, choice.peak, choice.host
  end
  local function size(b) return sizes.payload[b], sizes.raw[b] end
  choice.seconds, choice.busy = sim.step {
    transfers = p:transfers(true), size = size, work = plan.work(job, job.program, choice.keep),
    host_slots = choice.host_slots, rates = rates,
    back = choice.boundaries == "host" and returns(job, job.program, choice.keep) or nil,
  }
  return choice
end

local function candidates(job)
  local cfg, list = job.cfg, {}
  local function one_of(v, options)
    if v == "auto" then return options end
    return { v }
  end
  local ways = orders(job)
  local boundaries = one_of(cfg.boundaries, { "device", "host" })
  local slots, staging = one_of(cfg.dev_slots, { 3, 2, 1 }), one_of(cfg.host_slots, { 3, 2, 1 })
  local row_homes = (cfg.home == "disk" or job.model.updatable) and { "disk" } or cfg.home ~= "auto" and { "ram" }
    or { "ram", "disk" }
  for _, s in ipairs(slots) do
    for _, h in ipairs(staging) do
      for _, b in ipairs(boundaries) do
        for _, r in ipairs(row_homes) do
          for _, order in ipairs(ways) do
            list[#list + 1] = {
              order = order, dev_slots = s, host_slots = h, boundaries = b, rows = r,
              keep = cfg.keep == "auto" and 0 or cfg.keep,
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

-- The best placement with activations of upper layers kept, where that is faster.
local function keep_more(job, best, sizes, rates)
  local most = job.keepable
  if job.cfg.keep ~= "auto" or job.cfg.boundaries == "host" or most == 0 then return best end
  local chosen, last = best, 0
  for quarter = 4, 1, -1 do
    local n = most * quarter // 4
    if n > 0 and n ~= last then
      local c = { order = best.order, dev_slots = best.dev_slots, host_slots = best.host_slots, rows = best.rows,
        boundaries = best.boundaries, keep = n }
      local done = complete(job, c, sizes, rates)
      if done and done.seconds < chosen.seconds * 0.999 then chosen = done end
      last = n
    end
  end
  return chosen
end

--- Choose. Returns the choice {homes, dev_slots, host_slots, boundaries, rows, keep, peak, host, seconds, rates}; a
-- budget that cannot work ends with exit status 3 and says the smallest that does.
function plan.choose(job)
  local best, least_dev, least_host
  local rates, sizes = rates_of(job), sizes_of(job)
  for _, c in ipairs(candidates(job)) do
    local done, dev, host = complete(job, c, sizes, rates)
    if done then
      if not best or better(done, best) then best = done end
    else
      least_dev = math.min(least_dev or dev, dev)
      least_host = math.min(least_host or host, host)
    end
  end
  if best then
    best = keep_more(job, best, sizes, rates)
    best.rates = rates
    return best
  end
  local cfg = job.cfg
  local parts = {}
  if least_dev > cfg.vram then
    parts[#parts + 1] = ("vram=%s is too small: the smallest that works is %s (%d bytes; %s of it are "
      .. "activations of one micro-batch of %d tokens)%s"):format(mib(cfg.vram), mib(least_dev), least_dev,
      mib(job:needs(cfg.keep == "auto" and 0 or cfg.keep).arena), cfg.micro_tokens,
      job.vram_note and "; " .. job.vram_note or "")
  end
  if least_host > cfg.ram then
    parts[#parts + 1] = ("ram=%s is too small: the smallest that works is %s (%d bytes)"):format(
      mib(cfg.ram), mib(least_host), least_host)
  end
  if #parts == 0 then
    parts[1] = ("vram=%s with ram=%s is too small: each budget alone would do with a larger other one; "
      .. "%s and %s work at the least"):format(mib(cfg.vram), mib(cfg.ram), mib(least_dev), mib(least_host))
  end
  bs.fail(3, "%s", table.concat(parts, "; "))
end

--- One line: what is where.
function plan.describe(job, choice)
  local n = { gpu = 0, ram = 0, disk = 0 }
  for b, h in pairs(choice.homes) do
    if b ~= job.model.norm.block then n[h] = n[h] + 1 end
  end
  return ("%d blocks: %d gpu, %d ram, %d disk; %d device slots, %d staging slots; boundaries on %s%s; "
    .. "embedding rows from %s; device peak %s, host %s"):format(n.gpu + n.ram + n.disk, n.gpu, n.ram,
    n.disk, choice.dev_slots, choice.host_slots, choice.boundaries,
    choice.keep > 0 and (", activations of %d layers kept"):format(choice.keep) or "", choice.rows, mib(choice.peak),
    mib(choice.host))
end

plan.place_blocks = place_blocks

return plan
