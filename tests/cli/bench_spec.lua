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

local function bench(words, program)
  bs.mkdir(tmp)
  local line = ("'%s' bench/%s.lua dir=%s json=%s/out.json %s >%s/log 2>&1"):format(bslua, program or "stream", tmp,
    tmp, words, tmp)
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

  it("says where the time of a step goes", function()
    local code, log = bench "shape=tiny vocab=256 tokens=8 home=ram steps=1 keep=1 profile=true"
    assert.equal(0, code, log)
    assert.is_truthy(log:find("timed step .* GEMM .* attention .* elementwise .* waiting"), log)
    local p = bs.json.decode(slurp(tmp .. "/out.json")).cases[1].profile
    local sum, calls = 0, {}
    for _, share in pairs(p.shares) do sum = sum + share end
    for _, row in ipairs(p.rows) do calls[row.label] = row.calls end
    assert.is_true(sum >= p.step * 0.999, log)
    assert.is_true(calls.linear > 0 and calls.attention > 0 and calls["attention backward"] > 0, log)
  end)

  it("runs with the head", function()
    local code, log = bench "shape=tiny vocab=256 tokens=8 home=ram steps=1 head=true resident=false"
    assert.equal(0, code, log)
    assert.equal(1, #bs.json.decode(slurp(tmp .. "/out.json")).cases, log)
  end)

  it("walks over empty layers, and takes fewer layers and room for some of them", function()
    local code, log = bench "shape=tiny vocab=256 layers=4 tokens=8 home=ram mode=empty steps=1"
    assert.equal(0, code, log)
    local c = bs.json.decode(slurp(tmp .. "/out.json")).cases[1]
    assert.equal(4, c.per_step.visits)
    assert.equal(c.planned.link, c.per_step.link)
    -- The pool holds one slot and no home.
    code, log = bench("shape=tiny vocab=256 layers=4 tokens=8 home=auto dev_slots=1 host_slots=1 vram=4700KiB "
      .. "ram_blocks=2 steps=1")
    assert.equal(0, code, log)
    c = bs.json.decode(slurp(tmp .. "/out.json")).cases[1]
    assert.matches(" 0 gpu, [12] ram, ", c.plan)
    assert.is_true(c.planned.disk_read > 0 and c.planned.disk_read < c.planned.link)
  end)

  it("gives the resident step of one micro-batch beside that of all", function()
    local code, log = bench "shape=tiny vocab=256 tokens=8 home=ram micros=3 steps=1"
    assert.equal(0, code, log)
    local c = bs.json.decode(slurp(tmp .. "/out.json")).cases[1]
    assert.is_true(c.resident_micro > 0 and c.resident > 0) -- three micro-batches and one: times are not compared here
  end)

  it("refuses words that it does not know", function()
    assert.equal(2, (bench "shape=tiny home=moon"))
    assert.equal(2, (bench "shape=huge"))
  end)
end)

describe("bench/ops.lua", function()
  it("times each op of a layer both ways, the head's tile and AdamW", function()
    local code, log = bench("shape=tiny tokens=16 rounds=1 sample=0.001 pool=256MiB", "ops")
    assert.equal(0, code, log)
    local case, seen = bs.json.decode(slurp(tmp .. "/out.json")).cases[1], {}
    for _, op in ipairs(case.ops) do
      seen[op.name] = op
      assert.equal(1, #op.forward.samples, op.name)
      assert.is_true(op.forward.median > 0, op.name)
    end
    for _, name in ipairs { "q_proj", "q_proj+lora", "down_proj", "attention", "rmsnorm", "norm+rope q", "layer" } do
      assert.is_true(seen[name].backward.median > 0, name)
    end
    assert.equal(2.0 * 16 * 256 * 512, seen.gate_proj.forward.flops)
    assert.is_nil(seen.add.backward)
    assert.is_true(seen.adamw.elements > 0 and seen["head tile"].rows > 0)
  end)
end)

describe("bench/figures.sh", function()
  it("runs cases and holds them against bounds", function()
    local run = ("DEVICE=cpu SHAPE=tiny ONLY=infer bench/figures.sh '%s' %s/figures ram %s >%s/log 2>&1"):format(
      bslua:match("^(.*)/") or ".", tmp, tmp, tmp)
    local _, _, code = os.execute(run)
    local log = slurp(tmp .. "/log")
    assert.is_true(code == 0 or code == 1, log) -- the bounds are those of a GPU
    assert.matches("ram infer T=128 x1: link bytes off the plan +0 bytes  <= 0  ok", log)
    local r = bs.json.decode(slurp(tmp .. "/figures/figures.json"))
    assert.equal(5, #r.figures)
    assert.equal(code, r.missed == 0 and 0 or 1)
  end)

  it("says what is wrong with its arguments", function()
    for _, words in ipairs { "", "/nowhere /tmp", ("'%s' %s/x moon"):format(bslua:match("^(.*)/") or ".", tmp) } do
      local _, _, code = os.execute("bench/figures.sh " .. words .. " >/dev/null 2>&1")
      assert.equal(2, code, words)
    end
  end)
end)
