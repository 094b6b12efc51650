-- SPDX-License-Identifier: Apache-2.0
--- Qwen3-VL (dense), trained on text: its decoder is a Qwen3 decoder under another prefix. The three
-- positions that a token has here (time, height, width) are equal in text, which makes the interleaved
-- rotation the ordinary one. The vision tower's tensors are not read.
local nn = require "bs.nn"
local qwen3 = require "bs.family.qwen3"

local M = nn.decoder { model_types = { "qwen3_vl" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local text = nn.text_config(hf)
  local r = nn.reader(text, "qwen3_vl")
  local c = r.decoder {
    vocab = 151936, channels = 4096, hidden = 22016, layers = 32, heads = 32, kv_heads = 32, head_dim = 128,
  }
  c.act, c.bias = r.act("hidden_act", "silu"), r.flag("attention_bias", false)
  c.rope = nn.rope_config(text, c.head_dim, {
    theta = 500000.0, no_effect = { "mrope_section", "mrope_interleaved" },
  })
  return c
end

M.embed = { name = "model.language_model.embed_tokens.weight" }
M.head = { norm = "model.language_model.norm.weight", weight = "lm_head.weight" }

function M.prefix(i) return ("model.language_model.layers.%d."):format(i) end

M.tensors, M.layer, M.lora, M.chat = qwen3.tensors, qwen3.layer, qwen3.lora, qwen3.chat

return M
