-- SPDX-License-Identifier: Apache-2.0
-- The program under limits of the system (ulimit): address space, data, files, stack. It ends well, or by itself with
-- one line: it never hangs, and is never ended by a fault.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"

local OPENBLAS <const> = bs.features().openblas
local LEFT_OUT <const> = "OpenBLAS is left out: for 2 threads it takes"
local model = { "model=tests/data/qwen3", "threads=2", "micro_tokens=40", "vram=16MiB", "ram=16MiB", "home=disk" }

local function words(...) return table.move(model, 1, #model, select("#", ...) + 1, { ... }) end

local out = broken.root .. "/limits"
local programs = {
  training = words("recipes/qwen8b_lora.lua", "data=tests/data/rows.jsonl", "step_tokens=80", "r=4", "steps=2",
    "out=" .. out),
  eval = words("recipes/eval.lua", "data=tests/data/rows.jsonl", "pass_tokens=80"),
  generate = words("recipes/generate.lua", "ids=1,2,3", "max_new=4"),
}

-- Run under a limit; one that spins is killed. Returns the status and what was said on standard error.
local function run(name, limit)
  local code, _, err = broken.run(programs[name], ("ulimit -t 60; ulimit %s;"):format(limit))
  assert.is_true(code < 7, ("%s under ulimit %s: status %d: %s"):format(name, limit, code, err))
  assert.is_nil(err:find("stack traceback", 1, true), err)
  assert.is_nil(err:find("PANIC", 1, true), err)
  return code, err
end

-- Lines that say why the run ended, apart from those that it goes on after.
local function reasons(err)
  local n = 0
  for line in err:gmatch("[^\n]+") do
    local goes_on = line:find("OpenBLAS is left out", 1, true) or line:find("read by a pool of threads", 1, true)
      or line:find("^plan: ") or line:find("^an answer ends at ") or line:find("new tokens in", 1, true)
    if not goes_on then n = n + 1 end
  end
  return n
end

for name in pairs(programs) do
  describe(name, function()
    it("ends by itself with one line in whatever memory there is", function()
      local done = 0
      for _, limit in ipairs {
        "-v 7000", "-v 12000", "-v 40000", "-v 60000", "-v 70000", "-v 150000", "-v 300000", "-v 400000", "-v 1000000",
        "-d 4000", "-d 30000", "-d 200000", "-n 8", "-n 64", "-s 256", "-s 40; ulimit -v 300000", "-l 0",
      } do
        local code, err = run(name, limit)
        assert.equal(code == 0 and 0 or 1, reasons(err), limit .. ": " .. err)
        done = done + (code == 0 and 1 or 0)
      end
      assert.is_true(done >= 6, ("only %d of them ended well"):format(done))
    end)

    it("computes with plain loops where OpenBLAS has no room, and says so once", function()
      for limit, left_out in pairs { ["-v 300000"] = OPENBLAS, ["-d 300000"] = OPENBLAS, ["-v unlimited"] = false } do
        local code, err = run(name, limit)
        assert.equal(0, code, err)
        assert.equal(left_out and 1 or 0, select(2, err:gsub(LEFT_OUT, "")), err)
      end
    end)
  end)
end

describe("a device", function()
  it("is refused more threads than there is room for, once OpenBLAS is in use", function()
    if not OPENBLAS then return end
    local code, text, err = broken.run({ "-l", "bs", "-e", [[
      local one <close> = bs.device.open("cpu", { threads = 1 })
      local ok, message = pcall(bs.device.open, "cpu", { threads = 64 })
      print(ok, message)
      local again <close> = bs.device.open("cpu", { threads = 1 })
      assert(bs.features().openblas)]] }, "ulimit -v 1000000;")
    assert.same({ 0, "" }, { code, err })
    assert.matches("^false\tbs%.device%.open: nomem: .*no address space for products on 64 threads", text)
  end)
end)
