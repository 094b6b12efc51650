-- SPDX-License-Identifier: Apache-2.0
--- Mistral 7B and Nemo: Llama skeleton without biases; where there is a window, every layer has it
-- (Jiang et al. 2023).
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "mistral" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "mistral")
  local c = r.decoder { kv_heads = 8 }
  c.act = r.act("hidden_act", "silu")
  c.rope = nn.rope_config(hf, c.head_dim)
  c.window = r.window("sliding_window", 4096) -- null, not absence, switches it off
  c.sliding = r.sliding(c.layers, function() return true end)
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
M.chat = chat.mistral

return M
