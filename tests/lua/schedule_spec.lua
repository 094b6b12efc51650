-- SPDX-License-Identifier: Apache-2.0
--- Learning rates: warm-up, shapes, ends.
local schedule = require "bs.train.schedule"

local function rates(o)
  local f, out = schedule.new(o), {}
  for step = 1, o.steps do out[step] = f(step) end
  return out
end

local function near(want, got) assert.is_true(math.abs(want - got) < 1e-12, ("%g, not %g"):format(got, want)) end

describe("a schedule", function()
  it("is constant when nothing is said", function()
    assert.same({ 0.5, 0.5, 0.5 }, rates { lr = 0.5, steps = 3 })
  end)

  it("warms up in equal steps that neither begin at zero nor repeat the full rate", function()
    local r = rates { lr = 1, steps = 10, kind = "constant", warmup = 4 }
    for step, want in ipairs { 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1 } do near(want, r[step]) end
  end)

  it("falls on a line whose zero is the step after the last", function()
    local r = rates { lr = 2, steps = 4, kind = "linear" }
    for step, want in ipairs { 2, 1.5, 1, 0.5 } do near(want, r[step]) end
  end)

  it("falls on a cosine to a tenth at the last step", function()
    local r = rates { lr = 1, steps = 13, kind = "cosine", warmup = 2 }
    near(1 / 3, r[1])
    near(1, r[3])
    near(0.55, r[8])
    near(0.1, r[13])
    for step = 4, 13 do assert.is_true(r[step] < r[step - 1]) end
  end)

  it("is positive in every step of short runs", function()
    for _, kind in ipairs(schedule.kinds) do
      for steps = 1, 12 do
        for _, warmup in ipairs { 0, 0.03, 0.5, 1, 3, 100 } do
          local r = rates { lr = 1, steps = steps, kind = kind, warmup = warmup }
          for step = 1, steps do assert.is_true(r[step] > 0 and r[step] <= 1) end
        end
      end
    end
  end)

  it("takes its warm-up as a share or a number of steps", function()
    for _, case in ipairs {
      { 0, 100, 0 }, { 0.03, 1000, 30 }, { 0.03, 1001, 31 }, { 0.03, 60, 5 }, { 0.03, 6, 3 }, { 0.03, 1, 0 },
      { 1, 100, 1 }, { 20, 100, 20 }, { 20.0, 100, 20 }, { 200, 100, 100 },
    } do
      assert.equal(case[3], schedule.warmup(case[1], case[2]))
    end
  end)

  it("that does not exist is a usage error", function()
    local ok, err = pcall(schedule.new, { lr = 1, steps = 2, kind = "cosin" })
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
    assert.matches("schedule=cosin; one of constant, linear, cosine", tostring(err))
  end)
end)
