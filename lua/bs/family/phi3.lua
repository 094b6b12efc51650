-- SPDX-License-Identifier: Apache-2.0
--- Phi-3, Phi-3.5 mini, Phi-4 and Phi-4 mini: Llama skeleton without biases; q, k and v come from one
-- linear, gate and up from another. Where there is a window, every layer has it.
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "phi3" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "phi3")
  local c = r.decoder { eps = 1e-5 }
  c.act = r.act("hidden_act", "silu")
  -- Older files have other words for longrope.
  c.rope = nn.rope_config(hf, c.head_dim, { names = { su = "longrope", yarn = "longrope" } })
  c.window = r.window("sliding_window", 0)
  c.sliding = r.sliding(c.layers, function() return true end)
  return c
end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t, H = {}, c.channels
  nn.vector(t, "input_layernorm.weight", H)
  nn.linear(t, "self_attn.qkv_proj", (c.heads + 2 * c.kv_heads) * c.head_dim, H)
  nn.linear(t, "self_attn.o_proj", H, c.heads * c.head_dim)
  nn.vector(t, "post_attention_layernorm.weight", H)
  nn.fused_mlp_tensors(t, c)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a, nq, nkv = w.self_attn, c.heads * c.head_dim, c.kv_heads * c.head_dim
  local qkv = a.qkv_proj(nn.rmsnorm(x, w.input_layernorm, c.eps))
  local q = ctx.rope(nn.columns(qkv, 1, nq), c.heads)
  local k = ctx.rope(nn.columns(qkv, nq + 1, nkv), c.kv_heads)
  local v = nn.columns(qkv, nq + nkv + 1, nkv)
  x = a.o_proj(nn.attention(c, ctx, q, k, v), x)
  return nn.fused_mlp(c, w.mlp, nn.rmsnorm(x, w.post_attention_layernorm, c.eps), x)
end

--- Groups of LoRA targets; "all" is every linear of a layer. Adapters act on the fused linears.
M.lora = { attention = { "qkv_proj", "o_proj" }, mlp = { "gate_up_proj", "down_proj" } }

--- The layout of a chat.
M.chat = chat.phi

return M
