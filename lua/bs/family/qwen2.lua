-- SPDX-License-Identifier: Apache-2.0
--- Qwen2 and Qwen2.5: Llama skeleton; q, k and v always have biases, o never. Upper layers may look back
-- through a window only (`use_sliding_window`; no published checkpoint does).
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = { model_types = { "qwen2" }, peft_prefix = "base_model.model." }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "qwen2")
  local c = r.decoder {}
  c.act = r.act("hidden_act", "silu")
  c.rope = nn.rope_config(hf, c.head_dim)
  c.window = r.flag("use_sliding_window", false) and r.window("sliding_window", 4096) or 0
  local first = r.window("max_window_layers", 28)
  c.sliding = r.sliding(c.layers, function(i) return i >= first end)
  return c
end

M.embed = { name = "model.embed_tokens.weight" }
M.head = { norm = "model.norm.weight", weight = "lm_head.weight" }

function M.prefix(i) return ("model.layers.%d."):format(i) end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, true, false)
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
M.chat = chat.chatml

return M
