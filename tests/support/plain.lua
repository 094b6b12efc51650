-- SPDX-License-Identifier: Apache-2.0
--- Decoders once more, in f64 and plain loops over one row of tokens, from a description that owes nothing
-- to the family files:
--   prefix, embed, head (nil: tied), final, out: names of tensors; layers, heads, kv_heads, dim, hidden; eps,
--   act; freq(i) of layer i, turn = "half" or "pairs", turn_scale; norms = name by role: before, after,
--   before_mlp, after_mlp, q, k; and where they apply window(i), one_plus, scale, cap, final_cap, embed_scale,
--   parallel, plain_mlp, fused_mlp, fused_qkv, sinks; moe, of layers with experts (see `routed`). Biases are added
--   where the file has them.
local bs = require "bs"

local plain = {}

plain.act = {
  silu = function(x) return x / (1 + math.exp(-x)) end,
  gelu_tanh = function(x)
    local e = math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x ^ 3))
    return x / (1 + e)
  end,
}

--- Inverse frequencies theta^(-2j/n), each divided by its factor.
function plain.freq(theta, n, factors)
  local f = {}
  for j = 0, n // 2 - 1 do f[j + 1] = theta ^ (-2 * j / n) / (factors and factors[j + 1] or 1) end
  return f
end

local function linear(get, name, x)
  local w, b, y = get(name .. ".weight"), get(name .. ".bias"), {}
  local n = #x
  for o = 0, #w // n - 1 do
    local sum = b and b[o + 1] or 0
    for i = 1, n do sum = sum + w[o * n + i] * x[i] end
    y[o + 1] = sum
  end
  return y
end

-- RMS norm, or layer norm where there is a bias; over every part of x that is as long as the weight.
local function norm(d, get, name, x)
  local g, b, y = get(name .. ".weight"), get(name .. ".bias"), {}
  local n, one = #g, d.one_plus and 1 or 0
  for first = 0, #x - 1, n do
    local mean, var = 0, 0
    for i = 1, b and n or 0 do mean = mean + x[first + i] / n end
    for i = 1, n do var = var + (x[first + i] - mean) ^ 2 / n end
    for i = 1, n do
      y[first + i] = (x[first + i] - mean) / math.sqrt(var + d.eps) * (g[i] + one) + (b and b[i] or 0)
    end
  end
  return y
end

