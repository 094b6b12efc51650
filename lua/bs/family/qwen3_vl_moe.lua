-- SPDX-License-Identifier: Apache-2.0
--- Qwen3-VL MoE (30B-A3B, 235B-A22B), the text decoder: Qwen3 MoE with other names; the experts of a layer lie in two
-- tensors, in either orientation. Without images its interleaved M-RoPE is the ordinary rotation.
local nn = require "bs.nn"
local qwen3_moe = require "bs.family.qwen3_moe"
local qwen3_vl = require "bs.family.qwen3_vl"

local M = {}
for field, value in pairs(qwen3_moe) do M[field] = value end

M.model_types = { "qwen3_vl_moe" }
M.embed, M.head, M.prefix, M.peft_prefix = qwen3_vl.embed, qwen3_vl.head, qwen3_vl.prefix, qwen3_vl.peft_prefix

M.lora = { attention = nn.lora.attention, router = { "mlp.gate" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local text = nn.text_config(hf)
  nn.reader(text, "qwen3_vl_moe").no_effect("norm_topk_prob")
  text.norm_topk_prob = true -- whatever the file says
  local c = qwen3_moe.config(text)
  c.rope = nn.rope_config(text, c.head_dim, {
    theta = 500000.0, no_effect = { "mrope_section", "mrope_interleaved" },
  })
  return c
end

--- Tensors of one expert, as slices of the layer's, and what stands before their names.
function M.expert_tensors(c)
  return {
    { name = "gate_up_proj.weight", dims = { 2 * c.expert_hidden, c.channels }, stored = "mlp.experts.gate_up_proj",
      transposed = true },
    { name = "down_proj.weight", dims = { c.channels, c.expert_hidden }, stored = "mlp.experts.down_proj",
      transposed = true },
  }
end

function M.expert_prefix(i, e) return M.prefix(i) .. ("mlp.experts.%d."):format(e) end

M.stages = { mix = qwen3_moe.stages.mix, join = qwen3_moe.stages.join }

--- Rows of one expert and their weights -> weighted rows.
function M.stages.expert(c, w, x, weight)
  local both = w.gate_up_proj(x)
  local gate, up = nn.columns(both, 1, c.expert_hidden), nn.columns(both, c.expert_hidden + 1, c.expert_hidden)
  return w.down_proj(nn.row_scale(nn.glu(gate, up, c.act), weight, 1))
end

return M
