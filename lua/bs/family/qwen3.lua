-- SPDX-License-Identifier: Apache-2.0
--- Qwen3 (dense): Llama skeleton, RMS norm over each head of q and k before the rotation.
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "qwen3" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "qwen3")
  local c = r.decoder { head_dim = 128 }
  c.act, c.bias = r.act("hidden_act", "silu"), r.flag("attention_bias", false)
  c.rope = nn.rope_config(hf, c.head_dim)
  local window = r.window("sliding_window", 4096)
  c.window = r.flag("use_sliding_window", false) and window or 0
  local first = r.window("max_window_layers", 28)
  c.sliding = r.sliding(c.layers, function(i) return i >= first end)
  return c
end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, c.bias)
  nn.vector(t, "self_attn.q_norm.weight", c.head_dim)
  nn.vector(t, "self_attn.k_norm.weight", c.head_dim)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.mlp_tensors(t, c)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q = ctx.norm_rope(a.q_proj(h), a.q_norm, c.eps, c.heads)
  local k = ctx.norm_rope(a.k_proj(h), a.k_norm, c.eps, c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
  return nn.mlp(c, w.mlp, h, x)
end

--- The layout of a chat.
M.chat = chat.chatml

return M
