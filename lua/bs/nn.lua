-- SPDX-License-Identifier: Apache-2.0
--- What a family file is written with: config reading with clear errors, rotary frequencies, and the
-- ops under short names. Nothing here knows a particular family.
local bs = require "bs"

local nn = {
  rmsnorm = bs.op.rmsnorm, glu = bs.op.glu, act = bs.op.act, softmax = bs.op.softmax,
  columns = bs.op.columns, row_scale = bs.op.row_scale, scale = bs.op.scale,
}

local function present(v) return v ~= nil and v ~= bs.json.null end
local function shown(v) return type(v) == "table" and bs.json.encode(v) or tostring(v) end

local function wrong(key, v, expected)
  bs.fail(1, "config.json: '%s' is %s, %s is expected", key, shown(v), expected)
end

-- Sizes beyond this are refused: products of two then fit an integer.
local MAX_COUNT = 0x7FFFFFFF

--- Reader of a config.json table: `get(key, default)` and `want(key, {values})`.
-- A key whose default is nil must be there; null counts as absent. A value has the type of its default,
-- and none is negative.
function nn.reader(hf, family)
  local r = {}
  function r.get(key, default)
    local v = hf[key]
    if not present(v) then v = default end
    if v == nil then
      bs.fail(1, "config.json: key '%s' is missing; a %s model needs it", key, family)
    elseif default ~= nil and type(v) ~= type(default) then
      wrong(key, v, "a " .. type(default))
    elseif type(v) == "number" and v < 0 then
      wrong(key, v, "a number >= 0")
    end
    return v
  end
  function r.count(key, default) -- a positive integer
    local v = r.get(key, default)
    if math.type(v) ~= "integer" or v < 1 or v > MAX_COUNT then
      wrong(key, v, ("an integer 1..%d"):format(MAX_COUNT))
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
    bs.fail(1, "config.json: '%s' is %s; this %s supports %s", key, shown(v), family,
      table.concat(names, ", "))
  end
  return r
end

local kinds = {}

-- The function of a rope type.
local function kind_of(rope)
  local kind = kinds[rope.type]
  if kind then return kind end
  local names = {}
  for name in pairs(kinds) do names[#names + 1] = name end
  table.sort(names)
  bs.fail(1, "config.json: rope type '%s' is not supported; known: %s", shown(rope.type),
    table.concat(names, ", "))
end

--- Rotary parameters of a config in any published layout: `rope_scaling` if not empty, else
-- `rope_parameters`, else the top-level keys.
-- Returns {type, theta, dim, ...} for nn.inv_freq. head_dim: entries of a head.
function nn.rope_config(hf, head_dim, default_theta)
  local p = {}
  for _, name in ipairs { "rope_parameters", "rope_scaling" } do
    local v = hf[name]
    if present(v) and type(v) ~= "table" then wrong(name, v, "an object") end
    if present(v) and next(v) then p = v end
  end
  local function number(name, default, first, second)
    first, second = first or p, second or hf
    local v = present(first[name]) and first[name] or present(second[name]) and second[name] or default
    if v ~= nil and (type(v) ~= "number" or not (v >= 0 and v < math.huge)) then
      wrong(name, v, "a positive number")
    end
    return v
  end
  local max_pos = number("max_position_embeddings", 2048)
  local partial = number("partial_rotary_factor", 1)
  if partial > 1 then wrong("partial_rotary_factor", partial, "at most 1") end
  local rope = {
    type = present(p.rope_type) and p.rope_type or present(p.type) and p.type or "default",
    theta = number("rope_theta", default_theta or 10000.0), dim = math.floor(head_dim * partial),
    factor = number("factor"), low = number("low_freq_factor"), high = number("high_freq_factor"),
    beta_fast = number("beta_fast", 32.0), beta_slow = number("beta_slow", 1.0),
    truncate = p.truncate ~= false, attention_factor = number("attention_factor"),
    mscale = number("mscale"), mscale_all_dim = number("mscale_all_dim"), max_position = max_pos,
    old = number("original_max_position_embeddings", max_pos, hf, p),
  }
  -- An unknown type or a missing number is told before the shapes of the weights have proved head_dim.
  kind_of(rope)(rope, {})
  return rope
end

local function f32(v) return (string.unpack("<f", string.pack("<f", v))) end

local function number(rope, name, key)
  if type(rope[name]) ~= "number" or rope[name] <= 0 then
    bs.fail(1, "config.json: rope type '%s' needs the positive number '%s'", rope.type, key or name)
  end
  return rope[name]
end

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
  return kind_of(rope)(rope, f)
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
