-- SPDX-License-Identifier: Apache-2.0
--- What a family file is written with: config reading with clear errors, rotary frequencies, and the
-- ops under short names. Nothing here knows a particular family.
local bs = require "bs"

local nn = {
  rmsnorm = bs.op.rmsnorm, glu = bs.op.glu, act = bs.op.act, softmax = bs.op.softmax,
  columns = bs.op.columns, row_scale = bs.op.row_scale, scale = bs.op.scale,
}

local act_of = {
  silu = "silu", swish = "silu", relu = "relu", gelu = "gelu_erf", gelu_new = "gelu_tanh",
  gelu_pytorch_tanh = "gelu_tanh",
}

local function listed(names)
  for i, name in ipairs(names) do names[i] = tostring(name) end
  table.sort(names)
  return table.concat(names, ", ")
end

local function present(v) return v ~= nil and v ~= bs.json.null end
local function shown(v) return type(v) == "table" and bs.json.encode(v) or tostring(v) end

local function wrong(key, v, expected)
  bs.fail(1, "config.json: '%s' is %s, %s is expected", key, shown(v), expected)
end

-- Larger sizes are refused: a product of two then fits an integer.
local MAX_COUNT <const>, MAX_HEAD_DIM <const> = 0x7FFFFFFF, 65536

