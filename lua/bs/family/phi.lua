-- SPDX-License-Identifier: Apache-2.0
--- Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side on one layer norm, biases on every linear and
-- on the head; a part of each head turns (Gunasekar et al. 2023).
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "phi" } }

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "phi")
  local c = r.decoder { eps_key = "layer_norm_eps", eps = 1e-5 }
  c.act = r.act("hidden_act", "gelu_new")
  c.qk_norm = r.flag("qk_layernorm", false)
  c.rope = nn.rope_config(hf, c.head_dim, { partial = 0.5 })
  return c
end

M.head = {
  norm = "model.final_layernorm.weight", norm_bias = "model.final_layernorm.bias",
  weight = "lm_head.weight", bias = "lm_head.bias",
  apply = function(c, w, x) return nn.layernorm(x, w.norm, c.eps) end,
}

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t, H, D = {}, c.channels, c.head_dim
  nn.norm(t, "input_layernorm", H)
  nn.linear(t, "self_attn.q_proj", c.heads * D, H, true)
  nn.linear(t, "self_attn.k_proj", c.kv_heads * D, H, true)
  nn.linear(t, "self_attn.v_proj", c.kv_heads * D, H, true)
  nn.linear(t, "self_attn.dense", H, c.heads * D, true)
  if c.qk_norm then
    nn.norm(t, "self_attn.q_layernorm", D)
    nn.norm(t, "self_attn.k_layernorm", D)
  end
  nn.linear(t, "mlp.fc1", c.hidden, H, true)
  nn.linear(t, "mlp.fc2", H, c.hidden, true)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local a, m = w.self_attn, w.mlp
  local h = nn.layernorm(x, w.input_layernorm, c.eps)
  local q, k = a.q_proj(h), a.k_proj(h)
  if c.qk_norm then
    q, k = nn.layernorm(q, a.q_layernorm, c.eps), nn.layernorm(k, a.k_layernorm, c.eps)
  end
  local o = nn.attention(c, ctx, ctx.rope(q, c.heads), ctx.rope(k, c.kv_heads), a.v_proj(h))
  return m.fc2(nn.act(m.fc1(h), c.act), a.dense(o, x))
end

--- Groups of LoRA targets; "all" is every linear of a layer.
M.lora = { attention = { "q_proj", "k_proj", "v_proj", "dense" }, mlp = { "fc1", "fc2" } }

return M
