-- SPDX-License-Identifier: Apache-2.0
--- What measurements are made with: a job of the layers alone, walks that follow each other, rates.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local job = require "bs.job"
local tiny = require "tiny"

local hf = tiny.qwen3_config()
local dir = tiny.folder("stack")
tiny.checkpoint(dir, family.find(hf), hf, "bf16")
local micro = tiny.micro(3, hf.vocab_size, { 9, 5 })

local function open(over)
  local cfg = {
    model = dir, stack = true, home = "disk", micro_tokens = 16, lora = { r = 2, targets = "all", top_fraction = 0.5 },
  }
  for key, value in pairs(over or {}) do cfg[key] = value end
  return job.new(cfg)
end

-- Adapters that do something: B is zero at first.
local function stir(j)
  for _, a in ipairs(j.spec.adapters) do
    local params, b = j.instance.params, j.instance.adapter[a.full].b
    params:set(b, tiny.tensor(a.full, params:get(b):dims()))
  end
end

local function hashes(j)
  local out = {}
  for name, a in pairs(j:gradients()) do out[name] = a:hash() end
  return out
end

-- Half the mean square of the last hidden states.
local function loss_of(j)
  local sum, n
  j:walk({ micro }, { mode = "loss", observe = function(_, i, _, a)
    if i < j.model.config.layers then return end
    sum, n = 0, a:count()
    for _, v in ipairs(a:table()) do sum = sum + v * v end
  end })
  return sum / (2 * n)
end

describe("a stack", function()
  it("has the same gradients wherever its blocks live", function()
    local all = {}
    for i, home in ipairs { "disk", "gpu", "ram" } do
      local j <close> = open { home = home }
      stir(j)
      j:forward_backward({ micro }, { step = 1 })
      all[i] = hashes(j)
      assert.is_true(next(all[i]) ~= nil and j.instance.params:norm() > 0)
    end
    assert.same(all[1], all[2])
    assert.same(all[1], all[3])
  end)

  it("has the gradient of half the mean square of the last hidden states", function()
    local j <close> = open()
    stir(j)
    j:forward_backward({ micro }, { step = 1 })
    local ids = j.instance.adapter[j.spec.adapters[1].full]
    local g, value = j.instance.params:grad(ids.b):table(), j.instance.params:get(ids.b)
    local norm = 0
    for _, v in ipairs(g) do norm = norm + v * v end
    local h, sides = 0.05 / math.sqrt(norm), {}
    for side = 1, 2 do
      local moved = value:table()
      for i, v in ipairs(g) do moved[i] = moved[i] + (3 - 2 * side) * h * v end
      j.instance.params:set(ids.b, bs.array.new("f32", value:dims(), moved))
      sides[side] = loss_of(j)
    end
    local slope = (sides[1] - sides[2]) / (2 * h)
    assert.is_true(math.abs(slope - norm) < 1e-2 * norm, ("%g, expected %g"):format(slope, norm))
  end)

  it("moves the planned bytes when walks follow each other", function()
    local j <close> = open { trainable = "none", lora = nil, home = "ram", dev_slots = 2 }
    j:walk({ micro }, { mode = "loss", next = true })
    local before = j.instance.stream:stats()
    for _ = 1, 3 do j:walk({ micro }, { mode = "loss", next = true }) end
    local after = j.instance.stream:stats()
    assert.is_true(before.wasted == 0 and after.wasted == 0)
    assert.equal(3 * j.instance.placement:bytes(true).link, after.link_bytes - before.link_bytes)
  end)
end)

describe("rates", function()
  it("are of the bytes asked for", function()
    local device <close> = bs.device.open("cpu", { threads = 1 })
    assert.is_true(bs.rates.copy(device, { bytes = 4096, n = 2 }) > 0)
    assert.is_true(bs.rates.copy(device, { bytes = 4096, out = true }) > 0)
    assert.is_true(bs.rates.gemm(device, { m = 8, n = 16, k = 32 }) > 0)
    local j <close> = open()
    local m, payload, raw = j.model.manifest, 0, 0
    for b = 0, 2 do
      payload, raw = payload + m:block_info(b).payload, raw + m:block_info(b).raw_bytes
    end
    local r = bs.rates.read(device, m, { 0, 1, 2 }, { request_bytes = 4096, depth = 2 })
    assert.is_true(r.bytes >= payload and r.bytes <= raw and r.seconds > 0)
  end)

  it("refuse what cannot be measured", function()
    local meta <close> = bs.device.open("meta", {})
    local cpu <close> = bs.device.open("cpu", { threads = 1 })
    assert.error_matches(function() bs.rates.copy(meta, { bytes = 64 }) end, "executes nothing")
    assert.error_matches(function() bs.rates.copy(cpu, { bytes = 0 }) end, "at least one")
    assert.error_matches(function() bs.rates.gemm(cpu, { dtype = "i32", m = 1, n = 1, k = 1 }) end, "f32 or bf16")
    local j <close> = open()
    assert.error_matches(function() bs.rates.read(cpu, j.model.manifest, { 99 }) end, "no such block")
  end)
end)
