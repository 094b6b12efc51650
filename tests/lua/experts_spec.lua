-- SPDX-License-Identifier: Apache-2.0
--- Experts as files have them: fused tensors of which they are slices, in either orientation, packed ones with their
-- scales; and files and configs that contradict each other, refused by name before a weight is read.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local costs = require "bs.plan.costs"
local family = require "bs.model.find_family"
local generation = require "generation"
local job = require "bs.job"
local model = require "bs.model.model"
local models = require "family_models"
local program = require "bs.instance.program"
local tiny = require "tiny"

-- A small model in a folder; change(arrays, config) may alter what is written.
local function write(kind, name, change)
  local dir, hf = tiny.folder("experts-" .. name), {}
  for key, value in pairs(models.small[kind]) do hf[key] = value end
  tiny.checkpoint(dir, family.find(hf), hf, "f32")
  if not change then return dir end
  local arrays = tiny.arrays(dir)
  change(arrays, hf)
  bs.safetensors.write(dir .. "/model.safetensors", arrays, { format = "pt" })
  bs.write_file(dir .. "/config.json", bs.json.encode(hf))
  return dir
end

local function micros() return { tiny.micro(1, models.VOCAB, { 9, 20 }, 1), tiny.micro(2, models.VOCAB, { 12 }) } end

local function train(dir, settings)
  local s = { model = dir, micro_tokens = 32, micros = 2,
              lora = { r = 2, targets = { "all", "gate_up_proj", "down_proj" } } }
  for key, value in pairs(settings or {}) do s[key] = value end
  local j <close> = job.new(s)
  local losses = {}
  for i = 1, 2 do losses[i] = j:step(micros(), { lr = 1e-2, next = i < 2 }).loss end
  return losses, tiny.digest(j:parameters()), j:weight_bytes()
end

-- All matrices [experts, a, b] of these tensors as [experts, b, a].
local function turn(arrays, pattern)
  for name, a in pairs(arrays) do
    local d = a:dims()
    if name:find(pattern) and #d == 3 then
      local v, out = a:table(), {}
      for e = 0, d[1] - 1 do
        for i = 0, d[2] - 1 do
          for k = 0, d[3] - 1 do
            out[e * d[2] * d[3] + k * d[2] + i + 1] = v[e * d[2] * d[3] + i * d[3] + k + 1]
          end
        end
      end
      arrays[name] = bs.array.new("f32", { d[1], d[3], d[2] }, out)
    end
  end
end

describe("fused experts", function()
  for _, kind in ipairs { "qwen3_vl_moe", "gpt_oss" } do
    it("of " .. kind .. " are found in either orientation", function()
      local as_is = train(write(kind, kind))
      local turned = train(write(kind, kind .. "-turned", function(arrays) turn(arrays, "mlp%.experts%.") end))
      for i, loss in ipairs(as_is) do assert.is_true(math.abs(turned[i] / loss - 1) < 1e-6) end
    end)
  end

  it("that are square lie as the family says", function()
    local function square(arrays, hf)
      hf.text_config = models.config("qwen3_vl_moe_text",
        { num_experts = 2, num_experts_per_tok = 2, moe_intermediate_size = 32 })
      for i = 0, 2 do
        local at = ("model.language_model.layers.%d.mlp."):format(i)
        arrays[at .. "gate.weight"] = tiny.tensor(at .. "gate", { 2, 32 })
        arrays[at .. "experts.gate_up_proj"] = tiny.tensor(at .. "up", { 2, 32, 64 })
        arrays[at .. "experts.down_proj"] = tiny.tensor(at .. "down", { 2, 32, 32 })
      end
    end
    local m = model.open(write("qwen3_vl_moe", "square", square))
    local part = m.layers[0].groups[1].expert[0]
    assert.is_true(part.tensor["down_proj.weight"].transposed)
    assert.is_true(part.tensor["gate_up_proj.weight"].transposed)
  end)
end)

-- gpt_oss with experts as MXFP4, or in place of it (`plain`) with the same values as f32, [out, in].
local function packed(name, plain, change)
  return write("gpt_oss", name, function(arrays, hf)
    for i = 0, 2 do
      local at = ("model.layers.%d.mlp.experts."):format(i)
      for x, dims in pairs { gate_up_proj = { 4, 128, 32 }, down_proj = { 4, 32, 64 } } do
        local blocks, scales, values = tiny.mxfp4(at .. x, dims)
        arrays[at .. x] = plain and values or nil
        if not plain then arrays[at .. x .. "_blocks"], arrays[at .. x .. "_scales"] = blocks, scales end
      end
    end
    if change then change(arrays, hf) end
  end)
end

