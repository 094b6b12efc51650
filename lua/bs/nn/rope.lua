-- SPDX-License-Identifier: Apache-2.0
--- Rotary frequencies: from a config.json in any published layout to the numbers that a rotation is made of.
local bs = require "bs"
local config = require "bs.nn.config"
local reads = require "bs.nn.reads"

local rope = {}
local present, shown, listed, wrong = config.present, config.shown, config.listed, config.wrong
local MAX_HEAD_DIM <const> = 65536
local OLD <const> = "original_max_position_embeddings"

local function f32(v) return (string.unpack("<f", string.pack("<f", v))) end

-- key: its name in config.json; above: what it must be larger than, 0 where nothing is said.
local function number(spec, name, key, above)
  local v = spec[name]
  if type(v) ~= "number" or not (v > (above or 0) and v < math.huge) then
    bs.fail("error", "config.json: rope type '%s' needs the positive number '%s'%s; it is %s", spec.type, key or name,
      above and (", above %g"):format(above) or "", shown(v))
  end
  return v
end

local kinds = {}

function kinds.default(_, f) return f, 1.0 end

function kinds.linear(spec, f)
  local factor = number(spec, "factor")
  for j = 1, #f do f[j] = f[j] / factor end
  return f, 1.0
end

function kinds.llama3(spec, f)
  local factor, old = number(spec, "factor"), number(spec, "old", OLD)
  local low = number(spec, "low", "low_freq_factor")
  local high = number(spec, "high", "high_freq_factor", low)
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

function kinds.yarn(spec, f)
  local old, dim = number(spec, "old", OLD), spec.dim
  local base = number(spec, "theta", "rope_theta", 1) -- its logarithm divides
  local factor = spec.factor and number(spec, "factor") or spec.max_position / old
  local function corr(r) return dim * math.log(old / (2 * math.pi * r)) / (2 * math.log(base)) end
  local low, high = corr(number(spec, "beta_fast")), corr(number(spec, "beta_slow"))
  if spec.truncate then low, high = math.floor(low), math.ceil(high) end
  low, high = math.max(low, 0), math.min(high, dim - 1)
  if low == high then high = high + 0.001 end
  for j = 1, #f do
    local ramp = math.min(math.max((j - 1 - low) / (high - low), 0), 1)
    f[j] = ramp * f[j] / factor + (1 - ramp) * f[j]
  end
  local function m(s, a) return s <= 1 and 1.0 or 0.1 * a * math.log(s) + 1.0 end
  local scaling = spec.attention_factor
  if not scaling then
    local a, b = spec.mscale or 0, spec.mscale_all_dim or 0
    scaling = (a ~= 0 and b ~= 0) and m(factor, a) / m(factor, b) or m(factor, 1)
  end
  return f, scaling
end

-- Two lists of divisors: for forwards whose longest row has up to `old` tokens, and for longer ones. The
-- factor of cos and sin is the same for both (Ding et al. 2024).
function kinds.longrope(spec, f, longest)
  local old, name = number(spec, "old", OLD, 1), longest > spec.old and "long_factor" or "short_factor"
  local by = spec[name]
  if type(by) ~= "table" or #by ~= #f then
    bs.fail("error", "config.json: rope type 'longrope' needs the list '%s' of %d numbers", name, #f)
  end
  for j = 1, #f do
    if type(by[j]) ~= "number" or not (by[j] > 0 and by[j] < math.huge) then
      bs.fail("error", "config.json: entry %d of '%s' is %s; a positive number is expected", j, name, tostring(by[j]))
    end
    f[j] = f[j] / by[j]
  end
  local factor = spec.factor or spec.max_position / old
  return f, spec.attention_factor
    or (factor <= 1 and 1.0 or math.sqrt(1 + math.log(factor) / math.log(old)))
end

--- Where the frequencies change with the length of a forward's longest row: the most tokens that the
-- first table is for, or nil where one table serves all.
function rope.switch(spec) return spec.type == "longrope" and spec.old or nil end

-- Positions that a rotation is made for. The config of a scaled one may still give those of the model before.
local function positions(spec)
  if not spec.said then return nil end
  local scaled = (spec.type == "linear" or spec.type == "yarn") and spec.factor and spec.old * spec.factor or 0
  return math.max(spec.max_position, math.floor(scaled))
end

--- What the rotations of a family's numbers say of the length of a row: {switch = the least of rope.switch,
-- positions = how many positions the model was made for}; nil where they do not say it.
function rope.lengths(c)
  local out = {}
  local function least(key, n) if n then out[key] = math.min(out[key] or n, n) end end
  for _, spec in pairs(c.ropes or { c.rope }) do
    least("switch", rope.switch(spec))
    least("positions", positions(spec))
  end
  return out
end

