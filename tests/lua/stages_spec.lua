-- SPDX-License-Identifier: Apache-2.0
--- Layers of two stages (mix -> experts -> join): equal to the same mathematics in one dense stage, and
-- independent of how experts are grouped into blocks.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local nn = require "bs.nn"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

-- The engine that was opened last: of a job, or of its dry run.
local engine
local open_engine = bs.engine.open
function bs.engine.open(o) -- luacheck: ignore 122
  engine = open_engine(o)
  return engine
end

-- The softmax of logits [tokens, experts] where one of the `chosen` largest of its row, else zero: chosen on the host.
local function masked(c, logits)
  local known, z = pcall(logits.read, logits) -- a dry run has none
  local mask, n = {}, logits:dims()
  for t = 0, n[1] - 1 do
    local order = {}
    for e = 1, n[2] do order[e], mask[t * n[2] + e] = e, 0 end
    if known then
      table.sort(order, function(a, b)
        local x, y = z:get(t * n[2] + a), z:get(t * n[2] + b)
        return x > y or x == y and a < b
      end)
    end
    for i = 1, c.chosen do mask[t * n[2] + order[i]] = 1 end
  end
  return nn.softmax(logits) * bs.op.from_array(engine, bs.array.new("f32", n, mask))
end

-- The same family with one stage: all experts of a layer in its only block, each of which sees all tokens.
local function dense_twin()
  local M = {}
  for key, value in pairs(soft_gate) do M[key] = value end
  M.stages, M.staged = nil, nil
  function M.tensors(c)
    local t = soft_gate.tensors(c)
    for e = 0, c.experts - 1 do
      for _, x in ipairs(soft_gate.expert_tensors(c)) do
        t[#t + 1] = { name = ("experts.%d.%s"):format(e, x.name), dims = x.dims }
      end
    end
    return t
  end
  function M.layer(c, w, x, ctx)
    local inner = setmetatable({ route = function(logits) return masked(c, logits) end }, { __index = ctx })
    local h, u, r = soft_gate.stages.mix(c, w, x, inner)
    local y
    for e = 0, c.experts - 1 do
      local ye = soft_gate.stages.expert(c, w.experts[tostring(e)], u, nn.columns(r, e + 1, 1), ctx)
      y = y and y + ye or ye
    end
    return soft_gate.stages.join(c, h, y, ctx)
  end
  return M
end

describe("a layer of two stages", function()
  local dir = tiny.folder("stages")
  tiny.checkpoint(dir, soft_gate, tiny.soft_gate_config(), "bf16")
  local micros = { tiny.micro(1, 200, { 7, 9 }, 1), tiny.micro(2, 200, { 12 }) }

  local function run(settings, steps)
    settings.model, settings.micro_tokens, settings.micros = dir, 16, 2
    settings.lora = settings.lora or { r = 2, alpha = 4, targets = { "attention", "experts", "gate" } }
    local j <close> = job.new(settings)
    local losses = {}
    for s = 1, steps or 3 do losses[s] = j:step(micros, { lr = 1e-2 }).loss end
    local values = j:parameters()
    local grads = j:step(micros, { apply = false }) and j:gradients()
    return losses, values, grads
  end

  local function assert_same_bytes(a, b)
    local n = 0
    for name, value in pairs(a) do
      n = n + 1
      assert.equal(value:hash(), b[name]:hash(), name)
    end
    assert.is_true(n > 0)
  end

  it("is found through package.path by its model_type", function()
    local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 16 }
    assert.same(soft_gate.model_types, j.model.family.model_types)
    assert.equal(2, #j.model.layers[0].groups > 1 and 2 or #j.model.layers[0].groups)
  end)

  it("equals the dense form", function()
    local losses, _, grads = run({ home = "gpu", group = 2 }, 1)
    local twin_losses, _, twin_grads = run({ home = "gpu", family = dense_twin() }, 1)
    assert.is_true(math.abs(losses[1] - twin_losses[1]) < 1e-5 * twin_losses[1])
    local checked = 0
    for name, g in pairs(grads) do
      local err = bs.array.rel_err(g, twin_grads[name])
      assert.is_true(err < 1e-4, name .. " " .. err)
      checked = checked + 1
    end
    assert.equal(3 * (2 + 1 + 5 * 3) * 2, checked)
  end)

  it("gives the same bits whatever the group size and the homes", function()
    local losses, values = run { home = "gpu", group = 5 }
    for _, settings in ipairs {
      { home = "gpu", group = 1 }, { home = "disk", group = 2, dev_slots = 2 },
      { home = "ram", group = 3, dev_slots = 1 }, { home = "disk", group = 1, boundaries = "host" },
    } do
      local other_losses, other_values = run(settings)
      assert.same(losses, other_losses)
      assert_same_bytes(values, other_values)
    end
  end)

  it("trains adapters of experts: every gradient is there and not zero", function()
    local _, _, grads = run({ home = "gpu" }, 2)
    for name, g in pairs(grads) do
      local zero = bs.array.new("f32", g:dims())
      assert.is_true(bs.array.rel_err(g, zero) > 0, name)
    end
  end)
end)

describe("a layer whose tokens go to some of the experts", function()
  local folders = {}
  -- Every token to two of five; `none`: to the first two, since no logit is larger than another.
  setup(function()
    for _, name in ipairs { "some", "none" } do
      local dir = tiny.folder("stages-" .. name)
      tiny.checkpoint(dir, soft_gate, tiny.soft_gate_config { chosen = 2 }, "f32")
      folders[name] = dir
    end
    local arrays = tiny.arrays(folders.none)
    for name, a in pairs(arrays) do
      if name:find "%.gate%.weight$" then arrays[name] = bs.array.new("f32", a:dims()) end
    end
    bs.safetensors.write(folders.none .. "/model.safetensors", arrays, { format = "pt" })
  end)
  local micros = { tiny.micro(1, 200, { 7, 9 }, 1), tiny.micro(2, 200, { 12 }) }

  local function open(name, settings)
    local s = { model = folders[name], micro_tokens = 16, micros = 2, home = "gpu" }
    if settings.trainable ~= "base" then
      s.lora = { r = 2, alpha = 4, targets = { "attention", "experts", "gate" } }
    end
    for key, value in pairs(settings) do s[key] = value end
    return job.new(s)
  end

  -- Losses of three steps (base training: one), then the gradients, and the parameters of adapters.
  local function run(name, settings, rows)
    local j <close> = open(name, settings)
    local losses, base = {}, settings.trainable == "base"
    for s = 1, base and 1 or 3 do losses[s] = j:step(rows or micros, { lr = 1e-2, apply = not base }).loss end
    losses[#losses + 1] = j:step(rows or micros, { apply = false }).loss
    if not settings.family then assert.equal(j.plan.peak, j.instance.engine:stats().peak_bytes) end
    return losses, j:gradients(), not base and j:parameters() or {}
  end

  local function assert_near(got, want, bound)
    local n = 0
    for name, g in pairs(got) do
      local zero, n_zero = bs.array.new("f32", g:dims()):hash(), want[name]:hash()
      if n_zero ~= zero then
        local err = bs.array.rel_err(g, want[name])
        assert.is_true(err < bound, name .. " " .. err)
      else
        for _, v in ipairs(g:table()) do assert.equal(0, v, name) end
      end
      n = n + 1
    end
    assert.is_true(n > 15)
  end

  for _, name in ipairs { "some", "none" } do
    for what, settings in pairs {
      adapters = {},
      ["adapters of other linears"] = { lora = { r = 2, alpha = 4, targets = { "attention", "gate" } } },
      ["adapters with dropout"] = {
        lora = { r = 2, alpha = 4, dropout = 0.3, targets = { "attention", "experts", "gate" } } },
      ["all weights"] = { trainable = "base" },
    } do
      it("equals all tokens through all experts, masked: " .. what .. ", " .. name, function()
        local losses, grads = run(name, settings)
        local twin = { family = dense_twin() }
        for key, value in pairs(settings) do twin[key] = value end
        local twin_losses, twin_grads = run(name, twin)
        for s, loss in ipairs(losses) do assert.is_true(math.abs(loss / twin_losses[s] - 1) < 1e-5) end
        assert_near(grads, twin_grads, 2e-4)
      end)
    end

    it("gives the same bits whatever the group size, the homes and slots: " .. name, function()
      local losses, grads, values = run(name, { group = 5 })
      for _, settings in ipairs {
        { group = 1 }, { group = 2, home = "disk", dev_slots = 2 }, { group = 3, home = "ram", dev_slots = 1 },
        { group = 5, home = "disk", boundaries = "host" }, { group = 1, home = "disk", dev_slots = 3 },
      } do
        local other_losses, other_grads, other_values = run(name, settings)
        assert.same(losses, other_losses)
        assert.equal(tiny.digest(grads), tiny.digest(other_grads))
        assert.equal(tiny.digest(values), tiny.digest(other_values))
      end
    end)

    it("gives the same bits where experts do not train, whatever group computes together: " .. name, function()
      local lora = { r = 2, alpha = 4, targets = { "attention", "gate" } }
      local losses, grads, values = run(name, { group = 5, lora = lora })
      for _, settings in ipairs {
        { group = 1 }, { group = 2, home = "disk", dev_slots = 2 }, { group = 3, home = "ram", dev_slots = 1 },
        { group = 4, home = "disk", boundaries = "host" },
      } do
        settings.lora = lora
        local other_losses, other_grads, other_values = run(name, settings)
        assert.same(losses, other_losses)
        assert.equal(tiny.digest(grads), tiny.digest(other_grads))
        assert.equal(tiny.digest(values), tiny.digest(other_values))
      end
    end)

    it("has the gradients of all weights, the same bits from every home: " .. name, function()
      local _, want = run(name, { trainable = "base", group = 5 })
      for _, settings in ipairs { { group = 1, home = "disk", dev_slots = 2 }, { group = 2, home = "ram" } } do
        settings.trainable = "base"
        local _, got = run(name, settings)
        assert.equal(tiny.digest(want), tiny.digest(got))
      end
    end)
  end

  it("leaves experts that no token goes to as they are, and no error", function()
    local lora = { r = 2, alpha = 4, targets = { "attention", "experts" } } -- not what they are chosen by
    local _, grads, values = run("none", { group = 1, lora = lora })
    local rows, idle = 0, 0
    for name, g in pairs(grads) do
      local e = tonumber(name:match "experts%.(%d)%.")
      local nothing = bs.array.rel_err(bs.array.new("f32", g:dims()), g) ~= 1
      if e then
        assert.equal(e >= 2, nothing, name)
        rows, idle = rows + (e < 2 and 1 or 0), idle + (e >= 2 and 1 or 0)
      end
      if e and e >= 2 and name:find "lora_B" then
        for _, v in ipairs(values[name]:table()) do assert.equal(0, v) end
      end
    end
    assert.same({ 3 * 2 * 3 * 2, 3 * 3 * 3 * 2 }, { rows, idle })
  end)

  it("is that of one large micro-batch", function()
    local together = { tiny.micro(1, 200, { 7, 9 }, 1) }
    for key, list in pairs(micros[2]) do
      table.move(list, 1, #list, #together[1][key] + 1, together[1][key])
    end
    for _, name in ipairs { "some", "none" } do
      local losses, grads = run(name, {})
      local other, other_grads = run(name, { micro_tokens = 28, micros = 1 }, together)
      for s, loss in ipairs(losses) do assert.is_true(math.abs(loss / other[s] - 1) < 1e-5) end
      assert_near(grads, other_grads, 2e-3)
    end
  end)

  -- Launches of a step by label.
  local function launches(settings, rows)
    local j <close> = open("none", settings)
    local calls = {}
    j.device:profile(true)
    j:step(rows, { apply = false })
    for _, row in ipairs(j.device:profile()) do calls[row.label] = (calls[row.label] or 0) + row.calls end
    return calls
  end

  it("launches by the rows of an expert, not by the micro-batches that they come in", function()
    -- Two experts of five have 28 rows each. Pieces end where an expert's rows do and at multiples of 32, the routed
    -- rows of a micro-batch: 28, 32, 56. Three layers; forward rows and weights, backward the gradient, too.
    local want = 3 * 3 * (2 + 3)
    local three = { tiny.micro(1, 200, { 7 }), tiny.micro(2, 200, { 9 }), tiny.micro(3, 200, { 12 }) }
    for _, group in ipairs { 1, 5 } do
      local two = launches({ group = group }, micros)
      assert.equal(want, two["take rows"])
      assert.equal(want, launches({ group = group, micros = 3 }, three)["take rows"])
      assert.equal(3 * 3 * (1 + 2), two["add rows"])
      assert.equal(3 * 2, two["sort rows"])
    end
  end)

  it("expands an expert's weights once a visit, and those of idle experts never", function()
    local dir, arrays = tiny.folder "stages-bf16", tiny.arrays(folders.none)
    for name, a in pairs(arrays) do arrays[name] = a:cast "bf16" end
    bs.safetensors.write(dir .. "/model.safetensors", arrays, { format = "pt" })
    bs.write_file(dir .. "/config.json", assert(bs.read_file(folders.none .. "/config.json")))
    local want = launches({ model = dir, group = 1 }, micros).expand
    assert.equal(want, launches({ model = dir, group = 1 }, { tiny.micro(1, 200, { 3 }) }).expand) -- one piece
    assert.equal(want, launches({ model = dir, group = 1, micro_tokens = 28 }, micros).expand)
    assert.equal(want, launches({ model = dir, group = 5 }, micros).expand)
  end)
end)
