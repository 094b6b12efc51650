-- SPDX-License-Identifier: Apache-2.0
--- What families read from config.json: old and new keys, defaults, null, refusals; rotary frequencies.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local models = require "family_models"
local nn = require "bs.nn"

local small, config = models.small, models.config

-- ---- rotary frequencies: published vectors --------------------------------------------------------------

describe("frequencies of", function()
  local function check(rope, head_dim, want, scaling)
    local f, s = nn.inv_freq(nn.rope_config(rope, head_dim))
    for i, v in pairs(want) do
      assert.is_true(math.abs(f[i + 1] / v - 1) < 2e-7, ("[%d] %.9g, %.9g is expected"):format(i, f[i + 1], v))
    end
    assert.is_true(math.abs(s / scaling - 1) < 1e-10)
    return f
  end

  it("yarn without rounded borders", function()
    check({ rope_theta = 150000, max_position_embeddings = 131072, rope_scaling = { rope_type = "yarn",
      factor = 32.0, beta_fast = 32.0, beta_slow = 1.0, original_max_position_embeddings = 4096,
      truncate = false } }, 64, { [0] = 1, [1] = 6.89044306e-1, [8] = 5.08132748e-2, [9] = 3.17056962e-2,
      [12] = 6.79495949e-3, [17] = 1.29318701e-4, [18] = 3.83088124e-5, [31] = 3.02351143e-7 },
      1.3465735902799727)
  end)

  it("yarn with equal mscales", function()
    check({ rope_theta = 10000, max_position_embeddings = 163840, rope_scaling = { type = "yarn", factor = 40,
      beta_fast = 32, beta_slow = 1, mscale = 1.0, mscale_all_dim = 1.0,
      original_max_position_embeddings = 4096 } }, 64, { [1] = 7.49894209e-1, [10] = 5.62341325e-2,
      [11] = 3.90069266e-2, [16] = 5.5e-3, [22] = 1.77827941e-4, [23] = 3.33380358e-5, [31] = 3.33380358e-6 }, 1.0)
  end)

  it("llama3, which smooths indices 29 to 34 only", function()
    local function llama(factor)
      return { rope_theta = 500000.0, max_position_embeddings = 131072, rope_scaling = { rope_type = "llama3",
        factor = factor, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192 } }
    end
    local f = check(llama(8.0), 128, { [1] = 8.14617234e-1, [28] = 3.21144599e-3, [29] = 2.16657076e-3,
      [30] = 1.37189357e-3, [32] = 5.24846161e-4, [35] = 9.55621235e-5, [63] = 3.06892599e-7 }, 1.0)
    check(llama(32.0), 128, { [29] = 2.1184070e-3, [32] = 4.29556797e-4, [35] = 2.38905309e-5,
      [63] = 7.67231497e-8 }, 1.0)
    local plain = nn.inv_freq(nn.rope_config({ rope_theta = 500000.0 }, 128))
    for i = 0, 63 do
      local ratio = plain[i + 1] / f[i + 1]
      assert.equal(i >= 29 and i <= 34, ratio > 1 and ratio < 8, tostring(i))
    end
  end)

  it("longrope, in both regimes with one scaling", function()
    local hf = { rope_theta = 10000.0, max_position_embeddings = 131072, original_max_position_embeddings = 4096,
      rope_scaling = { type = "longrope", short_factor = { 1.0, 1.5 }, long_factor = { 2.0, 4.0 } } }
    local rope = nn.rope_config(hf, 4)
    local f, s = nn.inv_freq(rope, 4096)
    assert.is_true(math.abs(s - 1.1902380714) < 1e-10)
    assert.is_true(math.abs(f[2] * 1.5 - 0.01) < 1e-9)
    f, s = nn.inv_freq(rope, 4097)
    assert.is_true(math.abs(s - 1.1902380714) < 1e-10)
    assert.same({ 0.5, true }, { f[1], math.abs(f[2] * 4 - 0.01) < 1e-9 })
    assert.equal(4096, nn.rope_switch(rope))
    assert.is_nil(nn.rope_switch(nn.rope_config({}, 4)))
  end)
end)

-- ---- config.json -----------------------------------------------------------------------------------------