describe("packed experts", function()
  local dir, plain
  setup(function() dir, plain = packed("packed"), packed("plain", true) end)

  it("compute what their values do, to the bit, in every home and group size", function()
    for _, lora in ipairs { { r = 2, targets = { "all", "gate_up_proj" } }, { r = 2, targets = { "all" } } } do
      local losses, digest, bytes = train(plain, { home = "gpu", lora = lora })
      for _, settings in ipairs {
        { home = "gpu" }, { home = "ram", group = 1 }, { home = "disk", group = 3, dev_slots = 2 },
        { home = "disk", group = 4, dev_slots = 1 },
      } do
        settings.lora = lora
        local other, other_digest, other_bytes = train(dir, settings)
        assert.same(losses, other)
        assert.equal(digest, other_digest)
        local experts = 3 * 4 * (128 * 32 + 32 * 64) -- values of 4 bytes, or of 4.25 bits
        assert.equal(bytes - experts * 4 + experts * 17 // 32, other_bytes)
      end
    end
  end)

  -- Forward, and twice more in the backward half; of 4 experts of 128 * 33 + 32 * 65 weights two per token.
  it("are counted as the work of those that a token is routed to", function()
    for _, at in ipairs { dir, plain } do
      for _, group in ipairs { 1, 3 } do
        local j <close> = job.new { model = at, group = group, micro_tokens = 32, micros = 2, trainable = "none" }
        local sum, list = 0, program.train(j.model, 0)
        for i, flops in ipairs((costs.flops(j.spec, list, 0, 10))) do
          local kind = program.kind_name[list[i].kind]
          if kind == "experts" or kind == "experts_backward" then sum = sum + flops end
        end
        assert.equal((2 + 6) * 10 * 3 * 2 * (128 * 33 + 32 * 65), sum)
      end
    end
  end)

  it("have gradients of all weights", function()
    local function gradients(folder)
      local j <close> = job.new { model = folder, micro_tokens = 32, micros = 2, trainable = "base", home = "gpu" }
      j:step(micros(), { apply = false })
      return tiny.digest(j:gradients())
    end
    assert.equal(gradients(plain), gradients(dir))
  end)

  it("go with the cache", function()
    local function written(folder)
      local j <close> = job.new { model = folder, trainable = "none", micro_tokens = 16, home = "disk",
                                  cache = { rows = 2, tokens = 24 } }
      return (j:generate({ { 5, 6, 7 }, { 9 } }, { max_new = 5, choose = generation.greedy, stops = {} }))
    end
    assert.same(written(plain), written(dir))
  end)
end)

it("a correction of the choice may be stored as anything, in any engine", function()
  local losses = {}
  for i, dtype in ipairs { "f32", "bf16" } do
    local dir = write("glm4_moe", "correction", function(arrays)
      for name, a in pairs(arrays) do
        if name:find "correction" then -- the same numbers
          arrays[name] = dtype == "f32" and a:cast("bf16"):cast("f32") or a:cast("bf16")
        end
      end
    end)
    losses[i] = train(dir, { lora = { r = 2, targets = { "all" } } })
  end
  assert.same(losses[1], losses[2])
end)

describe("experts that contradict config.json are refused:", function()
  local function refused(dir, ...)
    local ok, err = pcall(model.open, dir)
    assert.is_false(ok)
    for _, part in ipairs { ... } do assert.is_truthy(tostring(err):find(part, 1, true), tostring(err)) end
    assert.is_nil(tostring(err):find("\n", 1, true))
  end
  local FUSED <const>, GPT <const> = "model.language_model.layers.0.mlp.experts.", "model.layers.0.mlp.experts."

  it("their number, and shapes that fit in neither orientation", function()
    refused(write("qwen3_moe", "bad", function(_, hf) hf.num_experts = 7 end), "mlp.gate.weight", "[6, 32]", "[7, 32]")
    refused(write("mixtral", "bad", function(arrays)
      arrays["model.layers.2.block_sparse_moe.experts.3.w2.weight"] = nil
    end), "'model.layers.2.block_sparse_moe.experts.3.w2.weight' [32, 40] is missing")
    refused(write("mixtral", "bad", function(arrays)
      arrays["model.layers.2.block_sparse_moe.experts.3.w2.weight"] = tiny.tensor("w2", { 40, 32 })
    end), "w2.weight' is [40, 32], config.json implies [32, 40]")
    refused(write("qwen3_vl_moe", "bad", function(arrays)
      arrays[FUSED .. "gate_up_proj"] = tiny.tensor("up", { 4, 32, 48 })
    end), FUSED .. "gate_up_proj' is [4, 32, 48], config.json implies [5, 48, 32] or [5, 32, 48]")
    refused(write("qwen3_vl_moe", "bad", function(arrays)
      arrays[FUSED .. "down_proj"] = tiny.tensor("down", { 5, 24 * 32 })
    end), FUSED .. "down_proj' is [5, 768], config.json implies [5, 32, 24] or [5, 24, 32]")
    refused(write("qwen3_vl_moe", "bad", function(arrays) arrays[FUSED .. "down_proj"] = nil end),
      FUSED .. "down_proj'", "is missing")
    refused(write("gpt_oss", "bad", function(arrays)
      arrays[GPT .. "down_proj_bias"] = tiny.tensor("bias", { 4, 33 })
    end), GPT .. "down_proj_bias' is [4, 33], config.json implies [4, 32]")
  end)

  it("blocks and scales that are not there, of another shape or type", function()
    local function bad(change) return packed("bad", false, change) end
    local BLOCKS <const>, SCALES <const> = GPT .. "down_proj_blocks", GPT .. "down_proj_scales"
    refused(bad(function(a) a[SCALES] = nil end), SCALES .. "' [4, 32, 2]", "config.json asks for it")
    refused(bad(function(a) a[BLOCKS] = nil end), "'" .. GPT .. "down_proj'", BLOCKS .. "' [4, 32, 2, 16]")
    refused(bad(function(a) a[SCALES .. "_inv"], a[SCALES] = a[SCALES], nil end), SCALES .. "'")
    refused(bad(function(a) a[SCALES] = bs.array.new("u8", { 4, 32, 1 }) end), SCALES .. "' is u8 [4, 32, 1]",
      "implies u8 [4, 32, 2]")
    refused(bad(function(a) a[SCALES] = bs.array.new("f32", { 4, 32, 2 }) end), SCALES .. "' is f32 [4, 32, 2]")
    refused(bad(function(a) a[BLOCKS] = bs.array.new("u8", { 4, 32, 32 }) end), BLOCKS .. "' is u8 [4, 32, 32]")
    refused(bad(function(a) a[BLOCKS] = bs.array.new("u8", { 3, 32, 2, 16 }) end), "implies u8 [4, 32, 2, 16]")
  end)

  it("more of them a token than there are, groups that do not divide them", function()
    local function config(kind, over)
      local hf = {}
      for key, value in pairs(models.small[kind]) do hf[key] = value end
      for key, value in pairs(over) do hf[key] = value end
      local ok, err = pcall(function() return family.find(hf).config(hf) end)
      assert.is_false(ok)
      return tostring(err)
    end
    for kind, key in pairs { qwen3_moe = "num_experts", mixtral = "num_local_experts", gpt_oss = "num_local_experts",
                             glm4_moe = "n_routed_experts" } do
      local err = config(kind, { num_experts_per_tok = 7 })
      assert.matches("config.json: .*7.*", err)
      assert.matches(key, err)
      assert.matches("'num_experts_per_tok'", err)
      assert.matches("'" .. key .. "'", config(kind, { [key] = 0 }))
      assert.matches("'num_experts_per_tok'", config(kind, { num_experts_per_tok = 1.5 }))
    end
    local text = models.config("qwen3_vl_moe_text", { num_experts = 2, num_experts_per_tok = 3 })
    assert.matches("'num_experts_per_tok' is 3 of 'num_experts' 2", config("qwen3_vl_moe", { text_config = text }))
    for _, over in ipairs { { n_group = 4 }, { topk_group = 4 }, { num_experts_per_tok = 5 } } do
      assert.matches("groups %('topk_group', 'n_group'%)", config("glm4_moe", over))
    end
    assert.matches("'mlp_only_layers'", config("qwen3_moe", { mlp_only_layers = "none" }))
    assert.matches("'first_k_dense_replace'", config("glm4_moe", { first_k_dense_replace = -1 }))
    assert.matches("'layer_types' is 2 kinds", config("gpt_oss",
      { layer_types = { "full_attention", "full_attention" } }))
  end)

  it("a family that lacks a stage", function()
    for _, field in ipairs { "routing", "expert_tensors", "expert_prefix" } do
      local m = {}
      for key, value in pairs(require "soft_gate") do m[key] = value end
      m[field] = nil
      local ok, err = pcall(family.check, m, "mine")
      assert.is_false(ok)
      assert.matches("family 'mine' lacks the field '" .. field .. "'", tostring(err))
    end
    local m = setmetatable({ stages = { mix = print, expert = print } }, { __index = require "soft_gate" })
    assert.matches("lacks the field 'stages.join'", tostring(select(2, pcall(family.check, m, "mine"))))
    m.stages.join, m.staged = print, print
    assert.matches("lacks the field 'layer'", tostring(select(2, pcall(family.check, m, "mine"))))
  end)
end)