local function turned(d, x, position, freq)
  local y, n = table.move(x, 1, #x, 1, {}), #freq
  for first = 0, #x - 1, d.dim do
    for j = 1, n do
      local a = first + (d.turn == "pairs" and 2 * j - 1 or j)
      local b = d.turn == "pairs" and a + 1 or a + n
      local angle, scale = position * freq[j], d.turn_scale or 1
      local c, s = math.cos(angle) * scale, math.sin(angle) * scale
      y[a], y[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    end
  end
  return y
end

local function slice(x, first, n) return table.move(x, first, first + n - 1, 1, {}) end
local function plus(a, b)
  local y = {}
  for i = 1, #a do y[i] = a[i] + b[i] end
  return y
end

-- What token t of one head sees.
local function attend(d, q, k, v, t, h, window, sink)
  local D, kv, scores, top, out = d.dim, (h * d.kv_heads // d.heads) * d.dim, {}, sink or -math.huge, {}
  local from = window > 0 and math.max(1, t - window + 1) or 1
  for u = from, t do
    local s = 0
    for i = 1, D do s = s + q[t][h * D + i] * k[u][kv + i] end
    s = s * (d.scale or D ^ -0.5)
    if d.cap then s = d.cap * (1 - 2 / (math.exp(2 * s / d.cap) + 1)) end
    scores[u], top = s, math.max(top, s)
  end
  local sum = sink and math.exp(sink - top) or 0
  for i = 1, D do out[i] = 0 end
  for u = from, t do
    local p = math.exp(scores[u] - top)
    sum = sum + p
    for i = 1, D do out[i] = out[i] + p * v[u][kv + i] end
  end
  for i = 1, D do out[i] = out[i] / sum end
  return out
end

local function projections(d, get, at, h)
  if not d.fused_qkv then
    return linear(get, at .. "q_proj", h), linear(get, at .. "k_proj", h), linear(get, at .. "v_proj", h)
  end
  local all, nq, nk = linear(get, at .. "qkv_proj", h), d.heads * d.dim, d.kv_heads * d.dim
  return slice(all, 1, nq), slice(all, nq + 1, nk), slice(all, nq + nk + 1, nk)
end

local function mlp(d, get, at, h)
  local act = plain.act[d.act]
  if d.plain_mlp then
    local y = linear(get, at .. "fc1", h)
    for i = 1, #y do y[i] = act(y[i]) end
    return linear(get, at .. "fc2", y)
  end
  local gate_up = d.fused_mlp and linear(get, at .. "gate_up_proj", h)
    or table.move(linear(get, at .. "up_proj", h), 1, d.hidden, d.hidden + 1, linear(get, at .. "gate_proj", h))
  local y = {}
  for i = 1, d.hidden do y[i] = act(gate_up[i]) * gate_up[d.hidden + i] end
  return linear(get, at .. "down_proj", y)
end

-- ---- experts -------------------------------------------------------------------------------------------

local function sigmoid(x) return 1 / (1 + math.exp(-x)) end

-- The k best of list c, as a set; allowed(i): may i be one?
local function best(c, k, allowed)
  local order, set = {}, {}
  for i = 1, #c do
    if not allowed or allowed(i) then order[#order + 1] = i end
  end
  table.sort(order, function(a, b) return c[a] > c[b] or c[a] == c[b] and a < b end)
  for i = 1, k do set[order[i]] = true end
  return set
end

-- Experts of a token by their logits z: weight by number, from 1.
local function choose(m, z, bias)
  local s, c, sum, weight = {}, {}, 0, {}
  for e = 1, #z do s[e] = m.kind == "sigmoid" and sigmoid(z[e]) or math.exp(z[e]) end
  for e = 1, #z do sum = sum + s[e] end
  for e = 1, #z do
    if m.kind == "softmax" then s[e] = s[e] / sum end
    c[e] = s[e] + (bias and bias[e] or 0)
  end
  local kept
  if m.groups then
    local score, size = {}, #z // m.groups
    for g = 1, m.groups do
      local members = slice(c, (g - 1) * size + 1, size)
      table.sort(members, function(a, b) return a > b end)
      score[g] = members[1] + (members[2] or 0)
    end
    local groups = best(score, m.kept)
    kept = function(e) return groups[(e - 1) // size + 1] end
  end
  sum = 0
  for e in pairs(best(c, m.chosen, kept)) do weight[e], sum = s[e], sum + s[e] end
  for e, w in pairs(weight) do
    weight[e] = w / ((m.renorm or m.kind == "chosen") and sum or 1) * (m.scale or 1)
  end
  return weight
end

-- Matrix e (from 1) of a fused tensor [experts, in, out], times x, plus its row of a fused bias.
local function turned_product(get, name, e, x, n_out)
  local w, b, y = get(name), get(name .. "_bias"), {}
  local first = (e - 1) * #x * n_out
  for o = 1, n_out do
    y[o] = b and b[(e - 1) * n_out + o] or 0
    for i = 1, #x do y[o] = y[o] + w[first + (i - 1) * n_out + o] * x[i] end
  end
  return y
end

-- What expert e gives for x. m.names = {gate, up, down} of linears of its own; else fused tensors, in whose gate_up
-- gate and up alternate where m.limit is, which clamps them.
local function expert(d, m, get, at, e, x)
  if m.names then
    local p, y = ("%s%d."):format(at, e - 1), {}
    local gate, up = linear(get, p .. m.names[1], x), linear(get, p .. m.names[2], x)
    for i = 1, #gate do y[i] = plain.act[d.act](gate[i]) * up[i] end
    return linear(get, p .. m.names[3], y)
  end
  local both, y = turned_product(get, at .. "gate_up_proj", e, x, 2 * m.hidden), {}
  for i = 1, m.hidden do
    if m.limit then
      local g, u = math.min(both[2 * i - 1], m.limit), math.max(-m.limit, math.min(both[2 * i], m.limit))
      y[i] = (u + 1) * g * sigmoid(1.702 * g)
    else
      y[i] = plain.act[d.act](both[i]) * both[m.hidden + i]
    end
  end
  return turned_product(get, at .. "down_proj", e, y, #x)
end

-- moe = {router, at = name before those of experts, kind, chosen, renorm, scale, bias, groups, kept, shared,
-- names or hidden and limit, layers(i)}
local function routed(d, get, p, x)
  local m = d.moe
  local y = m.shared and mlp(setmetatable({ hidden = m.shared.hidden }, { __index = d }), get, p .. m.shared.at, x)
  for e, weight in pairs(choose(m, linear(get, p .. m.router, x), m.bias and get(p .. m.bias))) do
    local ye = expert(d, m, get, p .. m.at, e, x)
    y = y or {}
    for i = 1, #x do y[i] = (y[i] or 0) + weight * ye[i] end
  end
  return y
end

local function layer(d, get, i, x)
  local p, names = ("%s%d."):format(d.prefix, i), d.norms
  local function normed(role, v) return names[role] and norm(d, get, p .. names[role], v) or v end
  local freq, h, q, k, v, out = d.freq(i), {}, {}, {}, {}, {}
  for t = 1, #x do
    h[t] = normed("before", x[t])
    q[t], k[t], v[t] = projections(d, get, p .. "self_attn.", h[t])
    q[t], k[t] = turned(d, normed("q", q[t]), t - 1, freq), turned(d, normed("k", k[t]), t - 1, freq)
  end
  for t = 1, #x do
    local o = {}
    for head = 0, d.heads - 1 do
      table.move(attend(d, q, k, v, t, head, d.window and d.window(i) or 0,
        d.sinks and get(p .. "self_attn.sinks")[head + 1]), 1, d.dim, #o + 1, o)
    end
    local a = normed("after", linear(get, p .. "self_attn." .. (d.out or "o_proj"), o))
    local y = plus(x[t], a)
    local u = d.parallel and h[t] or normed("before_mlp", y)
    local m = d.moe and d.moe.layers(i) and routed(d, get, p, u) or mlp(d, get, p .. "mlp.", u)
    out[t] = plus(y, normed("after_mlp", m))
  end
  return out
end

--- Logits [T, vocab] as a flat list.
function plain.logits(dir, d, ids)
  local file <close>, cache = assert(bs.safetensors.open(dir .. "/model.safetensors")), {}
  local function get(name)
    if cache[name] == nil then cache[name] = file:find(name) and file:read(name):table() or false end
    return cache[name]
  end
  local embed, x, out = get(d.embed .. ".weight"), {}, {}
  local C = file:find(d.embed .. ".weight").dims[2]
  for t, id in ipairs(ids) do
    x[t] = slice(embed, id * C + 1, C)
    for i = 1, C do x[t][i] = x[t][i] * (d.embed_scale or 1) end
  end
  for i = 0, d.layers - 1 do x = layer(d, get, i, x) end
  for t = 1, #ids do
    for _, l in ipairs(linear(get, d.head or d.embed, norm(d, get, d.final, x[t]))) do
      out[#out + 1] = d.final_cap and d.final_cap * (1 - 2 / (math.exp(2 * l / d.final_cap) + 1)) or l
    end
  end
  return out
end

return plain