describe("config.json", function()
  local null = bs.json.null
  local function read(kind, over)
    local hf = {}
    for key, value in pairs(small[kind]) do hf[key] = value end
    for key, value in pairs(over or {}) do
      if value == "absent" then hf[key] = nil else hf[key] = value end
    end
    return family.find(hf).config(hf)
  end
  local function refuses(kind, over, pattern)
    local ok, err = pcall(read, kind, over)
    assert.is_false(ok)
    assert.matches(pattern, tostring(err))
  end

  it("of every family may have the old keys of rotation or the new table", function()
    local old = { rope_theta = 5e5, rope_scaling = { type = "linear", factor = 4.0 } }
    local new = { rope_parameters = { rope_type = "linear", factor = 4.0, rope_theta = 5e5 } }
    for _, kind in ipairs { "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "glm", "glm4", "phi" } do
      assert.same(nn.inv_freq(read(kind, old).rope), nn.inv_freq(read(kind, new).rope))
      assert.equal(5e5, read(kind, new).rope.theta)
    end
    local plain = { rope_theta = 5e5, rope_scaling = null, rope_parameters = {} }
    assert.equal("default", read("llama", plain).rope.type)
    assert.equal(10000.0, read("llama", { rope_scaling = {} }).rope.theta)
  end)

  it("of gemma3 has one rotation a kind of layer, flat or nested", function()
    local flat = read("gemma3_text", { rope_theta = "absent", rope_scaling = { rope_type = "linear", factor = 8.0 } })
    local nested = read("gemma3_text", { rope_scaling = "absent", rope_parameters = {
      full_attention = { rope_type = "linear", factor = 8.0, rope_theta = 1e6 },
      sliding_attention = { rope_type = "default", rope_theta = 1e4 } } })
    for _, name in ipairs { "full", "sliding" } do
      assert.same(nn.inv_freq(flat.ropes[name]), nn.inv_freq(nested.ropes[name]))
    end
    assert.equal(1e4, flat.ropes.sliding.theta)
    assert.equal("default", flat.ropes.sliding.type)
    assert.equal(5e3, read("gemma3_text", { rope_local_base_freq = 5e3 }).ropes.sliding.theta)
    refuses("gemma3_text", { rope_scaling = "absent", rope_parameters = { full_attention = {} } }, "only one of")
    refuses("gemma3_text", { use_bidirectional_attention = true }, "'use_bidirectional_attention' is true")
  end)

  it("tells a window that is null from one that is absent", function()
    assert.equal(4096, read("mistral", { sliding_window = "absent" }).window)
    assert.equal(0, read("mistral", { sliding_window = null }).window)
    assert.equal(0, read("phi3", { sliding_window = "absent" }).window)
    assert.equal(0, read("qwen2", { use_sliding_window = false }).window)
    assert.same({ [0] = false, true, true }, read("qwen2").sliding)
    assert.same({ [0] = true, false, true }, read("gemma2").sliding)
    assert.same({ [0] = true, false, true }, read("gemma3_text").sliding)
    assert.equal(8, read("mistral", { num_key_value_heads = "absent", num_attention_heads = 16 }).kv_heads)
    assert.equal(4, read("mistral", { num_key_value_heads = null }).kv_heads)
    refuses("mistral", { sliding_window = 4.5 }, "'sliding_window' is 4.5")
  end)

  it("may list the kinds of layers", function()
    local kinds = { "full_attention", "sliding_attention", "full_attention" }
    for _, kind in ipairs { "qwen2", "qwen3", "gemma2", "gemma3_text" } do
      assert.same({ [0] = false, true, false }, read(kind, { layer_types = kinds }).sliding)
    end
    refuses("qwen3", { layer_types = { "full_attention" } }, "'layer_types' is 1 kinds, a list of 3")
    refuses("qwen3", { layer_types = { "full_attention", "linear_attention", "full_attention" } },
      "'layer_types' is linear_attention")
  end)

  it("of a multimodal model keeps the decoder apart, but says at the top whether the head is tied", function()
    local text = config("qwen3_vl_text", { tie_word_embeddings = true })
    assert.is_false(read("qwen3_vl", { text_config = text, tie_word_embeddings = false }).tied)
    assert.is_true(read("qwen3_vl", { text_config = config "qwen3_vl_text" }).tied)
    assert.equal(500000.0, read("qwen3_vl").rope.theta)
    text.hidden_size = nil
    assert.equal(4096, read("qwen3_vl", { text_config = text }).channels)
    refuses("qwen3_vl", { text_config = null }, "'text_config' is missing")
  end)

  it("names activations; the gelu of old Gemma files is the tanh form", function()
    assert.equal("gelu_tanh", read("gemma", { hidden_act = "gelu" }).act)
    assert.equal("gelu_erf", read("gemma", { hidden_act = "silu", hidden_activation = "gelu" }).act)
    assert.equal("gelu_tanh", read("gemma3_text", { hidden_act = "silu" }).act)
    assert.equal("gelu_tanh", read("phi").act)
    assert.equal("gelu_erf", read("llama", { hidden_act = "gelu" }).act)
    refuses("llama", { hidden_act = "quick" }, "'hidden_act' is quick; this llama supports gelu, gelu_new,")
    refuses("gemma", { hidden_act = "silu" }, "'hidden_act' is silu")
  end)

  it("switches soft-caps off by null, and defaults to the family's", function()
    local c = read("gemma2", { attn_logit_softcapping = null, final_logit_softcapping = "absent" })
    assert.same({ 0, 30.0 }, { c.softcap, c.final_softcap })
    assert.equal(0, read("gemma3_text").final_softcap)
    assert.equal(12 ^ -0.5, c.scale)
  end)

  it("turns a part of each head where the family or the file says so", function()
    assert.equal(4, read("glm").rope.dim)
    assert.equal(8, read("glm", { partial_rotary_factor = 1.0 }).rope.dim)
    assert.equal(4, read("phi").rope.dim)
    assert.equal("longrope", read("phi3").rope.type)
    assert.equal("default", read("phi3", { rope_scaling = null }).rope.type)
    refuses("glm", { partial_rotary_factor = 0.4 }, "factor 0.4 of a head of 8")
    refuses("glm", { partial_rotary_factor = "half" }, "partial_rotary_factor half")
  end)

  it("is refused where a value is missing, of a wrong kind or unknown", function()
    refuses("llama", { hidden_size = "absent" }, "key 'hidden_size' is missing; a llama model needs it")
    refuses("qwen2", { num_hidden_layers = 2.5 }, "'num_hidden_layers' is 2.5, a positive integer")
    refuses("glm4", { attention_bias = "yes" }, "'attention_bias' is yes, true or false")
    refuses("phi", { layer_norm_eps = "1e-5" }, "'layer_norm_eps' is 1e%-5, a number")
    refuses("mistral", { num_key_value_heads = 3 }, "4 attention heads do not share 3")
    refuses("llama", { rope_theta = "big" }, "'rope_theta' is big")
    refuses("llama", { rope_scaling = { rope_type = "spiral" } }, "rope type 'spiral' is not supported")
    refuses("llama", { rope_scaling = { rope_type = "linear" } }, "'linear' needs the positive number 'factor'")
    local function longrope(short, long)
      return { rope_scaling = { type = "longrope", short_factor = short, long_factor = long } }
    end
    refuses("phi3", longrope({ 1, 1, 1, 1 }, { 1, 1, 1 }), "the list 'long_factor' of 4 numbers")
    refuses("phi3", longrope({ 1, 1, 0, 1 }, { 1, 1, 1, 1 }), "entry 3 of 'short_factor' is 0")
  end)

  it("is refused in one line, or gives finite frequencies, whatever the numbers of a rotation are", function()
    local odd = { 0, -1, 0.5, 1, 2, 1e-300, 1e300, math.huge, 1 << 62, "8", {}, true }
    local keys = {
      "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
      "mscale_all_dim", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor", "short_factor",
    }
    for _, kind in ipairs { "default", "linear", "llama3", "yarn", "longrope" } do
      for _, key in ipairs(keys) do
        for _, v in ipairs(odd) do
          local scaling = {
            rope_type = kind, factor = 4, low_freq_factor = 1, high_freq_factor = 4,
            original_max_position_embeddings = 64, short_factor = { 1, 1, 1, 1 }, long_factor = { 2, 2, 2, 2 },
          }
          scaling[key] = v
          local ok, c = pcall(read, "llama", { rope_scaling = scaling })
          if ok then
            for _, longest in ipairs { 1, 1 << 40 } do
              local f, scale = nn.inv_freq(c.rope, longest)
              f[#f + 1] = scale
              for _, x in ipairs(f) do assert.is_true(x >= 0 and x < math.huge, kind .. " " .. key) end
            end
          else
            assert.equal(1, type(c) == "table" and c.bs_exit, kind .. " " .. key .. ": " .. tostring(c))
          end
        end
      end
    end
  end)
end)
