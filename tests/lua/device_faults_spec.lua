-- SPDX-License-Identifier: Apache-2.0
--- What a device may refuse: page-locks, memory that was free when the plan was made, any operation in the
-- middle of a step. Numbers stay the same or the run ends with one message; nothing is half saved.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local job = require "bs.job"
local run = require "bs.train.loop"
local target = require "target"
local tiny = require "tiny"

-- Losses of three steps and the adapter after them.
local function steps(j)
  local losses = {}
  for s = 1, 3 do losses[s] = j:step({ broken.micro(s) }, { lr = 1e-2, next = s < 3 }).loss end
  return losses, tiny.digest(j:parameters())
end

local losses, adapter
setup(function()
  local j <close> = job.new(broken.settings { home = "gpu" })
  losses, adapter = steps(j)
end)

-- Lines that libbs logs while fn runs.
local function logged(fn)
  local lines = {}
  bs.log_to(function(line) lines[#lines + 1] = line end)
  local ok, err = pcall(fn)
  bs.log_to(nil)
  assert(ok, err)
  return lines
end

describe("a page-lock that is refused", function()
  after_each(broken.check_usable)

  local placements = {
    { home = "ram" }, { home = "disk" }, { home = "ram", boundaries = "host", dev_slots = 1 },
    { home = "disk", boundaries = "host", dev_slots = 1, host_slots = 1 },
  }
  for i, p in ipairs(placements) do
    for _, n in ipairs { 1, 4, 6 } do -- all of it; not the engine's own buffers; homes or slots
      it(("in placement %d from number %d on costs time and no bit, and is told once"):format(i, n), function()
        local lines = logged(function()
          local settings = { device = target.check, device_options = { fail_pin = n } }
          for key, value in pairs(p) do settings[key] = value end
          local j <close> = job.new(broken.settings(settings))
          local got, values = steps(j)
          assert.same(losses, got)
          assert.equal(adapter, values)
          local violations, text = j.device:violations()
          assert.equal(0, violations, text)
          local unpinned = j.device:props().unpinned_bytes
          if n == 1 then assert.is_true(unpinned > 3 << 20) end -- three staging buffers of 1 MiB, and more
          local residency = run.residency(j, { time = 0, disk = 0, rows = 0, link = 0, disk_stall = 0 },
            { time = 1, disk = 0, rows = 0, link = 0, disk_stall = 0 })
          assert.equal(unpinned > 0, residency:find("of ram are not page-locked", 1, true) ~= nil)
        end)
        local told = 0
        for _, line in ipairs(lines) do
          if line:find("page-locked", 1, true) then
            told = told + 1
            assert.matches("injected", line)
            assert.matches("several times slower", line)
            assert.matches("ulimit %-l", line)
          end
        end
        assert.equal(1, told)
      end)
    end
  end
end)

describe("device memory that is taken after the plan", function()
  after_each(broken.check_usable)

  it("is planned without, once, with the same numbers", function()
    -- A capacity that makes the pool much larger than what kernels need for themselves.
    local settings = { home = "auto", dev_slots = "auto", micro_tokens = 8192 }
    local lines = {}
    local function peak()
      local j <close> = job.new(broken.settings(settings))
      return j.plan.peak
    end
    local whole = peak()
    settings.device_options = { device_left = math.floor(whole * 0.95) }
    settings.log = function(line) lines[#lines + 1] = line end
    local j <close> = job.new(broken.settings(settings))
    assert.is_true(j.plan.peak <= whole * 0.95 * 0.95)
    assert.equal(1, #lines)
    assert.matches("were free for the plan and are not any more; planned again for", lines[1])
    local got, values = steps(j)
    assert.same(losses, got)
    assert.equal(adapter, values)
    assert.equal(j.plan.peak, j.instance.engine:stats().peak_bytes)
  end)

  it("ends with status 3 where nothing fits what is left", function()
    for _, home in ipairs { "auto", "gpu", "disk" } do
      broken.fails(3, { "is too small: the smallest that works is", "has no more free" }, broken.train,
        { home = home, device_options = { device_left = 4096 } })
    end
  end)
end)

describe("a device that is lost in a step", function()
  after_each(broken.check_usable)

  local out = broken.root .. "/lost"
  local function train(fail_call)
    local j <close> = job.new(broken.settings { home = "disk", device_options = { fail_call = fail_call } })
    local data = { step = function(_, s) return { broken.micro(s) } end }
    j:run { data = data, steps = 2, lr = 1e-2, out = out, say = function() end }
  end

  it("ends the run with one message and saves nothing", function()
    local ended = 0
    for n = 400, 1600, 150 do
      os.execute("rm -rf '" .. out .. "'")
      local ok, err = pcall(train, n)
      if ok then break end
      ended = ended + 1
      assert.equal("device", bs.code(err), err)
      assert.matches("%(injected%)", err)
      assert.is_false(bs.is_file(out .. "/adapter_config.json"))
      assert.is_false(bs.is_file(out .. "/adapter_model.safetensors"))
    end
    assert.is_true(ended >= 3)
  end)

  it("leaves an adapter that was there as it was", function()
    os.execute("rm -rf '" .. out .. "'")
    train(0)
    local function content()
      local p <close> = io.popen("cd '" .. out .. "' && ls -A && cat *")
      return p:read("a")
    end
    local before = content()
    assert.is_false((pcall(train, 500)))
    assert.equal(before, content())
  end)

  it("is status 1 and one line for the shell", function()
    os.execute("rm -rf '" .. out .. "'")
    broken.run_fails(1, { "failed (injected)", "[device]" },
      { "tests/support/lost_device.lua", broken.good, "500", out, target.device, target.dtype })
    assert.is_false(bs.is_file(out .. "/adapter_config.json"))
  end)
end)
