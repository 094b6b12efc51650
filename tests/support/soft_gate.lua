-- SPDX-License-Identifier: Apache-2.0
--- A small family with two stages, for tests: each token goes to some of the experts (`chosen` in the config, default
-- all), weighted by a softmax gate.
-- It lives outside the tree and is found through package.path, as a user's family is.
local nn = require "bs.nn"

local M = { model_types = { "soft_gate" }, peft_prefix = "base_model.model." }

function M.config(hf)
  local r = nn.reader(hf, "soft_gate")
  return {
    vocab = r.count("vocab_size"), channels = r.count("hidden_size"), layers = r.count("num_hidden_layers"),
    hidden = r.count("expert_size"), experts = r.count("num_experts"), heads = 2,
    chosen = r.count("chosen", r.count("num_experts")), head_dim = r.count("head_dim"),
    eps = 1e-6, tied = false, rope = nn.rope_config(hf, r.count("head_dim")),
  }
end

M.embed = { name = "embed.weight" }
M.head = { norm = "norm.weight", weight = "head.weight" }
function M.prefix(i) return ("layers.%d."):format(i) end
function M.expert_prefix(i, e) return ("layers.%d.experts.%d."):format(i, e) end

function M.tensors(c)
  local t, H, A = {}, c.channels, c.heads * c.head_dim
  nn.vector(t, "norm1.weight", H)
  nn.linear(t, "attn.qkv", 3 * A, H)
  nn.linear(t, "attn.out", H, A)
  nn.vector(t, "norm2.weight", H)
  nn.linear(t, "gate", c.experts, H)
  return t
end

function M.expert_tensors(c)
  local t = {}
  nn.linear(t, "up", c.hidden, c.channels)
  nn.linear(t, "gate_up", c.hidden, c.channels)
  nn.linear(t, "down", c.channels, c.hidden)
  return t
end

function M.routing(c) return { experts = c.experts, chosen = c.chosen, kind = "softmax" } end

M.stages = {}

--- x -> h (residual stream), u (what experts see), r (weights of the chosen experts)
function M.stages.mix(c, w, x, ctx)
  local n, A = nn.rmsnorm(x, w.norm1, c.eps), c.heads * c.head_dim
  local qkv = w.attn.qkv(n)
  local q, k = nn.columns(qkv, 1, A), nn.columns(qkv, A + 1, A)
  local o = ctx.attend(ctx.rope(q, c.heads), ctx.rope(k, c.heads), nn.columns(qkv, 2 * A + 1, A),
    { heads = c.heads, kv_heads = c.heads, head_dim = c.head_dim })
  local h = x + w.attn.out(o)
  local u = nn.rmsnorm(h, w.norm2, c.eps)
  return h, u, ctx.route(w.gate(u))
end

function M.stages.expert(_, w, x, weight)
  return nn.row_scale(w.down(nn.glu(w.gate_up(x), w.up(x), "silu")), weight, 1)
end

function M.stages.join(_, h, y) return h + y end

M.lora = { attention = { "qkv", "out" }, experts = { "up", "gate_up", "down" }, gate = { "gate" } }

return M
