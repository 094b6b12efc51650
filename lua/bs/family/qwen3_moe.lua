-- SPDX-License-Identifier: Apache-2.0
--- Qwen3 MoE (30B-A3B, 235B-A22B): Qwen3's attention; each token goes to some of the experts, small SwiGLUs, weighted
-- by a softmax over all of them. Some layers may be dense.
local bs = require "bs"
local chat = require "bs.chat"
local nn = require "bs.nn"
local qwen3 = require "bs.family.qwen3"

local M = nn.decoder { model_types = { "qwen3_moe" } }

-- Which layers have experts, from 0 on.
local function sparse_layers(r, layers)
  local step, dense, out = r.count("decoder_sparse_step", 1), {}, {}
  local only = r.get("mlp_only_layers", {}, {})
  if type(only) ~= "table" then
    bs.fail("error", "config.json: 'mlp_only_layers' is %s, a list of layers is expected", tostring(only))
  end
  for _, i in ipairs(only) do dense[i] = true end
  for i = 0, layers - 1 do out[i] = not dense[i] and (i + 1) % step == 0 end
  return out
end

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r, c = nn.reader(hf, "qwen3_moe"), qwen3.config(hf)
  c.experts, c.chosen = r.count("num_experts", 128), r.count("num_experts_per_tok", 8)
  c.expert_hidden, c.renorm = r.count("moe_intermediate_size", 768), r.flag("norm_topk_prob", false)
  r.no_effect("router_aux_loss_coef", "output_router_logits")
  if c.chosen > c.experts then
    bs.fail("error", "config.json: 'num_experts_per_tok' is %d of 'num_experts' %d", c.chosen, c.experts)
  end
  c.sparse = sparse_layers(r, c.layers)
  return c
end

--- Does a layer have experts?
function M.staged(c, i) return c.sparse[i] end

--- Tensors of one layer's trunk, in the order of its block.
function M.tensors(c, i)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, c.bias)
  nn.vector(t, "self_attn.q_norm.weight", c.head_dim)
  nn.vector(t, "self_attn.k_norm.weight", c.head_dim)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  if c.sparse[i] then nn.linear(t, "mlp.gate", c.experts, c.channels) else nn.mlp_tensors(t, c) end
  return t
end

local expert
--- Tensors of one expert, and what stands before their names.
M.expert_tensors, expert = nn.swiglu_experts { gate = "gate_proj", up = "up_proj", down = "down_proj" }

function M.expert_prefix(i, e) return ("model.layers.%d.mlp.experts.%d."):format(i, e) end

--- How tokens choose.
function M.routing(c) return { experts = c.experts, chosen = c.chosen, kind = "softmax", renorm = c.renorm } end

-- x [T, channels] -> the stream after attention, and its norm.
local function attend(c, w, x, ctx)
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q = ctx.norm_rope(a.q_proj(h), a.q_norm, c.eps, c.heads)
  local k = ctx.norm_rope(a.k_proj(h), a.k_norm, c.eps, c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  return x, nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
end

--- A dense layer: x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local h, u = attend(c, w, x, ctx)
  return nn.mlp(c, w.mlp, u, h)
end

M.stages = {
  --- x -> the stream, what experts see, and the weights of those that each token goes to
  mix = function(c, w, x, ctx)
    local h, u = attend(c, w, x, ctx)
    return h, u, ctx.route(w.mlp.gate(u))
  end,
  expert = expert, join = nn.join,
}

--- Groups of LoRA targets.
M.lora = {
  attention = nn.lora.attention, mlp = nn.lora.mlp, router = { "mlp.gate" },
}

--- The layout of a chat.
M.chat = chat.qwen3

return M
