-- SPDX-License-Identifier: Apache-2.0
--- Gemma 1: Llama skeleton; norms multiply by 1 + w, embedding rows by sqrt(channels), the gate goes
-- through the tanh form of GELU.
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "gemma" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "gemma")
  local c = r.decoder { heads = 16, kv_heads = 16, head_dim = 256, tied = true }
  if r.get("hidden_activation", false) then
    c.act = r.act("hidden_activation")
    r.no_effect "hidden_act"
  else -- older files say "gelu" and mean the tanh form
    r.want("hidden_act", { "gelu", "gelu_pytorch_tanh" }, "gelu")
    c.act = "gelu_tanh"
  end
  c.bias = r.flag("attention_bias", false)
  c.o_bias = c.bias
  c.embed_scale, c.norm_one_plus = math.sqrt(c.channels), true
  c.rope = nn.rope_config(hf, c.head_dim)
  return c
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps, true)
  local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  h = nn.rmsnorm(x, w.post_attention_layernorm, c.eps, true)
  return nn.mlp(c, w.mlp, h, x)
end

--- The layout of a chat.
M.chat = chat.gemma

return M
