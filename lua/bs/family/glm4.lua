-- SPDX-License-Identifier: Apache-2.0
--- GLM-4-0414 and Z1 (9B, 32B): GLM with two more norms, on what attention and MLP give.
-- `post_attention_layernorm` is the norm before the MLP.
local nn = require "bs.nn"
local glm = require "bs.family.glm"

local M = nn.decoder { model_types = { "glm4" } }

M.config, M.lora, M.chat = glm.config, glm.lora, glm.chat

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = glm.tensors(c)
  nn.vector(t, "post_self_attn_layernorm.weight", c.channels)
  nn.vector(t, "post_mlp_layernorm.weight", c.channels)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  local o = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)))
  x = x + nn.rmsnorm(o, w.post_self_attn_layernorm, c.eps)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
  return x + nn.rmsnorm(nn.fused_mlp(c, w.mlp, h), w.post_mlp_layernorm, c.eps)
end

return M
