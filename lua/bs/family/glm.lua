-- SPDX-License-Identifier: Apache-2.0
--- GLM-4 9B in the Hugging Face layout (glm-4-9b-hf, glm-4-9b-chat-hf): Llama skeleton, biases on q, k and
-- v, gate and up in one linear; the first half of each head turns, by neighbouring pairs.
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "glm" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "glm")
  local c = r.decoder { kv_heads = 2, head_dim = 128, eps = 1.5625e-7 }
  c.act, c.bias = r.act("hidden_act", "silu"), r.flag("attention_bias", true)
  c.rope, c.rope_style = nn.rope_config(hf, c.head_dim, { partial = 0.5 }), "interleaved"
  return c
end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, false)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.fused_mlp_tensors(t, c)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
  return nn.fused_mlp(c, w.mlp, h, x)
end

--- Groups of LoRA targets; "all" is every linear of a layer.
M.lora = { attention = nn.lora.attention, mlp = { "gate_up_proj", "down_proj" } }

--- The layout of a chat.
M.chat = chat.glm4

return M
