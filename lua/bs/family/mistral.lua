-- SPDX-License-Identifier: Apache-2.0
--- Mistral 7B and Nemo: Llama skeleton without biases; where there is a window, every layer has it
-- (Jiang et al. 2023).
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = { model_types = { "mistral" }, peft_prefix = "base_model.model." }

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

M.embed = { name = "model.embed_tokens.weight" }
M.head = { norm = "model.norm.weight", weight = "lm_head.weight" }

function M.prefix(i) return ("model.layers.%d."):format(i) end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.mlp_tensors(t, c)
  return t
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

--- Groups of LoRA targets; "all" is every linear of a layer.
M.lora = nn.lora

--- The layout of a chat.
M.chat = chat.mistral

return M
