-- SPDX-License-Identifier: Apache-2.0
--- Which homes a plan chooses, and the simulation that scores them.
package.path = "tests/support/?.lua;" .. package.path
local family = require "bs.model.find_family"
local job = require "bs.job"
local rates = require "bs.plan.rates"
local sim = require "bs.plan.sim"
local costs = require "bs.plan.costs"
local tiny = require "tiny"

local hf = tiny.qwen3_config()
hf.num_hidden_layers = 16
local dir = tiny.folder("plan")
tiny.checkpoint(dir, family.find(hf), hf, "bf16")

local function open(over)
  local cfg = {
    model = dir, stack = true, device = "meta", dry = true, micro_tokens = 16,
    lora = { r = 2, targets = "all", top_fraction = 0.5 },
  }
  for key, value in pairs(over or {}) do cfg[key] = value end
  return job.new(cfg)
end

-- A budget that has room for n layers beside what a job on disk needs.
local function room_for(n, name)
  local j <close> = open { home = "disk", dev_slots = 2, host_slots = 2 }
  local info = j.model.manifest:block_info(j.model.layers[0].trunk.block)
  return name == "vram" and j.plan.peak + n * info.slot_bytes or j.plan.host + n * info.raw_bytes
end

-- "ddddddddddddrrgg": the first letters of the layers' homes.
local function homes(j)
  local out = {}
  for i = 0, j.model.config.layers - 1 do out[#out + 1] = j.plan.homes[j.model.layers[i].trunk.block]:sub(1, 1) end
  return table.concat(out)
end

local link_bound = { link = 1e6, disk = 1e12, flops = 1e15 }
local disk_bound = { link = 1e12, disk = 1e6, flops = 1e15 }

describe("homes on the device", function()
  it("are where a step visits twice, when the link is what it waits for", function()
    local j <close> = open { vram = room_for(3, "vram"), dev_slots = 2, host_slots = 2, rates = link_bound }
    assert.matches("^[rd][rd][rd][rd][rd][rd][rd][rd]", homes(j))
    local _, n = homes(j):gsub("g", "")
    assert.equal(3, n)
    assert.equal(link_bound.link, j.plan.rates.link)
  end)

  it("save what the plan says", function()
    local cfg = { vram = room_for(3, "vram"), dev_slots = 2, host_slots = 2, rates = link_bound, home = "auto" }
    local j <close> = open(cfg)
    local info = j.model.manifest:block_info(j.model.layers[0].trunk.block)
    local all <close> = open { dev_slots = 2, host_slots = 2, home = "ram" }
    local saved = all.instance.placement:bytes(true).link - j.instance.placement:bytes(true).link
    assert.is_true(saved >= 5 * info.payload, ("%d bytes saved, blocks have %d"):format(saved, info.payload))
    local seconds = j.instance.placement:bytes(true).link / link_bound.link
    assert.is_true(math.abs(j.plan.busy.link - seconds) < 1e-9 * seconds)
  end)

  it("do not depend on the day", function()
    local a <close> = open { vram = room_for(3, "vram") }
    assert.same(rates.fixed.cpu, a.plan.rates)
  end)
end)

it("homes in ram are where a step visits twice, when it waits for the disk", function()
  local j <close> = open { vram = room_for(0, "vram"), ram = room_for(4, "ram"), dev_slots = 2, host_slots = 2,
    rates = disk_bound }
  assert.matches("^dddddddd", homes(j))
  assert.matches("r", homes(j))
end)

describe("rates", function()
  it("are measured where that is asked for", function()
    local j <close> = job.new {
      model = dir, stack = true, micro_tokens = 16, lora = { r = 2, targets = "all" }, rates = "measure",
    }
    local n = 0
    for name in pairs(rates.fixed.cpu) do
      assert.is_true(j.plan.rates[name] > 0, name)
      n = n + 1
    end
    assert.equal(3, n)
    assert.not_same(rates.fixed.cpu, j.plan.rates)
  end)

  it("that are no rates end with status 2", function()
    for _, case in ipairs {
      { "fast", "rates=fast; measure, or a table" }, { 7, "rates=7" }, { { speed = 1 }, "rates.speed: unknown" },
      { { link = 0 }, "rates.link=0; a number above 0" }, { { disk = "2e9" }, "rates.disk=2e9" },
      { { flops = 0 / 0 }, "rates.flops=.?nan" }, { { flops = math.huge }, "rates.flops=inf" },
    } do
      local ok, err = pcall(open, { rates = case[1] })
      assert.is_false(ok)
      assert.equal(2, err.bs_exit)
      assert.matches(case[2], tostring(err))
    end
  end)
end)

describe("the simulation", function()
  local function step(o)
    o.rates, o.host_slots = o.rates or { disk = 1, link = 1, flops = 1 }, o.host_slots or 1
    o.size = o.size or function() return 2, 2 end
    return sim.step(o)
  end

  it("adds up what cannot overlap and overlaps the rest", function()
    -- One slot: a load of 2 waits for the visit before it, work of 1 follows.
    local one = { { block = 0, load = true, slot_free_after = -1 }, { block = 1, load = true, slot_free_after = 0 } }
    assert.equal(6, (step { transfers = one, work = { 1, 1 } }))
    -- Two slots: the link never stops.
    local two = { { block = 0, load = true, slot_free_after = -2 }, { block = 1, load = true, slot_free_after = -1 } }
    local seconds, busy = step { transfers = two, work = { 1, 1 } }
    assert.equal(4, seconds)
    assert.same({ disk = 0, link = 4, compute = 2 }, busy)
    assert.equal(10, (step { transfers = two, work = { 5, 5 } }))
  end)

  it("counts what else comes back over the link", function()
    local two = { { block = 0, load = true, slot_free_after = -2 }, { block = 1, load = false } }
    local seconds, busy = step { transfers = two, work = { 1, 1 }, back = { 0, 3 } }
    assert.equal(5, busy.link)
    assert.is_true(seconds >= 5)
  end)

  it("reads at the disk's rate", function()
    local t = { { block = 0, load = true, read = true, slot_free_after = -1 } }
    local slow = { disk = 0.25, link = 1e9, flops = 1 }
    -- Work is hidden behind reads that follow each other; with one host slot nothing is read ahead.
    assert.equal(8, (step { transfers = t, work = { 1 }, rates = slow, host_slots = 2 }) // 1)
    assert.equal(16, (step { transfers = t, work = { 1 }, rates = slow, host_slots = 1 }) // 1)
  end)
end)

it("work is counted by visits, and for the tokens that are asked for", function()
  local j <close> = open()
  local list, sum = costs.flops(j.spec, j.spec.program, 0, 16)
  local _, twice = costs.flops(j.spec, j.spec.program, 0, 32)
  assert.equal(#j.spec.program, #list)
  assert.equal(2 * sum, twice)
  assert.is_true(sum > 0)
end)