--- Inverse frequencies of a spec config: a list of dim/2 numbers and the factor of cos and sin. longest:
-- tokens of the forward's longest row (see rope.switch). Su et al. 2021 (default), Peng et al. 2023 (yarn).
function rope.inv_freq(spec, longest)
  local f = {}
  for j = 0, spec.dim // 2 - 1 do f[j + 1] = f32(1.0 / spec.theta ^ (2 * j / spec.dim)) end
  local kind = kinds[spec.type]
  if not kind then
    local names = {}
    for name in pairs(kinds) do names[#names + 1] = name end
    bs.fail("error", "config.json: rope type '%s' is not supported; known: %s", shown(spec.type), listed(names))
  end
  local frequencies, scale = kind(spec, f, longest or 1)
  for j = 0, #frequencies do
    local v = j == 0 and scale or frequencies[j]
    if not (v >= 0 and v < math.huge) then
      bs.fail("error", "config.json: rope type '%s' gives the %s %g; its numbers cannot be meant", spec.type,
        j == 0 and "factor" or "frequency", v)
    end
  end
  return frequencies, scale
end

-- Keys of `rope_scaling` or `rope_parameters` that every type has, and those that one reads besides.
local common = { "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings" }
local at_top = { -- keys that may stand beside the object, too
  rope_theta = true, partial_rotary_factor = true, original_max_position_embeddings = true,
  max_position_embeddings = true,
}
local uses = {
  linear = { "factor" }, llama3 = { "factor", "low_freq_factor", "high_freq_factor" },
  yarn = { "factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim" },
  longrope = { "factor", "attention_factor", "short_factor", "long_factor" },
}

-- What is said twice must be said alike: nobody could know which of them a checkpoint was made with.
local function agree(key, a, b, at_a, at_b)
  if present(a) and present(b) and shown(a) ~= shown(b) and a ~= b then
    bs.fail("error", "config.json: '%s' is %s in %s and %s in %s; leave the wrong one out", key, shown(a), at_a,
      shown(b), at_b)
  end
end

-- The object of rotary parameters: `rope_scaling` if not empty, else `rope_parameters`; {} where there is none.
local function parameters(hf)
  local found, at = {}, nil
  for _, name in ipairs { "rope_scaling", "rope_parameters" } do
    local v = hf[name]
    if present(v) and type(v) ~= "table" then wrong(name, v, "an object") end
    v = present(v) and reads.plain(v) or {}
    if at then
      for key, value in pairs(v) do agree(key, found[key], value, at, name) end
    elseif next(v) then
      found, at = v, name
    end
  end
  if at then
    for _, key in ipairs { "rope_theta", "partial_rotary_factor" } do
      agree(key, found[key], hf[key], at, "config.json itself")
    end
  end
  return found
end

-- Note what the type computes with; `type` is an older name of `rope_type`.
local function note(p, kind, no_effect)
  if not next(p) then return end
  for _, list in ipairs { common, uses[kind] or {}, no_effect or {} } do
    for _, key in ipairs(list) do reads.note(p, key) end
  end
  if not present(p.rope_type) or p.rope_type == p.type then reads.note(p, "type") end
end

--- Rotary parameters of a config in any published layout: `rope_scaling` if not empty, else
-- `rope_parameters`, else the top-level keys.
-- Returns {type, theta, dim, ...} for rope.inv_freq. head_dim: entries of a head. defaults: the family's
-- {theta, partial} and `names`, its own words for types {word = type}, `no_effect`, keys that it does not compute with.
function rope.config(hf, head_dim, defaults)
  local p, d = parameters(hf), defaults or {}
  local function key(name, default)
    if present(p[name]) then return p[name] end
    if at_top[name] and present(hf[name]) then return hf[name] end
    return default
  end
  local function at_least_0(name, default)
    local v = key(name, default)
    if v ~= nil and (type(v) ~= "number" or not (v >= 0 and v < math.huge)) then wrong(name, v, "a number >= 0") end
    return v
  end
  local kind = present(p.rope_type) and p.rope_type or present(p.type) and p.type or "default"
  local partial = key("partial_rotary_factor", d.partial or 1)
  local theta, max_pos = at_least_0("rope_theta", d.theta or 10000.0), at_least_0("max_position_embeddings", 2048)
  if head_dim > MAX_HEAD_DIM then wrong("head_dim", head_dim, "at most " .. MAX_HEAD_DIM) end
  if type(partial) ~= "number" or math.floor(head_dim * partial) % 2 ~= 0 or not (partial > 0 and partial <= 1)
    or head_dim * partial < 2 then
    bs.fail("error", "config.json: partial_rotary_factor %s of a head of %d; it must leave an even number of entries "
      .. "to rotate", tostring(partial), head_dim)
  end
  if theta <= 0 then wrong("rope_theta", theta, "a positive number") end
  kind = d.names and d.names[kind] or kind
  note(p, kind, d.no_effect)
  local spec = {
    type = kind, theta = theta,
    dim = math.floor(head_dim * partial),
    factor = at_least_0("factor"), low = at_least_0("low_freq_factor"), high = at_least_0("high_freq_factor"),
    beta_fast = at_least_0("beta_fast", 32.0), beta_slow = at_least_0("beta_slow", 1.0),
    truncate = key("truncate", true) ~= false,
    attention_factor = at_least_0("attention_factor"), mscale = at_least_0("mscale"),
    mscale_all_dim = at_least_0("mscale_all_dim"), max_position = max_pos,
    said = present(key("max_position_embeddings")), -- max_position is no default
    short_factor = key("short_factor"), long_factor = key("long_factor"),
    old = present(hf.original_max_position_embeddings) and hf.original_max_position_embeddings
      or key("original_max_position_embeddings", max_pos),
  }
  -- An unknown type or a missing number is told when the model is opened.
  rope.inv_freq(spec)
  rope.inv_freq(spec, math.huge)
  return spec
end

return rope
