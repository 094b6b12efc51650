-- SPDX-License-Identifier: Apache-2.0
--- Every family against its formulas in f64 (tests/support/plain.lua), with options on that no
-- reference has: biases, windows, part rotations, both regimes of longrope, norms inside attention.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local job = require "bs.job"
local model = require "bs.model.model"
local models = require "family_models"
local plain = require "plain"
local tiny = require "tiny"

local LENGTH <const> = 20
local usual = { before = "input_layernorm", before_mlp = "post_attention_layernorm" }
local function norms(more)
  local out = {}
  for role, name in pairs(usual) do out[role] = name end
  for role, name in pairs(more) do out[role] = name end
  return out
end
local per_head = { q = "self_attn.q_norm", k = "self_attn.k_norm" }
local around = {
  before = "input_layernorm", after = "post_attention_layernorm", before_mlp = "pre_feedforward_layernorm",
  after_mlp = "post_feedforward_layernorm",
}
local root32, scale12 = math.sqrt(32), 12 ^ -0.5
local function always(v) return function() return v end end
local long = plain.freq(10000, 8, models.long_factors)

-- {config.json's model, overrides of it, description}
local cases = {
  llama = { "llama", {}, { head = "lm_head" } },
  ["llama, another theta"] = { "llama", { rope_theta = 500.0 },
    { head = "lm_head", freq = always(plain.freq(500, 8)) } },
  qwen2 = { "qwen2", {}, { head = "lm_head", window = function(i) return i >= 1 and 5 or 0 end } },
  qwen3 = { "qwen3", {}, { head = "lm_head", norms = norms(per_head) } },
  ["qwen3, windows by layer_types"] = { "qwen3", { use_sliding_window = true, sliding_window = 3,
    layer_types = { "sliding_attention", "full_attention", "full_attention" } },
    { head = "lm_head", norms = norms(per_head), window = function(i) return i == 0 and 3 or 0 end } },
  qwen3_vl = { "qwen3_vl", {}, { embed = "model.language_model.embed_tokens", final = "model.language_model.norm",
    prefix = "model.language_model.layers.", norms = norms(per_head), freq = always(plain.freq(500000, 8)) } },
  mistral = { "mistral", {}, { head = "lm_head", window = always(4) } },
  gemma = { "gemma", { attention_bias = true }, { kv_heads = 1, one_plus = true, act = "gelu_tanh",
    embed_scale = root32 } },
  gemma2 = { "gemma2", {}, { one_plus = true, act = "gelu_tanh", embed_scale = root32, norms = around,
    scale = scale12, cap = 2, final_cap = 3, window = function(i) return i % 2 == 0 and 5 or 0 end } },
  gemma3_text = { "gemma3_text", { final_logit_softcapping = 4.0 }, { head = "lm_head", one_plus = true,
    act = "gelu_tanh", embed_scale = root32, scale = scale12, final_cap = 4,
    norms = { before = around.before, after = around.after, before_mlp = around.before_mlp,
              after_mlp = around.after_mlp, q = per_head.q, k = per_head.k },
    window = function(i) return i == 1 and 0 or 5 end,
    freq = function(i) return i == 1 and plain.freq(1e6, 8, { 8, 8, 8, 8 }) or plain.freq(1e4, 8) end } },
  phi = { "phi", {}, { head = "lm_head", final = "model.final_layernorm", eps = 1e-5, act = "gelu_tanh",
    parallel = true, plain_mlp = true, out = "dense", freq = always(plain.freq(10000, 4)),
    norms = { before = "input_layernorm", q = "self_attn.q_layernorm", k = "self_attn.k_layernorm" } } },
  phi3 = { "phi3", {}, { head = "lm_head", eps = 1e-5, fused_qkv = true, fused_mlp = true, window = always(6),
    freq = always(long), turn_scale = math.sqrt(1 + math.log(4) / math.log(16)) } },
  ["phi3, rows within the original length"] = { "phi3", { original_max_position_embeddings = 20 },
    { head = "lm_head", eps = 1e-5, fused_qkv = true, fused_mlp = true, window = always(6),
      freq = always(plain.freq(10000, 8, { 1.0, 1.1, 1.2, 1.3 })),
      turn_scale = math.sqrt(1 + math.log(64 / 20) / math.log(20)) } },
  ["phi3, a part of each head turned"] = { "phi3", { rope_scaling = bs.json.null, partial_rotary_factor = 0.75 },
    { head = "lm_head", eps = 1e-5, fused_qkv = true, fused_mlp = true, window = always(6),
      freq = always(plain.freq(10000, 6)) } },
  glm = { "glm", {}, { head = "lm_head", eps = 1.5625e-7, fused_mlp = true, turn = "pairs",
    freq = always(plain.freq(10000, 4)) } },
  glm4 = { "glm4", { attention_bias = true, rms_norm_eps = 1e-5 }, { head = "lm_head", eps = 1e-5, fused_mlp = true,
    turn = "pairs", freq = always(plain.freq(10000, 4)),
    norms = norms { after = "post_self_attn_layernorm", after_mlp = "post_mlp_layernorm" } } },
}

-- ---- families with experts -------------------------------------------------------------------------------

local swiglu = { "gate_proj", "up_proj", "down_proj" }
local function qwen3_moe(over, moe)
  local m = { router = "mlp.gate", at = "mlp.experts.", kind = "softmax", names = swiglu, chosen = 2,
    layers = function(i) return i ~= 1 end }
  for key, value in pairs(moe) do m[key] = value end
  return { "qwen3_moe", over, { head = "lm_head", norms = norms(per_head), moe = m } }
end
local function glm4_moe(over, moe)
  local m = { router = "mlp.gate", at = "mlp.experts.", kind = "sigmoid", names = swiglu, chosen = 2, renorm = true,
    scale = 1.5, bias = "mlp.gate.e_score_correction_bias", layers = function(i) return i >= 1 end,
    shared = { at = "mlp.shared_experts.", hidden = 48 }, groups = 3, kept = 2 }
  for key, value in pairs(moe) do m[key] = value or nil end
  return { "glm4_moe", over, { head = "lm_head", eps = 1e-5, norms = norms(per_head), moe = m,
    freq = always(plain.freq(10000, 4)) } }
end
local function gpt_oss(over, limit)
  return { "gpt_oss", over, { head = "lm_head", eps = 1e-5, sinks = true, freq = always(plain.freq(150000, 8)),
    window = function(i) return i % 2 == 0 and 5 or 0 end,
    moe = { router = "mlp.router", at = "mlp.experts.", kind = "chosen", chosen = 2, hidden = 64, limit = limit,
            layers = always(true) } } }
end

cases.qwen3_moe = qwen3_moe({}, { renorm = true })
cases["qwen3_moe, weights as they are"] = qwen3_moe({ norm_topk_prob = false }, {})
cases["qwen3_moe, every second layer"] = qwen3_moe({ mlp_only_layers = { 0 }, decoder_sparse_step = 2 },
  { renorm = true, layers = function(i) return i == 1 end })
cases.qwen3_vl_moe = { "qwen3_vl_moe", {}, { head = "lm_head", embed = "model.language_model.embed_tokens",
  final = "model.language_model.norm", prefix = "model.language_model.layers.", norms = norms(per_head),
  freq = always(plain.freq(500000, 8)),
  moe = { router = "mlp.gate", at = "mlp.experts.", kind = "softmax", chosen = 3, renorm = true, hidden = 24,
          layers = always(true) } } }
cases.mixtral = { "mixtral", {}, { head = "lm_head", window = always(6), freq = always(plain.freq(1e6, 8)), eps = 1e-5,
  moe = { router = "block_sparse_moe.gate", at = "block_sparse_moe.experts.", kind = "softmax", chosen = 2,
          renorm = true, names = { "w1", "w3", "w2" }, layers = always(true) } } }
cases.glm4_moe = glm4_moe({}, {})
cases["glm4_moe, one group, no norms of heads"] = glm4_moe({ n_group = 1, topk_group = 1, use_qk_norm = false,
  norm_topk_prob = false, n_shared_experts = 1 }, { groups = false, renorm = false,
  shared = { at = "mlp.shared_experts.", hidden = 24 } })
cases["glm4_moe, one group, no norms of heads"][3].norms = usual
cases.gpt_oss = gpt_oss({}, 0.5)
cases["gpt_oss, the usual limit"] = gpt_oss({ swiglu_limit = bs.json.null }, 7)

local default = {
  prefix = "model.layers.", embed = "model.embed_tokens", final = "model.norm", layers = 3, heads = 4, kv_heads = 2,
  dim = 8, hidden = 40, eps = 1e-6, act = "silu", norms = usual, turn = "half", freq = always(plain.freq(10000, 8)),
}

it("embedding rows of Gemma are multiplied by a number of the type that is computed in", function()
  local bf16 = { [640] = 25.25, [1152] = 34, [2304] = 48, [2560] = 50.5, [3584] = 59.75, [3840] = 62,
                 [4608] = 68, [5376] = 73.5 }
  local dir = tiny.folder "embed_scale"
  for channels, want in pairs(bf16) do
    local hf = { model_type = "gemma3_text", vocab_size = 4, hidden_size = channels, intermediate_size = 1,
      num_hidden_layers = 1, num_attention_heads = 1, num_key_value_heads = 1, head_dim = 2 }
    tiny.checkpoint(dir, family.find(hf), hf, "bf16")
    assert.equal(want, model.open(dir, { compute = "bf16" }).embed_scale)
    assert.is_true(math.abs(model.open(dir).embed_scale / math.sqrt(channels) - 1) < 6e-8)
  end
end)

describe("the formulas of", function()
  local names = {}
  for name in pairs(cases) do names[#names + 1] = name end
  table.sort(names)

  it("every family are written down", function()
    for kind in pairs(models.small) do assert.is_table(cases[kind], kind) end
  end)

  for _, name in ipairs(names) do
    it(name, function()
      local kind, over, said = table.unpack(cases[name])
      local hf, d = {}, setmetatable(said, { __index = default })
      for key, value in pairs(models.small[kind]) do hf[key] = value end
      for key, value in pairs(over) do hf[key] = value end
      local dir = tiny.folder "formula"
      tiny.checkpoint(dir, family.find(hf), hf, "f32")
      local micro = tiny.micro(5, models.VOCAB, { LENGTH })
      local j <close> = job.new { model = dir, trainable = "none", logits = true, micro_tokens = LENGTH }
      local ours = j:walk({ micro }, { mode = "logits" })[1]
      local want = bs.array.new("f64", { LENGTH, models.VOCAB }, plain.logits(dir, d, micro.ids))
      local err = bs.array.rel_err(ours, want)
      assert.is_true(err < 2e-6, ("logits are off by %.3g"):format(err))
    end)
  end
end)
