-- SPDX-License-Identifier: Apache-2.0
--- Which linears get an adapter, and with which rank and scale (PEFT's rules: Hu et al. 2021, rsLoRA:
-- Kalajdzievski 2023).
local bs = require "bs"
local args = require "bs.settings.args"
local model = require "bs.model.model"

local lora = {}

-- PEFT's suffix rule: a module matches a key that it equals or ends with after a dot.
local function matches(full, key) return full == key or full:sub(-#key - 1) == "." .. key end

-- The value of the pattern key that matches, else the default. PEFT takes the first key of several; tables have
-- no order, so several must agree.
local function by_pattern(patterns, full, default)
  local found, by
  for key, value in pairs(patterns or {}) do
    if matches(full, key) then
      if found and found ~= value then
        local a, b = key < by and key or by, key < by and by or key
        bs.fail(1, "'%s' matches two patterns with different values, '%s' and '%s'; one is expected", full, a, b)
      end
      found, by = value, key
    end
  end
  return found or default
end

-- PEFT takes the keys of patterns as regular expressions; names are what we have.
local function check_keys(name, patterns)
  for key in pairs(patterns or {}) do
    if not tostring(key):match("^[%w_.]+$") then
      bs.fail(2, "lora: %s has the key '%s'; names of linears are supported, regular expressions are not", name, key)
    end
  end
end

-- What a specification may hold, and the types.
local fields = {
  r = "number", alpha = "number", targets = "list", top_fraction = "number", layers = "table",
  rslora = "boolean", dropout = "number", rank_pattern = "table", alpha_pattern = "table",
}

local function check(name, value, ok, expected)
  if not ok then bs.fail(2, "lora: %s=%s; %s is expected", name, tostring(value), expected) end
end

local function check_rank(name, r)
  check(name, r, math.type(r) == "integer" and r >= 1, "an integer >= 1")
end

local function check_alpha(name, alpha)
  check(name, alpha, type(alpha) == "number" and alpha > 0 and alpha < math.huge, "a positive number")
end

--- A checked copy of a specification, its defaults filled in.
function lora.spec(given)
  local spec = { r = 16, dropout = 0 }
  for key, value in pairs(given or {}) do
    if not fields[key] then
      bs.fail(2, "lora: unknown setting '%s'; did you mean %s?", tostring(key),
        table.concat(args.nearest(tostring(key), fields), ", "))
    end
    local kind = fields[key]
    check(key, value, type(value) == kind or kind == "list" and (type(value) == "table" or type(value) == "string"),
      "a " .. kind)
    spec[key] = value
  end
  check_rank("r", spec.r)
  spec.alpha = spec.alpha or 2 * spec.r
  check_alpha("alpha", spec.alpha)
  for _, t in ipairs(type(spec.targets) == "table" and spec.targets or {}) do
    check("targets", t, type(t) == "string", "a list of names")
  end
  check_keys("rank_pattern", spec.rank_pattern)
  check_keys("alpha_pattern", spec.alpha_pattern)
  for key, r in pairs(spec.rank_pattern or {}) do check_rank("rank_pattern." .. key, r) end
  for key, alpha in pairs(spec.alpha_pattern or {}) do check_alpha("alpha_pattern." .. key, alpha) end
  local p = spec.dropout
  check("dropout", p, type(p) == "number" and p >= 0 and p < 1, "a number in [0, 1)")
  return spec
end

--- Targets as a list of module names: "all", names, or the family's group names.
function lora.targets(m, wanted)
  local list, seen = {}, {}
  local function add(name)
    if not seen[name] then
      seen[name] = true
      list[#list + 1] = name
    end
  end
  for _, name in ipairs(type(wanted) == "table" and wanted or { wanted or "all" }) do
    if name == "all" or name == "all-linear" then
      for _, group in pairs(m.family.lora) do
        for _, t in ipairs(group) do add(t) end
      end
    elseif m.family.lora[name] then
      for _, t in ipairs(m.family.lora[name]) do add(t) end
    else
      add(name)
    end
  end
  if #list == 0 then bs.fail(2, "targets: the list is empty; all, names of linears or of groups are expected") end
  table.sort(list)
  return list
end

--- The layers that get adapters: a list (spec.layers), or the last max(1, floor(L*f + 0.5)).
function lora.layers(m, spec)
  local L, set = m.config.layers, {}
  if spec.layers then
    for _, i in ipairs(spec.layers) do
      if math.type(i) ~= "integer" or i < 0 or i >= L then
        bs.fail(2, "layers: %s is not a layer of this model (0..%d)", tostring(i), L - 1)
      end
      set[i] = true
    end
    if not next(set) then bs.fail(2, "layers: the list is empty; layers 0..%d are there", L - 1) end
    return set
  end
  local f = spec.top_fraction or 1
  if type(f) ~= "number" or not (f > 0 and f <= 1) then
    bs.fail(2, "top_fraction=%s; a number in (0, 1] is expected", tostring(f))
  end
  for i = L - math.max(1, math.floor(L * f + 0.5)), L - 1 do set[i] = true end
  return set
end

--- Adapters for a model and a specification that lora.spec has checked: list of {full, layer, inn, out, r,
-- alpha, scale, dropout} in model order.
-- A target that matches nothing is an error with the nearest names.
function lora.select(m, spec)
  local targets, layers = lora.targets(m, spec.targets), lora.layers(m, spec)
  local list, hits, leaves = {}, {}, {}
  model.each_linear(m, function(l)
    leaves[l.full:match("[^.]+$")] = true
    if not layers[l.layer] then return end
    for _, t in ipairs(targets) do
      if matches(l.full, t) then
        hits[t] = true
        local r = by_pattern(spec.rank_pattern, l.full, spec.r)
        local alpha = by_pattern(spec.alpha_pattern, l.full, spec.alpha)
        list[#list + 1] = {
          full = l.full, layer = l.layer, inn = l.inn, out = l.out, r = r, alpha = alpha,
          scale = spec.rslora and alpha / math.sqrt(r) or alpha / r, dropout = spec.dropout,
        }
        break
      end
    end
  end)
  for _, t in ipairs(targets) do
    if not hits[t] then
      bs.fail(1, "targets: '%s' matches no linear of the chosen layers; nearest: %s", t,
        table.concat(args.nearest(t, leaves), ", "))
    end
  end
  return list
end

--- Register A [r, in] and B [out, r] of each adapter; fills .a and .b with parameter ids.
-- Returns the table that model.bind takes: linear name -> {a, b, scale, dropout}.
function lora.register(m, list, params)
  local by_name, prefix = {}, m.family.peft_prefix or "base_model.model."
  for _, a in ipairs(list) do
    a.a = params:add(prefix .. a.full .. ".lora_A.weight", a.r, a.inn)
    a.b = params:add(prefix .. a.full .. ".lora_B.weight", a.out, a.r)
    by_name[a.full] = { a = a.a, b = a.b, scale = a.scale, dropout = a.dropout }
  end
  return by_name
end

return lora
