-- SPDX-License-Identifier: Apache-2.0
-- The bench of streamed steps, whole and small: what it must print and write for the figures to mean anything.
local bs = require "bs"

local bslua = assert(os.getenv "BSLUA" or arg and arg[-1], "BSLUA is not set")
local tmp = os.tmpname()
os.remove(tmp)

local function slurp(path)
  local f <close> = assert(io.open(path))
  return f:read "a"
end

local function bench(words)
  bs.mkdir(tmp)
  local line = ("'%s' bench/stream.lua dir=%s json=%s/out.json %s >%s/log 2>&1"):format(bslua, tmp, tmp, words, tmp)
  local _, _, code = os.execute(line)
  return code, slurp(tmp .. "/log")
end

describe("bench/stream.lua", function()
  teardown(function() os.execute("rm -rf '" .. tmp .. "'") end)

  it("measures every case, and moves the planned bytes in the planned pool", function()
    local code, log = bench "shape=tiny vocab=256 tokens=8 home=ram,disk mode=train,infer steps=1"
    assert.equal(0, code, log)
    local r = bs.json.decode(slurp(tmp .. "/out.json"))
    assert.equal(4, #r.cases, log)
    assert.is_true(r.rates.h2d > 0 and r.rates.d2h > 0 and r.rates.gemm > 0 and r.rates.disk > 0)
    for _, c in ipairs(r.cases) do
      assert.equal(1, #c.samples)
      assert.is_true(c.peak <= c.planned_peak and c.floor > 0 and c.resident > 0)
      if c.home == "ram" then assert.equal(c.planned.link, c.per_step.link) end
    end
  end)

  it("runs with the head", function()
    local code, log = bench "shape=tiny vocab=256 tokens=8 home=ram steps=1 head=true resident=false"
    assert.equal(0, code, log)
    assert.equal(1, #bs.json.decode(slurp(tmp .. "/out.json")).cases, log)
  end)

  it("refuses words that it does not know", function()
    assert.equal(2, (bench "shape=tiny home=moon"))
    assert.equal(2, (bench "shape=huge"))
  end)
end)
