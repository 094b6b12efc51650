-- SPDX-License-Identifier: Apache-2.0
--- Mixtral (8x7B, 8x22B): Mistral's attention, and in every layer a few large SwiGLU experts, weighted by a softmax
-- over those that a token goes to (Jiang et al. 2024).
local bs = require "bs"
local chat = require "bs.chat"
local nn = require "bs.nn"
local mistral = require "bs.family.mistral"

local M = nn.decoder { model_types = { "mixtral" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r, c = nn.reader(hf, "mixtral"), mistral.config(hf)
  c.eps, c.window = r.number("rms_norm_eps", 1e-5), r.window("sliding_window", 0)
  c.rope = nn.rope_config(hf, c.head_dim, { theta = 1e6 })
  c.experts, c.chosen = r.count("num_local_experts", 8), r.count("num_experts_per_tok", 2)
  c.expert_hidden = c.hidden
  r.no_effect("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
  if c.chosen > c.experts then
    bs.fail("error", "config.json: 'num_experts_per_tok' is %d of 'num_local_experts' %d", c.chosen, c.experts)
  end
  return c
end

--- Tensors of one layer's trunk, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.linear(t, "block_sparse_moe.gate", c.experts, c.channels)
  return t
end

local expert
--- Tensors of one expert, and what stands before their names.
M.expert_tensors, expert = nn.swiglu_experts { gate = "w1", up = "w3", down = "w2" }

function M.expert_prefix(i, e) return ("model.layers.%d.block_sparse_moe.experts.%d."):format(i, e) end

--- How tokens choose.
function M.routing(c) return { experts = c.experts, chosen = c.chosen, kind = "softmax", renorm = true } end

M.stages = {
  --- x [T, channels] -> the stream after attention, what experts see, the weights of those that each token goes to
  mix = function(c, w, x, ctx)
    local a = w.self_attn
    local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
    local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
    x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
    local u = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
    return x, u, ctx.route(w.block_sparse_moe.gate(u))
  end,
  expert = expert, join = nn.join,
}

--- Groups of LoRA targets.
M.lora = { attention = nn.lora.attention, experts = { "w1", "w2", "w3" }, router = { "block_sparse_moe.gate" } }

--- The layout of a chat.
M.chat = chat.mistral

return M
