-- SPDX-License-Identifier: Apache-2.0
--- What a training run leaves when something fails in it: the adapter of the steps before, to the byte, and the error
-- that came, with its exit status.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"

local STEPS <const> = 3 -- the step that fails
local counter = 0

local function folder()
  counter = counter + 1
  return ("%s/rescue-%d"):format(broken.root, counter)
end

local function adapter(dir)
  local path = dir .. "/adapter_model.safetensors"
  return bs.is_file(path) and broken.read(path)
end

-- A run whose step() does damage(job) before the rows of step STEPS. Returns the folder, what came, and the log lines.
local function run(settings, damage, o)
  local out, lines = folder(), {}
  local rows = {}
  local j <close> = job.new(broken.settings(settings))
  function rows.step(_, step)
    if step == STEPS and damage then damage(j) end
    return { broken.micro(step) }
  end
  o = o or {}
  o.data, o.steps, o.lr, o.out, o.say = rows, o.steps or 5, 1e-2, o.out or out, function() end
  bs.log_to(function(line) lines[#lines + 1] = line end)
  local result = table.pack(pcall(j.run, j, o))
  bs.log_to(nil)
  return out, result, table.concat(lines, "\n")
end

-- The adapter of so many steps that nothing disturbs.
local function undisturbed(steps)
  local out, result = run({}, nil, { steps = steps })
  assert.is_true(result[1], tostring(result[2]))
  return adapter(out)
end

local function check_saved(out, result, log, code)
  assert.is_false(result[1])
  local err = result[2]
  assert.equal(code, type(err) == "table" and err.bs_exit or 1, tostring(err))
  assert.is_nil(tostring(err):find("stack traceback", 1, true), tostring(err))
  assert.equal(undisturbed(STEPS - 1), adapter(out))
  assert.is_truthy(log:find(("the adapter of %d steps is saved in %s"):format(STEPS - 1, out), 1, true), log)
  return tostring(err)
end

local function model() return broken.checkpoint(function() end) end

-- Rows of an evaluation that fails: it is told that the file cannot be read.
local held_out = { passes = function() return 1 end }
function held_out.pass() bs.fail("data", "rows cannot be read") end

describe("the adapter of the steps before", function()
  after_each(broken.check_usable)

  it("is saved when the checkpoint gets shorter", function()
    local dir = model()
    local path = dir .. "/model.safetensors"
    local out, result, log = run({ model = dir, dev_slots = 1, host_slots = 1 }, function()
      broken.write(path, broken.weights:sub(1, 40000))
    end)
    local err = check_saved(out, result, log, 1)
    assert.is_truthy(err:find("model.safetensors", 1, true), err)
  end)

  it("is saved when the checkpoint is removed", function()
    local dir = model()
    local out, result, log = run({ model = dir }, function() os.remove(dir .. "/model.safetensors") end)
    assert.is_truthy(check_saved(out, result, log, 1):find("was removed", 1, true))
  end)

  it("is saved when a number is not finite", function()
    local out, result, log = run({}, function(j)
      local b = j.instance.adapter[j.spec.adapters[1].full].b
      local old = j.instance.params:get(b)
      local bad = bs.array.new("f32", old:dims())
      local step = j.step
      for i = 1, bad:count() do bad:set(i, 3e38) end
      function j.step(...) -- the failing step alone sees it
        j.instance.params:set(b, bad)
        local _ <close> = setmetatable({}, { __close = function() j.instance.params:set(b, old) end })
        return step(...)
      end
    end)
    check_saved(out, result, log, 5)
  end)

  it("is saved when its rows cannot be had, or a step is wrong in itself", function()
    local out, result, log = run({}, function() bs.fail("data", "rows cannot be read") end)
    check_saved(out, result, log, 4)
    local armed = false
    local f = setmetatable({
      layer = function(...)
        if armed then bs.fail("error", "the layer gave up") end
        return qwen3.layer(...)
      end,
    }, { __index = qwen3 })
    for key, value in pairs(qwen3) do f[key] = f[key] or value end
    out, result, log = run({ family = f }, function() armed = true end)
    check_saved(out, result, log, 1)
  end)

  it("is saved when an evaluation fails between the steps", function()
    local calls, real = 0, { passes = held_out.passes }
    function real.pass()
      calls = calls + 1
      return calls > 1 and held_out.pass() or { broken.micro(77) }
    end
    local out, result, log = run({}, nil, { valid = real, eval_every = STEPS - 1 })
    check_saved(out, result, log, 4)
  end)

  it("is not asked for where nothing is to be saved, or no step was made", function()
    local _, result, log = run({}, function() bs.fail("data", "rows cannot be read") end, { out = "" })
    assert.equal(4, result[2].bs_exit)
    assert.equal("", log)
    local out
    out, result, log = run({}, nil, { valid = held_out })
    assert.equal(4, result[2].bs_exit)
    assert.equal("", log)
    assert.is_false(adapter(out))
  end)

  it("is told to be lost with a device, and the first error stays", function()
    local out, result, log = run({ device = target.check, device_options = { fail_call = 3000 } }, nil,
      { steps = 1000 })
    assert.is_false(result[1])
    assert.equal("device", bs.code(result[2]), tostring(result[2]))
    assert.matches("^the adapter of %d+ steps could not be saved: .*injected", log)
    assert.is_false(adapter(out))
  end)

  it("is not saved when an optimizer step has failed half way", function()
    local out, result, log = run({}, function(j)
      function j.instance.apply() bs.fail("error", "half way") end
    end)
    assert.equal("half way", tostring(result[2]))
    assert.matches("the adapter of 2 steps is not saved", log)
    assert.is_false(adapter(out))
  end)

  it("cannot be saved where the folder cannot be made: both are said", function()
    local file = broken.root .. "/a-file"
    broken.write(file, "x")
    local _, result, log = run({}, function() bs.fail("data", "rows cannot be read") end, { out = file .. "/out" })
    assert.equal(4, result[2].bs_exit)
    assert.matches("the adapter of 2 steps could not be saved: ", log)
  end)
end)
