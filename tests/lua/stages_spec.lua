-- SPDX-License-Identifier: Apache-2.0
--- Layers of two stages (mix -> experts -> join): equal to the same mathematics in one dense stage, and
-- independent of how experts are grouped into blocks.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

-- The same family with one stage: all experts of a layer in its only block.
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
    local h, u, r = soft_gate.stages.mix(c, w, x, ctx)
    local y
    for e = 0, c.experts - 1 do
      local ye = soft_gate.stages.expert(c, w.experts[tostring(e)], e, u, r, ctx)
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
