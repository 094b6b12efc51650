-- SPDX-License-Identifier: Apache-2.0
--- Budgets as sizes, fractions of what is free, and "auto".
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local budget = require "bs.plan.budget"
local qwen3 = require "bs.family.qwen3"
local tiny = require "tiny"

local VOCAB = 300
local folder = tiny.folder("budget")
tiny.checkpoint(folder, qwen3, tiny.qwen3_config(), "bf16")

local function new(over)
  local s = { model = folder, micro_tokens = 24, lora = { r = 4, alpha = 8 } }
  for key, value in pairs(over) do s[key] = value end
  return job.new(s)
end

-- In a pool of what streaming needs at the least, so that `ram` decides where blocks live.
local smallest
local function open(over)
  if not smallest then
    local j <close> = new { home = "disk", dev_slots = 1 }
    smallest = j.plan.peak
  end
  over.vram = smallest
  return new(over)
end

local function homes(j)
  local n = { gpu = 0, ram = 0, disk = 0 }
  for _, h in pairs(j.plan.homes) do n[h] = n[h] + 1 end
  return n
end

describe("budgets", function()
  it("of recipes are sizes, fractions or auto", function()
    local values = { ["64MiB"] = 64 << 20, ["0"] = 0, ["1"] = 1, ["0.5"] = 0.5, ["1/4"] = 0.25, auto = "auto" }
    for text, value in pairs(values) do
      local got = budget.read({ ram = text }, "ram")
      assert.equal(value, got)
      assert.equal(math.type(value), math.type(got))
    end
    for _, text in ipairs { "1.5", "-1", "-0.5", "3/2", "half", "" } do
      local ok, err = pcall(budget.read, { vram = text }, "vram")
      assert.is_false(ok, text)
      assert.matches("vram=" .. text:gsub("%p", "%%%0") .. ": a size such as 800MiB", tostring(err))
    end
  end)

  it("that are fractions are of what is free", function()
    local device <close> = bs.device.open("cpu", {})
    local cfg = { device = "cpu", vram = 0.5, ram = 1 << 20 }
    local bytes = budget.bytes(cfg, device, false)
    local free = bs.memory_available()
    assert.equal("integer", math.type(bytes.vram))
    assert.is_true(math.abs(bytes.vram - free / 2) < free / 8, ("%d of %d bytes"):format(bytes.vram, free))
    assert.equal(1 << 20, bytes.ram)
  end)

  it("of auto put every block in idle memory: from the second step on nothing is read", function()
    local bounded <close> = open { home = "disk" }
    local least = bounded.plan.host
    local j <close> = open { ram = "auto" }
    assert.equal(0, homes(j).disk)
    local micro = { tiny.micro(1, VOCAB, { 9, 11 }, 2) }
    j:step(micro, { lr = 1e-2, next = true })
    j:step(micro, { lr = 1e-2, next = true })
    local before = j.instance.stream:stats()
    for _ = 1, 3 do j:step(micro, { lr = 1e-2, next = true }) end
    local after, planned = j.instance.stream:stats(), j.instance.placement:bytes(true)
    assert.equal(before.disk_read, after.disk_read)
    assert.equal(3 * planned.link, after.link_bytes - before.link_bytes)
    assert.is_true(j.plan.host > least)
  end)

  it("that hold half of the blocks halve the reads, as planned", function()
    local streamed <close> = open { home = "disk" }
    local whole <close> = open { ram = "auto" }
    local least, most = streamed.plan.host, whole.plan.host
    local half <close> = open { ram = least + (most - least) // 2 }
    local n = homes(half)
    assert.is_true(n.ram > 0 and n.disk > 0, ("%d in ram, %d on disk"):format(n.ram, n.disk))
    local reads = half.instance.placement:bytes(true).disk_read
    assert.is_true(reads > 0 and reads < streamed.instance.placement:bytes(true).disk_read)
    local micro = { tiny.micro(1, VOCAB, { 9, 11 }, 2) }
    for _ = 1, 2 do half:step(micro, { lr = 1e-2 }) end
    local before = half.instance.stream:stats().disk_read
    half:step(micro, { lr = 1e-2 })
    assert.equal(reads, half.instance.stream:stats().disk_read - before)
  end)
end)
