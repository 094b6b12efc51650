-- SPDX-License-Identifier: Apache-2.0
--- Gemma 3, text checkpoints: the norms of Gemma 2, norms over each head of q and k in place of the
-- soft-caps, and two rotations: layers with a window turn by theta 1e4, the others (every sixth) by theta
-- 1e6, where a checkpoint for long contexts also scales (Gemma Team 2025).
local bs = require "bs"
local chat = require "bs.chat"
local nn = require "bs.nn"

local M = nn.decoder { model_types = { "gemma3_text" } }

-- Both layouts: one table a kind of layer, or flat keys that describe the full layers.
local function ropes(hf, r, head_dim)
  local by_kind = nn.reader(type(hf.rope_parameters) == "table" and hf.rope_parameters or {}, "gemma3_text")
  local full, sliding = by_kind.get("full_attention", false), by_kind.get("sliding_attention", false)
  if (full == false) ~= (sliding == false) then
    bs.fail("error", "config.json: 'rope_parameters' has only one of full_attention and sliding_attention")
  end
  full = full and {
    rope_parameters = full, rope_theta = hf.rope_theta, max_position_embeddings = hf.max_position_embeddings,
  } or hf
  local base = r.number("rope_local_base_freq", 10000.0)
  sliding = sliding and { rope_parameters = sliding, rope_theta = hf.rope_local_base_freq } or { rope_theta = base }
  return {
    full = nn.rope_config(full, head_dim, { theta = 1000000.0 }),
    sliding = nn.rope_config(sliding, head_dim),
  }
end

--- The numbers that the family uses, from a config.json table.
function M.config(hf)
  local r = nn.reader(hf, "gemma3_text")
  local c = r.decoder {
    vocab = 262208, channels = 2304, hidden = 9216, layers = 26, heads = 8, kv_heads = 4, head_dim = 256,
    tied = true,
  }
  c.act, c.bias = r.act("hidden_activation", "gelu_pytorch_tanh"), r.flag("attention_bias", false)
  r.want("use_bidirectional_attention", { false }, false)
  r.no_effect "hidden_act"
  c.scale = r.number("query_pre_attn_scalar", 256) ^ -0.5
  c.final_softcap = r.number("final_logit_softcapping", 0)
  c.window = r.window("sliding_window", 4096)
  local every = r.count("sliding_window_pattern", r.count("_sliding_window_pattern", 6))
  c.sliding = r.sliding(c.layers, function(i) return (i + 1) % every ~= 0 end)
  c.embed_scale, c.norm_one_plus = math.sqrt(c.channels), true
  c.ropes = ropes(hf, r, c.head_dim)
  return c
end

--- Tensors of one layer, in the order of its block.
function M.tensors(c)
  local t = {}
  nn.vector(t, "input_layernorm.weight", c.channels)
  nn.attention_tensors(t, c, c.bias, c.bias)
  nn.vector(t, "self_attn.q_norm.weight", c.head_dim)
  nn.vector(t, "self_attn.k_norm.weight", c.head_dim)
  nn.vector(t, "post_attention_layernorm.weight", c.channels)
  nn.vector(t, "pre_feedforward_layernorm.weight", c.channels)
  nn.mlp_tensors(t, c)
  nn.vector(t, "post_feedforward_layernorm.weight", c.channels)
  return t
end

--- x [T, channels] -> [T, channels]
function M.layer(c, w, x, ctx)
  local function norm(v, weight) return nn.rmsnorm(v, weight, c.eps, true) end
  local a, rope = w.self_attn, c.sliding[ctx.layer] and "sliding" or "full"
  local h = norm(x, w.input_layernorm)
  local q = ctx.norm_rope(a.q_proj(h), a.q_norm, c.eps, c.heads, rope, true)
  local k = ctx.norm_rope(a.k_proj(h), a.k_norm, c.eps, c.kv_heads, rope, true)
  local o = a.o_proj(nn.attention(c, ctx, q, k, a.v_proj(h)))
  x = x + norm(o, w.post_attention_layernorm)
  h = norm(x, w.pre_feedforward_layernorm)
  return x + norm(nn.mlp(c, w.mlp, h), w.post_feedforward_layernorm)
end

--- The layout of a chat.
M.chat = chat.gemma

return M
