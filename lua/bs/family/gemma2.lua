-- SPDX-License-Identifier: Apache-2.0
--- Gemma 2: norms before and after attention and MLP, soft-caps on scores and logits, a window in every
-- second layer (Gemma Team 2024). Norms multiply by 1 + w.
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "gemma2" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "gemma2")
  local c = r.decoder { heads = 8, kv_heads = 4, head_dim = 256, tied = true }
  c.act, c.bias = r.act("hidden_activation", "gelu_pytorch_tanh"), r.flag("attention_bias", false)
  r.no_effect "hidden_act"
  c.scale = r.number("query_pre_attn_scalar", 256) ^ -0.5
  c.softcap = r.number("attn_logit_softcapping", 50.0, 0)
  c.final_softcap = r.number("final_logit_softcapping", 30.0, 0)
  c.window = r.window("sliding_window", 4096)
  c.sliding = r.sliding(c.layers, function(i) return i % 2 == 0 end)
  c.embed_scale, c.norm_one_plus = math.sqrt(c.channels), true
  c.rope = nn.rope_config(hf, c.head_dim)
  return c
end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, c.bias)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.vector(t, "pre_feedforward_layernorm.weight", c.channels)
  nn.mlp_tensors(t, c)
  nn.vector(t, "post_feedforward_layernorm.weight", c.channels)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local function norm(v, weight) return nn.rmsnorm(v, weight, c.eps, true) end
  local a = w.self_attn
  local h = norm(x, w.input_layernorm)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  local o = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)))
  x = x + norm(o, w.post_attention_layernorm)
  h = norm(x, w.pre_feedforward_layernorm)
  return x + norm(nn.mlp(c, w.mlp, h), w.post_feedforward_layernorm)
end

--- The layout of a chat.
M.chat = chat.gemma

return M