--- Reader of a config.json table for a family. A key whose default is nil must be there; null counts as
-- absent, unless a value for null is given.
function nn.reader(hf, family)
  local r = {}
  function r.get(key, default, null)
    local v = hf[key]
    if v == bs.json.null then v = null end
    if v == nil then v = default end
    if v == nil then
      bs.fail(1, "config.json: key '%s' is missing; a %s model needs it", key, family)
    end
    return v
  end
  function r.count(key, default, null) -- a positive integer
    local v = r.get(key, default, null)
    if math.type(v) ~= "integer" or v < 1 then wrong(key, v, "a positive integer") end
    if v > MAX_COUNT then wrong(key, v, "at most " .. MAX_COUNT) end
    return v
  end
  function r.number(key, default, null) -- not negative
    local v = r.get(key, default, null)
    if type(v) ~= "number" or v < 0 then wrong(key, v, "a number >= 0") end
    return v
  end
  function r.flag(key, default)
    local v = r.get(key, default)
    if type(v) ~= "boolean" then wrong(key, v, "true or false") end
    return v
  end
  function r.want(key, allowed, default) -- one of the listed values
    local v = r.get(key, default)
    for _, a in ipairs(allowed) do
      if v == a then return v end
    end
    bs.fail(1, "config.json: '%s' is %s; this %s supports %s", key, shown(v), family,
      listed { table.unpack(allowed) })
  end
  function r.act(key, default) -- an activation, by the word that bs.op.act and bs.op.glu take
    local names = {}
    for name in pairs(act_of) do names[#names + 1] = name end
    return act_of[r.want(key, names, default)]
  end
  function r.window(key, default) -- tokens that attention looks back, with itself; 0 (or null): all
    local v = r.get(key, default, 0)
    if math.type(v) ~= "integer" or v < 0 then wrong(key, v, "an integer >= 0 or null") end
    return v
  end

  --- Which layers have the window: a list from 0 on, by `layer_types` if it is there, else rule(i).
  function r.sliding(layers, rule)
    local kinds, out = r.get("layer_types", false), {}
    if kinds and (type(kinds) ~= "table" or #kinds ~= layers) then
      wrong("layer_types", type(kinds) == "table" and #kinds .. " kinds" or kinds, "a list of " .. layers)
    end
    for i = 0, layers - 1 do
      local kind = kinds and kinds[i + 1]
      if kind and kind ~= "full_attention" and kind ~= "sliding_attention" then
        wrong("layer_types", kind, "full_attention or sliding_attention")
      end
      if kind then out[i] = kind == "sliding_attention" else out[i] = rule(i) end
    end
    return out
  end

  --- The sizes that every decoder has; d: the family's own defaults of keys that it may leave out.
  function r.decoder(d)
    local c = {
      vocab = r.count("vocab_size", d.vocab), channels = r.count("hidden_size", d.channels),
      hidden = r.count("intermediate_size", d.hidden), layers = r.count("num_hidden_layers", d.layers),
      heads = r.count("num_attention_heads", d.heads), eps = r.number("rms_norm_eps", d.eps or 1e-6),
      tied = r.flag("tie_word_embeddings", d.tied or false),
    }
    local even = c.channels // c.heads
    c.kv_heads = r.count("num_key_value_heads", d.kv_heads or c.heads, c.heads)
    c.head_dim = r.count("head_dim", d.head_dim or even, even)
    if c.heads % c.kv_heads ~= 0 then
      bs.fail(1, "config.json: %d attention heads do not share %d key/value heads evenly", c.heads,
        c.kv_heads)
    end
    return c
  end
  return r
end

--- The decoder's part of a multimodal config.json; whether the head is tied is said at the top level.
function nn.text_config(hf)
  if type(hf.text_config) ~= "table" or hf.text_config == bs.json.null then
    bs.fail(1, "config.json: 'text_config' is missing; a %s model keeps its decoder there", hf.model_type)
  end
  local text = {}
  for key, value in pairs(hf.text_config) do text[key] = value end
  text.tie_word_embeddings = hf.tie_word_embeddings
  return text
end

--- Rotary parameters of a config in any published layout: `rope_scaling` if not empty, else
-- `rope_parameters`, else the top-level keys.
-- Returns {type, theta, dim, ...} for nn.inv_freq. head_dim: entries of a head. defaults: the family's
-- {theta, partial} and `names`, its own words for types {word = type}.
function nn.rope_config(hf, head_dim, defaults)
  local p, d = {}, defaults or {}
  for _, name in ipairs { "rope_parameters", "rope_scaling" } do
    local v = hf[name]
    if present(v) and type(v) ~= "table" then wrong(name, v, "an object") end
    if present(v) and next(v) then p = v end
  end
  local function key(name, default)
    if present(p[name]) then return p[name] end
    if present(hf[name]) then return hf[name] end
    return default
  end
  local function number(name, default)
    local v = key(name, default)
    if v ~= nil and (type(v) ~= "number" or not (v >= 0 and v < math.huge)) then wrong(name, v, "a number >= 0") end
    return v
  end
  local kind = present(p.rope_type) and p.rope_type or present(p.type) and p.type or "default"
  local partial = key("partial_rotary_factor", d.partial or 1)
  local theta, max_pos = number("rope_theta", d.theta or 10000.0), number("max_position_embeddings", 2048)
  if head_dim > MAX_HEAD_DIM then wrong("head_dim", head_dim, "at most " .. MAX_HEAD_DIM) end
  if type(partial) ~= "number" or math.floor(head_dim * partial) % 2 ~= 0 or not (partial > 0 and partial <= 1)
    or head_dim * partial < 2 then
    bs.fail(1, "config.json: partial_rotary_factor %s of a head of %d; it must leave an even number of entries "
      .. "to rotate", tostring(partial), head_dim)
  end
  if theta <= 0 then wrong("rope_theta", theta, "a positive number") end
  local rope = {
    type = d.names and d.names[kind] or kind, theta = theta,
    dim = math.floor(head_dim * partial),
    factor = number("factor"), low = number("low_freq_factor"), high = number("high_freq_factor"),
    beta_fast = number("beta_fast", 32.0), beta_slow = number("beta_slow", 1.0),
    truncate = key("truncate", true) ~= false,
    attention_factor = number("attention_factor"), mscale = number("mscale"),
    mscale_all_dim = number("mscale_all_dim"), max_position = max_pos,
    short_factor = key("short_factor"), long_factor = key("long_factor"),
    old = present(hf.original_max_position_embeddings) and hf.original_max_position_embeddings
      or key("original_max_position_embeddings", max_pos),
  }
  -- An unknown type or a missing number is told when the model is opened.
  nn.inv_freq(rope)
  nn.inv_freq(rope, math.huge)
  return rope
end

local function f32(v) return (string.unpack("<f", string.pack("<f", v))) end

local function number(rope, name, key)
  if type(rope[name]) ~= "number" or rope[name] <= 0 then
    bs.fail(1, "config.json: rope type '%s' needs the positive number '%s'", rope.type, key or name)
  end
  return rope[name]
end

local kinds = {}

function kinds.default(_, f) return f, 1.0 end

function kinds.linear(rope, f)
  local factor = number(rope, "factor")
  for j = 1, #f do f[j] = f[j] / factor end
  return f, 1.0
end

function kinds.llama3(rope, f)
  local factor, old = number(rope, "factor"), number(rope, "old")
  local low, high = number(rope, "low", "low_freq_factor"), number(rope, "high", "high_freq_factor")
  for j = 1, #f do
    local wave = 2 * math.pi / f[j]
    if wave > old / low then
      f[j] = f[j] / factor
    elseif wave >= old / high then
      local s = (old / wave - low) / (high - low)
      f[j] = (1 - s) * f[j] / factor + s * f[j]
    end
  end
  return f, 1.0
end

function kinds.yarn(rope, f)
  local old, dim, base = number(rope, "old"), rope.dim, rope.theta
  local factor = rope.factor or rope.max_position / old
  local function corr(r) return dim * math.log(old / (2 * math.pi * r)) / (2 * math.log(base)) end
  local low, high = corr(rope.beta_fast), corr(rope.beta_slow)
  if rope.truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, dim - 1)
  if low == high then high = high + 0.001 end
  for j = 1, #f do
    local ramp = math.min(math.max((j - 1 - low) / (high - low), 0), 1)
    f[j] = ramp * f[j] / factor + (1 - ramp) * f[j]
  end
  local function m(s, a) return s <= 1 and 1.0 or 0.1 * a * math.log(s) + 1.0 end
  local scaling = rope.attention_factor
  if not scaling then
    local a, b = rope.mscale or 0, rope.mscale_all_dim or 0
    scaling = (a ~= 0 and b ~= 0) and m(factor, a) / m(factor, b) or m(factor, 1)
  end
  return f, scaling
end

-- Two lists of divisors: for forwards whose longest row has up to `old` tokens, and for longer ones. The
-- factor of cos and sin is the same for both (Ding et al. 2024).
function kinds.longrope(rope, f, longest)
  local old, name = number(rope, "old"), longest > rope.old and "long_factor" or "short_factor"
  local by = rope[name]
  if type(by) ~= "table" or #by ~= #f then
    bs.fail(1, "config.json: rope type 'longrope' needs the list '%s' of %d numbers", name, #f)
  end
  for j = 1, #f do
    if type(by[j]) ~= "number" or by[j] <= 0 then
      bs.fail(1, "config.json: entry %d of '%s' is %s; a positive number is expected", j, name, tostring(by[j]))
    end
    f[j] = f[j] / by[j]
  end
  local factor = rope.factor or rope.max_position / old
  return f, rope.attention_factor
    or (factor <= 1 and 1.0 or math.sqrt(1 + math.log(factor) / math.log(old)))
end

--- Where the frequencies change with the length of a forward's longest row: the most tokens that the
-- first table is for, or nil where one table serves all.
function nn.rope_switch(rope) return rope.type == "longrope" and rope.old or nil end

--- Inverse frequencies of a rope config: a list of dim/2 numbers and the factor of cos and sin. longest:
-- tokens of the forward's longest row (see nn.rope_switch). Su et al. 2021 (default), Peng et al. 2023 (yarn).
function nn.inv_freq(rope, longest)
  local f = {}
  for j = 0, rope.dim // 2 - 1 do f[j + 1] = f32(1.0 / rope.theta ^ (2 * j / rope.dim)) end
  local kind = kinds[rope.type]
  if not kind then
    local names = {}
    for name in pairs(kinds) do names[#names + 1] = name end
    bs.fail(1, "config.json: rope type '%s' is not supported; known: %s", shown(rope.type), listed(names))
  end
  return kind(rope, f, longest or 1)
end

--- Layer norm with the {weight, bias} that `w` has for a norm with both.
function nn.layernorm(x, w, eps) return bs.op.layernorm(x, w.weight, w.bias, eps) end

--- Tensors of a linear layer: weight [out, in] and, if asked, bias [out], appended to a list.
function nn.linear(list, name, out, inn, bias)
  list[#list + 1] = { name = name .. ".weight", dims = { out, inn } }
  if bias then list[#list + 1] = { name = name .. ".bias", dims = { out } } end
end

--- A vector (norm weight), appended to a list.
function nn.vector(list, name, n)
  list[#list + 1] = { name = name, dims = { n } }
end

--- Weight and bias of a layer norm, appended to a list.
function nn.norm(list, name, n)
  nn.vector(list, name .. ".weight", n)
  nn.vector(list, name .. ".bias", n)
end

--- self_attn.{q,k,v,o}_proj of c.heads and c.kv_heads heads. bias: of q, k and v; o_bias: of o.
function nn.attention_tensors(list, c, bias, o_bias)
  local H, D = c.channels, c.head_dim
  nn.linear(list, "self_attn.q_proj", c.heads * D, H, bias)
  nn.linear(list, "self_attn.k_proj", c.kv_heads * D, H, bias)
  nn.linear(list, "self_attn.v_proj", c.kv_heads * D, H, bias)
  nn.linear(list, "self_attn.o_proj", H, c.heads * D, o_bias)
end

--- mlp.{gate,up,down}_proj.
function nn.mlp_tensors(list, c, bias)
  nn.linear(list, "mlp.gate_proj", c.hidden, c.channels, bias)
  nn.linear(list, "mlp.up_proj", c.hidden, c.channels, bias)
  nn.linear(list, "mlp.down_proj", c.channels, c.hidden, bias)
end

--- mlp.gate_up_proj, whose first half of rows is the gate, and mlp.down_proj.
function nn.fused_mlp_tensors(list, c)
  nn.linear(list, "mlp.gate_up_proj", 2 * c.hidden, c.channels)
  nn.linear(list, "mlp.down_proj", c.channels, c.hidden)
end

--- Causal attention with the numbers of c: heads, kv_heads, head_dim; scale (nil: head_dim^-0.5), softcap,
-- and the window in the layers that c.sliding names. sinks: a weight of one score per head, or nil.
function nn.attention(c, ctx, q, k, v, sinks)
  return ctx.attend(q, k, v, {
    sinks = sinks,
    heads = c.heads, kv_heads = c.kv_heads, head_dim = c.head_dim, scale = c.scale, softcap = c.softcap,
    window = c.sliding and c.sliding[ctx.layer] and c.window or 0,
  })
end

--- down(act(gate(x)) * up(x)) (+ residual, where one is given), Shazeer 2020; m: the `mlp` weights.
function nn.mlp(c, m, x, residual)
  return m.down_proj(nn.glu(m.gate_proj(x), m.up_proj(x), c.act), residual)
end

--- The same where one linear holds gate and up.
function nn.fused_mlp(c, m, x, residual)
  local both = m.gate_up_proj(x)
  local gate, up = nn.columns(both, 1, c.hidden), nn.columns(both, c.hidden + 1, c.hidden)
  return m.down_proj(nn.glu(gate, up, c.act), residual)
end

--- Groups of LoRA targets under the usual names.
nn.lora = {
  attention = { "q_proj", "k_proj", "v_proj", "o_proj" },
  mlp = { "gate_proj", "up_proj", "down_proj" },
}

return nn
