-- SPDX-License-Identifier: Apache-2.0
--- gpt-oss (20b, 120b; OpenAI 2025): attention with a sink a head and a window in every other layer, biases everywhere;
-- each token goes to some of the experts, weighted by a softmax over those alone. The experts of a layer lie in fused
-- tensors, packed as MXFP4 or, [in, out], as bf16; gate and up alternate.
local bs = require "bs"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "gpt_oss" } }

-- Of the gate: y = (up + 1) gate sigmoid(ALPHA gate).
local ALPHA <const> = 1.702

-- The packing of published experts; anything else that says that weights are quantised is not read.
local function check_quantization(r)
  local q = r.get("quantization_config", false)
  if q and (type(q) ~= "table" or q.quant_method ~= "mxfp4") then
    bs.fail("error", "config.json: 'quantization_config' has the quant_method %s; a gpt_oss model is read as mxfp4 or "
      .. "without one", type(q) == "table" and tostring(q.quant_method) or tostring(q))
  end
end

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "gpt_oss")
  local c = r.decoder {
    vocab = 201088, channels = 2880, hidden = 2880, layers = 36, heads = 64, kv_heads = 8, head_dim = 64, eps = 1e-5,
  }
  r.want("hidden_act", { "silu" }, "silu")
  c.bias = r.flag("attention_bias", true)
  c.rope = nn.rope_config(hf, c.head_dim, { theta = 150000.0 })
  c.window = r.window("sliding_window", 128)
  c.sliding = r.sliding(c.layers, function(i) return i % 2 == 0 end)
  c.experts, c.chosen = r.count("num_local_experts", 128), r.count("num_experts_per_tok", 4)
  c.limit, c.alpha = r.number("swiglu_limit", 7.0), r.number("swiglu_alpha", ALPHA)
  check_quantization(r)
  r.no_effect("experts_per_token", "initial_context_length", "router_aux_loss_coef", "output_router_logits")
  if c.chosen > c.experts then
    bs.fail("error", "config.json: 'num_experts_per_tok' is %d of 'num_local_experts' %d", c.chosen, c.experts)
  end
  return c
end

--- Tensors of one layer's trunk, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, c.bias)
  nn.vector(t, "self_attn.sinks", c.heads)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.linear(t, "mlp.router", c.experts, c.channels, true)
  return t
end

--- Tensors of one expert, as slices of the layer's, and what stands before their names.
function M.expert_tensors(c)
  local list = {}
  for _, x in ipairs { { "gate_up_proj", 2 * c.hidden, c.channels }, { "down_proj", c.channels, c.hidden } } do
    local stored = "mlp.experts." .. x[1]
    list[#list + 1] = { name = x[1] .. ".weight", dims = { x[2], x[3] }, stored = stored, transposed = true,
                        packed = "mxfp4" }
    list[#list + 1] = { name = x[1] .. ".bias", dims = { x[2] }, stored = stored .. "_bias" }
  end
  return list
end

function M.expert_prefix(i, e) return ("model.layers.%d.mlp.experts.%d."):format(i, e) end

--- How tokens choose.
function M.routing(c) return { experts = c.experts, chosen = c.chosen, kind = "chosen" } end

M.stages = {
  --- x [T, channels] -> the stream after attention, what experts see, the weights of those that each token goes to
  mix = function(c, w, x, ctx)
    local a = w.self_attn
    local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
    local q, k = ctx.rope(a.q_proj(h), c.heads), ctx.rope(a.k_proj(h), c.kv_heads)
    x = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h), a.sinks), x)
    local u = nn.rmsnorm(x, w.post_attention_layernorm, c.eps)
    return x, u, ctx.route(w.mlp.router(u))
  end,
  --- Rows of one expert and their weights -> weighted rows. The bias of the last product is weighted, too.
  expert = function(c, w, x, weight)
    return nn.row_scale(w.down_proj(nn.glu_clamped(w.gate_up_proj(x), c.alpha, c.limit)), weight, 1)
  end,
  join = nn.join,
}

--- Groups of LoRA targets.
M.lora = { attention = nn.lora.attention, router = { "mlp.router" } }

return M
