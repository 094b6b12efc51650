-- SPDX-License-Identifier: Apache-2.0
--- Llama 1 to 3 and models of its layout (SmolLM2, ...): RMS norm, rotary GQA attention, SwiGLU
-- (Touvron et al. 2023).
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "llama" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "llama")
  local c = r.decoder {}
  c.act = r.act("hidden_act", "silu")
  c.bias, c.mlp_bias = r.flag("attention_bias", false), r.flag("mlp_bias", false)
  c.o_bias = c.bias
  c.rope = nn.rope_config(hf, c.head_dim)
  return c
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
  return nn.mlp(c, w.mlp, h, x)
end

--- The layout of a chat.
M.chat = chat.llama

return M
