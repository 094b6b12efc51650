-- SPDX-License-Identifier: Apache-2.0
--- trainable="base": weights that are updated in their gpu homes, and the checkpoint that they leave.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local checkpoint = require "bs.model.checkpoint"
local job = require "bs.job"
local create = require "bs.model.create"
local models = require "family_models"
local qwen3 = require "bs.family.qwen3"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

local VOCAB = 300
local function micros_of(s) return { tiny.micro(s, VOCAB, { 9, 11 }, 2), tiny.micro(s + 50, VOCAB, { 20 }) } end

local function folder(name, over, dtype)
  local dir = tiny.folder("base-" .. name)
  tiny.checkpoint(dir, qwen3, tiny.qwen3_config(over), dtype or "f32")
  return dir
end

local function open(dir, settings)
  local all = { model = dir, trainable = "base", home = "gpu", micro_tokens = 24, micros = 2 }
  for key, value in pairs(settings or {}) do all[key] = value end
  return job.new(all)
end

local function hashes(arrays)
  local out = {}
  for name, a in pairs(arrays) do out[name] = a:hash() end
  return out
end

local function refusal(fn, ...)
  local ok, err = pcall(fn, ...)
  assert.is_false(ok)
  return tostring(err)
end

describe("base training", function()
  for _, tied in ipairs { true, false } do
    local kind = tied and "tied" or "untied"

    it(kind .. ": a tiny model from random weights learns its rows", function()
      local dir = tiny.folder("base-random-" .. kind)
      create(dir, tiny.qwen3_config { tie_word_embeddings = tied }, { seed = 7 })
      local j <close> = open(dir)
      local first, last
      for s = 1, 200 do
        last = j:step(micros_of(s % 4), { lr = 4e-3 * (1 - s / 220), next = s < 200 }).loss
        first = first or last
      end
      assert.is_true(first > 5, "first loss " .. first) -- about the logarithm of the vocabulary
      assert.is_true(last < 0.2, "last loss " .. last)
    end)

    it(kind .. ": the gradients are those of the streamed run, also after updates", function()
      local dir = folder("gradients-" .. kind, { tie_word_embeddings = tied, intermediate_size = 16 })
      local function gradients(of, home)
        local j <close> = open(of, { home = home })
        assert.is_true(#j.model.tiles > 1)
        local loss = j:step(micros_of(9), { apply = false }).loss
        return loss, hashes(j:gradients())
      end
      local loss, want = gradients(dir, "gpu")
      for _, home in ipairs { "ram", "disk" } do
        local l, got = gradients(dir, home)
        assert.equal(loss, l)
        assert.same(want, got)
      end
      local saved = dir .. "/saved"
      do
        local j <close> = open(dir)
        for s = 1, 3 do j:step(micros_of(s), { lr = 1e-2, weight_decay = 0.1, next = s < 3 }) end
        loss = j:step(micros_of(9), { apply = false }).loss
        want = hashes(j:gradients())
        j:save_base(saved)
      end
      local l, got = gradients(saved, "disk")
      assert.equal(loss, l)
      assert.same(want, got)
    end)

    it(kind .. ": what is saved opens again with the same loss, and without what was tied", function()
      local dir = folder("saved-" .. kind, { tie_word_embeddings = tied })
      local want
      do
        local j <close> = open(dir, { device = "check:cpu" })
        j:step(micros_of(1), { lr = 1e-2 })
        want = j:walk(micros_of(5), { mode = "loss" })
        j:save_base(dir .. "/f32")
        j:save_base(dir .. "/bf16", { dtype = "bf16" })
      end
      local again <close> = open(dir .. "/f32", { trainable = "none", home = "disk" })
      assert.equal(want, again:walk(micros_of(5), { mode = "loss" }))
      local half <close> = open(dir .. "/bf16", { trainable = "none", home = "disk" })
      local loss = half:walk(micros_of(5), { mode = "loss" })
      assert.is_true(loss ~= want and math.abs(loss - want) < 0.05)
      local old, new = checkpoint.open(dir), checkpoint.open(dir .. "/f32")
      for name, t in pairs(old.tensors) do assert.same(t.dims, new.tensors[name].dims) end
      assert.equal(tied, new.tensors["lm_head.weight"] == nil)
      assert.equal("float32", new.config.torch_dtype)
      assert.equal("bfloat16", checkpoint.open(dir .. "/bf16").config.torch_dtype)
    end)
  end

  for _, name in ipairs { "qwen3_moe", "qwen3_vl_moe", "gpt_oss" } do
    it("updates experts, and saves them as the file has them, fused or not: " .. name, function()
      local dir, rows = tiny.folder("base-" .. name), { tiny.micro(1, models.VOCAB, { 20 }, 2) }
      create(dir, models.small[name], { seed = 3 })
      local want, first
      do
        local j <close> = open(dir)
        for s = 1, 20 do
          local loss = j:step(rows, { lr = 3e-3, next = s < 20 }).loss
          first = first or loss
        end
        want = j:walk(rows, { mode = "loss" })
        j:save_base(dir .. "/saved")
      end
      assert.is_true(first > 5 and want < first - 1, first .. " " .. want)
      local again <close> = open(dir .. "/saved", { trainable = "none", home = "disk", group = 1 })
      assert.equal(want, again:walk(rows, { mode = "loss" }))
      local old, new = checkpoint.open(dir).tensors, checkpoint.open(dir .. "/saved").tensors
      for tensor, t in pairs(old) do assert.same(t.dims, new[tensor].dims) end
      for tensor in pairs(new) do assert.is_table(old[tensor], tensor) end
    end)
  end

  it("gathers scaled embeddings as the streamed run does", function()
    local dir, want = tiny.folder("base-scaled"), nil
    create(dir, {
      model_type = "gemma", vocab_size = VOCAB, hidden_size = 33, intermediate_size = 48, num_hidden_layers = 2,
      num_attention_heads = 2, num_key_value_heads = 1, head_dim = 16, rms_norm_eps = 1e-6, rope_theta = 10000.0,
      hidden_act = "gelu_pytorch_tanh", tie_word_embeddings = true, max_position_embeddings = 64,
    })
    for _, home in ipairs { "gpu", "disk" } do
      local j <close> = open(dir, { home = home })
      local r = j:step(micros_of(1), { apply = false })
      local got = { loss = r.loss, gradients = hashes(j:gradients()) }
      want = want or got
      assert.same(want, got)
      assert.is_true(math.abs(j.model.embed_scale - math.sqrt(33)) < 1e-6)
    end
  end)

  it("equals one AdamW step computed by hand", function()
    local dir = folder("by-hand")
    local j <close> = open(dir)
    local r = j:step(micros_of(1), { lr = 1e-2, beta1 = 0, beta2 = 0, eps = 1e-8, weight_decay = 0.5, clip = 0 })
    assert.is_true(r.norm > 0)
    local file <close> = assert(bs.safetensors.open(dir .. "/model.safetensors"))
    local grad, value = j:gradients(), j:parameters()
    for name in pairs(value) do
      local before, g, v = file:read(name):table(), grad[name]:table(), value[name]:table()
      for i = 1, #v, 7 do
        local want = before[i] * (1 - 0.5e-2) - 1e-2 * g[i] / (math.abs(g[i]) + 1e-8)
        assert.is_true(math.abs(v[i] - want) < 1e-6, name)
      end
    end
  end)

  it("keeps the plan's peak and flat memory", function()
    local j <close> = open(folder("peak"))
    -- Without what earlier tests left to the collector.
    local function header_bytes()
      collectgarbage()
      collectgarbage()
      return bs.host_bytes("header")
    end
    local before
    for s = 1, 6 do
      j:step(micros_of(s), { lr = 1e-3, next = s < 6 })
      if s == 3 then before = header_bytes() end
    end
    assert.equal(before, header_bytes())
    local e = j.instance.engine:stats()
    assert.equal(j.plan.peak, e.peak_bytes)
    assert.equal(e.pool_bytes, e.peak_bytes)
  end)

  it("reaches the experts of a staged family", function()
    local dir = tiny.folder("base-staged")
    tiny.checkpoint(dir, soft_gate, tiny.soft_gate_config(), "f32")
    local j <close> = open(dir, { family = soft_gate })
    local micros = { tiny.micro(1, 200, { 12 }), tiny.micro(2, 200, { 20 }) }
    local first, last
    for s = 1, 60 do
      last = j:step(micros, { lr = 3e-3, next = s < 60 }).loss
      first = first or last
    end
    assert.is_true(last < 0.5 * first, ("%g -> %g"):format(first, last))
  end)

  it("reaches the bias of a head, and keeps tensors that no stage uses", function()
    local config = {
      model_type = "phi", vocab_size = 300, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2,
      num_attention_heads = 4, num_key_value_heads = 4, layer_norm_eps = 1e-5, rope_theta = 10000.0,
      partial_rotary_factor = 0.5, hidden_act = "gelu_new", tie_word_embeddings = false,
    }
    local biased = tiny.folder("base-phi")
    create(biased, config)
    local arrays = { ["vision.patch.weight"] = tiny.tensor("vision", { 3, 4 }) }
    local old <close> = assert(bs.safetensors.open(biased .. "/model.safetensors"))
    for _, t in ipairs(old:tensors()) do arrays[t.name] = old:read(t.name) end
    bs.safetensors.write(biased .. "/model.safetensors", arrays)
    local trained <close> = open(biased)
    for s = 1, 20 do trained:step(micros_of(1), { lr = 3e-3, next = s < 20 }) end
    trained:save_base(biased .. "/saved")
    local new <close> = assert(bs.safetensors.open(biased .. "/saved/model.safetensors"))
    assert.equal(#old:tensors() + 1, #new:tensors())
    assert.equal(arrays["vision.patch.weight"]:hash(), new:read("vision.patch.weight"):hash())
    assert.not_equal(arrays["lm_head.bias"]:hash(), new:read("lm_head.bias"):hash())
    local again <close> = open(biased .. "/saved", { trainable = "none", home = "ram" })
    assert.equal(trained:walk(micros_of(1), { mode = "loss" }), again:walk(micros_of(1), { mode = "loss" }))
  end)

  it("leaves weights alone in a step that fails", function()
    local j <close> = open(folder("transaction"))
    j:step(micros_of(1), { lr = 1e-2 })
    local before = hashes(j:parameters())
    local bad = micros_of(2)
    bad[2].ids[20] = VOCAB
    assert.matches("id 300 is outside the table 'model.embed_tokens.weight' of 300 rows",
      refusal(j.step, j, bad, { lr = 1e-2 }), 1, true)
    assert.same(before, hashes(j:parameters()))
    j:step(micros_of(2), { lr = 1e-2 })
    assert.not_same(before, hashes(j:parameters()))
  end)
end)

describe("base training is refused", function()
  it("where blocks are not on the device, and says so; gradients stay", function()
    for _, home in ipairs { "disk", "ram", "auto" } do
      local j <close> = open(folder("refused-" .. home), { home = home })
      local message = refusal(j.step, j, micros_of(1), { lr = 1e-3 })
      assert.matches('here home="' .. home .. '", home="gpu" is needed', message, 1, true)
      assert.matches("apply=false gives the gradients", message, 1, true)
      assert.is_true(j:step(micros_of(1), { apply = false }).norm > 0)
    end
  end)

  it("where weights are not stored as f32, naming one", function()
    local j <close> = open(folder("refused-bf16", {}, "bf16"))
    assert.matches("here 'model%.layers%.0%.input_layernorm%.weight' is stored as bf16",
      refusal(j.step, j, micros_of(1)))
    assert.is_true(j:step(micros_of(1), { apply = false }).norm > 0)
  end)

  it("for saving what the dtype cannot hold, or no dtype can, naming the tensor", function()
    local dir, name = folder("refused-values"), "model.layers.1.mlp.up_proj.weight"
    local saved = dir .. "/saved"
    local j <close> = open(dir)
    j:step(micros_of(1), { lr = 1e-3 })
    local params, id = j.instance.params, j.instance:parameter_ids()[name]
    local value = params:get(id)
    for _, case in ipairs { { 7e4, "f16", "'" .. name .. "' has values that are too large for it" },
                            { 1 / 0, "f32", "'" .. name .. "' holds NaN or infinity" },
                            { 0 / 0, "bf16", "'" .. name .. "' holds NaN or infinity" } } do
      value:set(7, case[1])
      params:set(id, value)
      local ok, err = pcall(j.save_base, j, saved, { dtype = case[2] })
      assert.is_false(ok)
      assert.equal(5, err.bs_exit, tostring(err))
      assert.matches(case[3], tostring(err), 1, true)
      assert.is_nil(bs.list_folder(saved))
    end
    assert.matches("save_base: dtype", refusal(j.save_base, j, saved, { dtype = "f64" }), 1, true)
  end)

  it("for saving what was not trained", function()
    local j <close> = open(folder("refused-save"))
    assert.matches("has not been visited", refusal(j.save_base, j, "build/test-tmp/none"), 1, true)
    local k <close> = open(folder("refused-lora"), { trainable = "lora" })
    assert.matches('trainable="lora" changes no weight', refusal(k.save_base, k, "build/test-tmp/none"), 1, true)
  end)
end)
