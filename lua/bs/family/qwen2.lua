-- SPDX-License-Identifier: Apache-2.0
--- Qwen2 and Qwen2.5: Llama skeleton; q, k and v always have biases, o never. Upper layers may look back
-- through a window only (`use_sliding_window`; no published checkpoint does).
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "qwen2" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "qwen2")
  local c = r.decoder {}
  c.act = r.act("hidden_act", "silu")
  c.bias = true -- of q, k and v; o has none
  c.rope = nn.rope_config(hf, c.head_dim)
  local window = r.window("sliding_window", 4096)
  c.window = r.flag("use_sliding_window", false) and window or 0
  local first = r.window("max_window_layers", 28)
  c.sliding = r.sliding(c.layers, function(i) return i >= first end)
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
M.chat = chat.chatml

return M
