-- SPDX-License-Identifier: Apache-2.0
--- Qwen3 (dense): Llama skeleton, RMS norm over each head of q and k before the rotation.
local nn = require "bs.nn"

local M = { model_types = { "qwen3" }, peft_prefix = "base_model.model." }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "qwen3")
  local c = {
    vocab = r.count("vocab_size"), channels = r.count("hidden_size"),
    hidden = r.count("intermediate_size"), layers = r.count("num_hidden_layers"),
    heads = r.count("num_attention_heads"), eps = r.get("rms_norm_eps", 1e-6),
    act = r.want("hidden_act", { "silu" }, "silu"), bias = r.get("attention_bias", false),
    tied = r.get("tie_word_embeddings", false), head_dim = r.count("head_dim", 128),
  }
  c.kv_heads = r.count("num_key_value_heads", c.heads)
  c.rope = nn.rope_config(hf, c.head_dim)
  c.window = r.get("use_sliding_window", false) and r.count("sliding_window", 4096) or 0
  c.window_from = r.get("max_window_layers", 28)
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
  nn.vector(t, "self_attn.q_norm.weight", D)
  nn.vector(t, "self_attn.k_norm.weight", D)
  nn.vector(t, "post_attention_layernorm.weight", H)
  nn.linear(t, "mlp.gate_proj", c.hidden, H)
  nn.linear(t, "mlp.up_proj", c.hidden, H)
  nn.linear(t, "mlp.down_proj", H, c.hidden)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a, m = w.self_attn, w.mlp
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q = nn.rmsnorm(a.q_proj(h), a.q_norm, c.eps)
  local k = nn.rmsnorm(a.k_proj(h), a.k_norm, c.eps)
  local o = ctx.attend(ctx.rope(q, c.heads), ctx.rope(k, c.kv_heads), a.v_proj(h), {
    heads = c.heads, kv_heads = c.kv_heads, head_dim = c.head_dim,
    window = ctx.layer >= c.window_from and c.window or 0,
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
