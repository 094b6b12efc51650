-- SPDX-License-Identifier: Apache-2.0
--- What a family file is written with: config reading with clear errors, rotary frequencies, and the
-- ops under short names. Nothing here knows a particular family.
local bs = require "bs"

local nn = {
  rmsnorm = bs.op.rmsnorm, glu = bs.op.glu, act = bs.op.act, softmax = bs.op.softmax,
  columns = bs.op.columns, row_scale = bs.op.row_scale, scale = bs.op.scale,
}

--- Reader of a config.json table: `get(key, default)` and `want(key, {values})`.
-- A key whose default is nil must be there; null counts as absent.
function nn.reader(hf, family)
  local r = {}
  function r.get(key, default)
    local v = hf[key]
    if v == nil or v == bs.json.null then v = default end
    if v == nil then
      bs.fail(1, "config.json: key '%s' is missing; a %s model needs it", key, family)
    end
    return v
  end
  function r.count(key, default) -- a positive integer
    local v = r.get(key, default)
    if math.type(v) ~= "integer" or v < 1 then
      bs.fail(1, "config.json: '%s' is %s, a positive integer is expected", key, tostring(v))
    end
    return v
  end
  function r.want(key, allowed, default) -- one of the listed values
    local v = r.get(key, default)
    local names = {}
    for i, a in ipairs(allowed) do
      if v == a then return v end
      names[i] = tostring(a)
    end
    bs.fail(1, "config.json: '%s' is %s; this %s supports %s", key, tostring(v), family,
      table.concat(names, ", "))
  end
  return r
end

local function present(v) return v ~= nil and v ~= bs.json.null end

--- Rotary parameters of a config in any published layout: `rope_scaling` if not empty, else
-- `rope_parameters`, else the top-level keys.
-- Returns {type, theta, dim, ...} for nn.inv_freq. head_dim: entries of a head.
function nn.rope_config(hf, head_dim, default_theta)
  local p = {}
  if present(hf.rope_scaling) and next(hf.rope_scaling) then p = hf.rope_scaling
  elseif present(hf.rope_parameters) and next(hf.rope_parameters) then p = hf.rope_parameters end
  local function key(name, default)
    if present(p[name]) then return p[name] end
    if present(hf[name]) then return hf[name] end
    return default
  end
  local kind = present(p.rope_type) and p.rope_type or present(p.type) and p.type or "default"
  local partial = key("partial_rotary_factor", 1)
  local max_pos = key("max_position_embeddings", 2048)
  local rope = {
    type = kind, theta = key("rope_theta", default_theta or 10000.0),
    dim = math.floor(head_dim * partial),
    factor = key("factor"), low = key("low_freq_factor"), high = key("high_freq_factor"),
    beta_fast = key("beta_fast", 32.0), beta_slow = key("beta_slow", 1.0),
    truncate = key("truncate", true) ~= false,
    attention_factor = key("attention_factor"), mscale = key("mscale"),
    mscale_all_dim = key("mscale_all_dim"), max_position = max_pos,
    old = present(hf.original_max_position_embeddings) and hf.original_max_position_embeddings
      or key("original_max_position_embeddings", max_pos),
  }
  nn.inv_freq(rope) -- an unknown type or a missing number is told when the model is opened
  return rope
end

local function f32(v) return (string.unpack("<f", string.pack("<f", v))) end

local function number(rope, name, key)
  if type(rope[name]) ~= "number" then
    bs.fail(1, "config.json: rope type '%s' needs the number '%s'", rope.type, key or name)
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

--- Inverse frequencies of a rope config: a list of dim/2 numbers and the factor of cos and sin.
-- Su et al. 2021 (default), Peng et al. 2023 (yarn).
function nn.inv_freq(rope)
  local f = {}
  for j = 0, rope.dim // 2 - 1 do f[j + 1] = f32(1.0 / rope.theta ^ (2 * j / rope.dim)) end
  local kind = kinds[rope.type]
  if not kind then
    local names = {}
    for name in pairs(kinds) do names[#names + 1] = name end
    table.sort(names)
    bs.fail(1, "config.json: rope type '%s' is not supported; known: %s", tostring(rope.type),
      table.concat(names, ", "))
  end
  return kind(rope, f)
end

--- Tensors of a linear layer: weight [out, in] and, if asked, bias [out], appended to a list.
function nn.linear(list, name, out, inn, bias)
  list[#list + 1] = { name = name .. ".weight", dims = { out, inn } }
  if bias then list[#list + 1] = { name = name .. ".bias", dims = { out } } end
end

--- A vector (norm weight), appended to a list.
function nn.vector(list, name, n)
  list[#list + 1] = { name = name, dims = { n } }
end

return nn
