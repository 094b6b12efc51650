-- SPDX-License-Identifier: Apache-2.0
--- GLM-4.5, 4.5-Air, 4.6: the first layers are dense, the others have routed experts beside a shared one. Which experts
-- a token goes to is chosen by the sigmoid of their logits and a correction, weighted by the sigmoid alone.
local bs = require "bs"
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "glm4_moe" } }

local function read_routing(r, c)
  c.experts, c.chosen = r.count("n_routed_experts", 128), r.count("num_experts_per_tok", 8)
  c.expert_hidden, c.shared = r.count("moe_intermediate_size", 1408), r.count("n_shared_experts", 1)
  c.groups, c.kept = r.count("n_group", 1), r.count("topk_group", 1)
  c.renorm, c.route_scale = r.flag("norm_topk_prob", true), r.number("routed_scaling_factor", 1.0)
  c.dense = r.window("first_k_dense_replace", 1)
  if c.chosen > c.experts or c.experts % c.groups ~= 0 or c.kept > c.groups
    or c.chosen > c.experts // c.groups * c.kept then
    bs.fail("error", "config.json: %d of %d experts ('num_experts_per_tok', 'n_routed_experts') from %d of %d groups "
      .. "('topk_group', 'n_group')", c.chosen, c.experts, c.kept, c.groups)
  end
end

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "glm4_moe")
  local c = r.decoder { eps = 1e-5 }
  c.act = r.act("hidden_act", "silu")
  c.bias, c.head_norms = r.flag("attention_bias", false), r.flag("use_qk_norm", false)
  c.rope = nn.rope_config(hf, c.head_dim, { partial = 0.5 })
  read_routing(r, c)
  return c
end

--- Does a layer have experts?
function M.staged(c, i) return i >= c.dense end

--- Tensors of one layer's trunk, in the order of its block.
function M.tensors(c, i)
  local t, H = {}, c.channels
  nn.vector(t, "input_layernorm.weight", H)
  nn.attention_tensors(t, c, c.bias)
  if c.head_norms then
    nn.vector(t, "self_attn.q_norm.weight", c.head_dim)
    nn.vector(t, "self_attn.k_norm.weight", c.head_dim)
  end
  nn.vector(t, "post_attention_layernorm.weight", H)
  if not M.staged(c, i) then
    nn.mlp_tensors(t, c)
    return t
  end
  nn.linear(t, "mlp.gate", c.experts, H)
  nn.vector(t, "mlp.gate.e_score_correction_bias", c.experts)
  nn.linear(t, "mlp.shared_experts.gate_proj", c.shared * c.expert_hidden, H)
  nn.linear(t, "mlp.shared_experts.up_proj", c.shared * c.expert_hidden, H)
  nn.linear(t, "mlp.shared_experts.down_proj", H, c.shared * c.expert_hidden)
  return t
end

local expert
--- Tensors of one expert, and what stands before their names.
M.expert_tensors, expert = nn.swiglu_experts { gate = "gate_proj", up = "up_proj", down = "down_proj" }

function M.expert_prefix(i, e) return ("model.layers.%d.mlp.experts.%d."):format(i, e) end

--- How tokens choose.
function M.routing(c)
  return { experts = c.experts, chosen = c.chosen, kind = "sigmoid", groups = c.groups, kept = c.kept,
           renorm = c.renorm, scale = c.route_scale }
end

-- x [T, channels] -> the stream after attention, and its norm.
local function attend(c, w, x, ctx)
  local a = w.self_attn
  local function heads(y, norm, n)
    if norm then return ctx.norm_rope(y, norm, c.eps, n) end
    return ctx.rope(y, n)
  end
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k = heads(a.q_proj(h), a.q_norm, c.heads), heads(a.k_proj(h), a.k_norm, c.kv_heads)
  x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)), x)
  return x, nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
end

--- A dense layer: x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local h, u = attend(c, w, x, ctx)
  return nn.mlp(c, w.mlp, u, h)
end

M.stages = {
  --- x -> the stream with the shared expert's part, what experts see, the weights of those that each token goes to
  mix = function(c, w, x, ctx)
    local h, u = attend(c, w, x, ctx)
    local gate = w.mlp.gate
    return nn.mlp(c, w.mlp.shared_experts, u, h), u, ctx.route(gate(u), gate.e_score_correction_bias)
  end,
  expert = expert, join = nn.join,
}

--- Groups of LoRA targets.
M.lora = { attention = nn.lora.attention, mlp = nn.lora.mlp, router = { "mlp.gate" } }

--- The layout of a chat.
M.chat = chat.glm4

return M
