-- SPDX-License-Identifier: Apache-2.0
--- Llama 1 to 3 and models of its layout (SmolLM2, ...): RMS norm, rotary GQA attention, SwiGLU.
local nn = require "bs.nn"

local M = { model_types = { "llama" }, peft_prefix = "base_model.model." }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "llama")
  local c = {
    vocab = r.count("vocab_size"), channels = r.count("hidden_size"),
    hidden = r.count("intermediate_size"), layers = r.count("num_hidden_layers"),
    heads = r.count("num_attention_heads"), eps = r.get("rms_norm_eps", 1e-6),
    act = r.want("hidden_act", { "silu" }, "silu"), bias = r.get("attention_bias", false),
    mlp_bias = r.get("mlp_bias", false), tied = r.get("tie_word_embeddings", false),
  }
  c.kv_heads = r.count("num_key_value_heads", c.heads)
  c.head_dim = r.count("head_dim", c.channels // c.heads)
  c.rope = nn.rope_config(hf, c.head_dim)
  return c
end

M.embed = { name = "model.embed_tokens.weight" }
M.head = { norm = "model.norm.weight", weight = "lm_head.weight" }

function M.prefix(i) return ("model.layers.%d."):format(i) end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t, H, D = {}, c.channels, c.head_dim
  nn.vector(t, "input_layernorm.weight", H)
  nn.linear(t, "self_attn.q_proj", c.heads * D, H, c.bias)
  nn.linear(t, "self_attn.k_proj", c.kv_heads * D, H, c.bias)
  nn.linear(t, "self_attn.v_proj", c.kv_heads * D, H, c.bias)
  nn.linear(t, "self_attn.o_proj", H, c.heads * D, c.bias)
  nn.vector(t, "post_attention_layernorm.weight", H)
  nn.linear(t, "mlp.gate_proj", c.hidden, H, c.mlp_bias)
  nn.linear(t, "mlp.up_proj", c.hidden, H, c.mlp_bias)
  nn.linear(t, "mlp.down_proj", H, c.hidden, c.mlp_bias)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a, m = w.self_attn, w.mlp
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  local o = ctx.attend(q, k, a.v_proj(h), {
    heads = c.heads, kv_heads = c.kv_heads, head_dim = c.head_dim,
  })
  x = x + a.o_proj(o)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
  return x + m.down_proj(nn.glu(m.gate_proj(h), m.up_proj(h), c.act))
end

--- Groups of LoRA targets; "all" is every linear of a layer.
M.lora = {
  attention = { "q_proj", "k_proj", "v_proj", "o_proj" },
  mlp = { "gate_proj", "up_proj", "down_proj" },
}

return M
