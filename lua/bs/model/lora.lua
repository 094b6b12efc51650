-- SPDX-License-Identifier: Apache-2.0
--- Which linears get an adapter, and with which rank and scale (PEFT's rules: Hu et al. 2021, rsLoRA:
-- Kalajdzievski 2023).
local bs = require "bs"
local model = require "bs.model.model"
local options = require "bs.settings.options"

local lora = {}

--- PEFT's rule for names: a module is meant by a name that it equals or ends with after a dot.
function lora.ends_with(full, name) return full == name or full:sub(-#name - 1) == "." .. name end

--- What PEFT puts before the names of a model's linears.
function lora.prefix(m) return m.family.peft_prefix or "base_model.model." end

--- Modules outside the layers, which have no adapters here: a list of {name, what}.
function lora.outer(m)
  local function module(weight) return (weight:gsub("%.weight$", "")) end
  return {
    { name = module(m.family.head.weight), what = "head" }, { name = module(m.family.embed.name), what = "embedding" },
  }
end

-- The value of the pattern key that matches, else the default. PEFT takes the first key of several; tables have
-- no order, so several must agree.
local function by_pattern(patterns, full, default)
  local found, by
  for key, value in pairs(patterns or {}) do
    if lora.ends_with(full, key) then
      if found and found ~= value then
        local a, b = key < by and key or by, key < by and by or key
        bs.fail("error", "'%s' matches two patterns with different values, '%s' and '%s'; one is expected", full, a, b)
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
      bs.fail("usage", "lora: %s has the key '%s'; names of linears are supported, regular expressions are not", name,
        key)
    end
  end
end

local RANK <const> = { type = "integer", least = 1, also = "an integer >= 1" }
local ALPHA <const> = { type = "number", above = 0, finite = true, also = "a positive number" }

--- What the values of a pattern are.
lora.pattern_rules = { rank_pattern = RANK, alpha_pattern = ALPHA }

-- What a specification may hold. top_fraction and layers are checked with the model's layers.
local rules = {
  r = { type = "integer", least = 1, also = "an integer >= 1", default = 16 }, alpha = ALPHA,
  targets = { type = "list" }, top_fraction = { type = "number" }, layers = { type = "table" },
  rslora = { type = "boolean" }, dropout = { type = "number", least = 0, below = 1, default = 0 },
  rank_pattern = { type = "table" }, alpha_pattern = { type = "table" },
}

--- A checked copy of a specification, its defaults filled in.
function lora.spec(given)
  local spec = options.read("lora: ", given, rules)
  spec.alpha = spec.alpha or 2 * spec.r
  for _, t in ipairs(type(spec.targets) == "table" and spec.targets or {}) do
    options.value("lora: ", "targets", t, { type = "string", also = "a list of names" })
  end
  for name, rule in pairs(lora.pattern_rules) do
    check_keys(name, spec[name])
    for key, value in pairs(spec[name] or {}) do options.value("lora: ", name .. "." .. key, value, rule) end
  end
  return spec
end

-- Groups of a staged family with the linear that weighs the experts.
local ROUTERS <const> = { "router", "gate" }

-- Is a linear one of "all"? Of a dense layer each is, whether a group of the family has it or not; routed experts and
-- the router of a staged one are trained where they are named.
local function is_common(m, l)
  local layer = m.layers[l.layer]
  if l.part ~= layer.trunk then return false end
  for _, group in ipairs(layer.groups and ROUTERS or {}) do
    for _, name in ipairs(m.family.lora[group] or {}) do
      if lora.ends_with(l.full, name) then return false end
    end
  end
  return true
end

--- Targets as a sorted list of names of linears (names, and the family's groups put in), and whether "all" is among
-- them.
function lora.targets(m, wanted)
  local list, seen, all = {}, {}, false
  local function add(name)
    if not seen[name] then
      seen[name] = true
      list[#list + 1] = name
    end
  end
  for _, name in ipairs(type(wanted) == "table" and wanted or { wanted or "all" }) do
    if name == "all" or name == "all-linear" then
      all = true
    elseif m.family.lora[name] then
      for _, t in ipairs(m.family.lora[name]) do add(t) end
    else
      add(name)
    end
  end
  if #list == 0 and not all then
    bs.fail("usage", "targets: the list is empty; all, names of linears or of groups are expected")
  end
  table.sort(list)
  return list, all
end

--- The layers that get adapters: a list (spec.layers), or the last max(1, floor(L*f + 0.5)).
function lora.layers(m, spec)
  local L, set = m.config.layers, {}
  if spec.layers then
    for _, i in ipairs(spec.layers) do
      if math.type(i) ~= "integer" or i < 0 or i >= L then
        bs.fail("usage", "layers: %s is not a layer of this model (0..%d)", tostring(i), L - 1)
      end
      set[i] = true
    end
    if not next(set) then bs.fail("usage", "layers: the list is empty; layers 0..%d are there", L - 1) end
    return set
  end
  local f = spec.top_fraction or 1
  if type(f) ~= "number" or not (f > 0 and f <= 1) then
    bs.fail("usage", "top_fraction=%s; a number in (0, 1] is expected", tostring(f))
  end
  for i = L - math.max(1, math.floor(L * f + 0.5)), L - 1 do set[i] = true end
  return set
end

--- The adapter of a linear with its own rank and alpha: {full, layer, inn, out, r, alpha, scale, dropout}.
function lora.of(l, spec, r, alpha)
  return {
    full = l.full, layer = l.layer, inn = l.inn, out = l.out, r = r, alpha = alpha,
    scale = spec.rslora and alpha / math.sqrt(r) or alpha / r, dropout = spec.dropout,
  }
end

-- End the script: a target is no linear of the chosen layers.
local function no_such(m, target, leaves)
  for _, module in ipairs(lora.outer(m)) do
    if lora.ends_with(module.name, (target:gsub("%.weight$", ""))) then
      bs.fail("error", "targets: '%s' is the %s; linears of the layers can have an adapter", target, module.what)
    end
  end
  bs.fail("error", "targets: '%s' matches no linear of the chosen layers; nearest: %s", target,
    table.concat(options.nearest(target, leaves), ", "))
end

--- Adapters for a model and a specification that lora.spec has checked: list of those of lora.of in model order.
-- A target that matches nothing is an error with the nearest names.
function lora.select(m, spec)
  local targets, all = lora.targets(m, spec.targets)
  local layers, list, hits, leaves = lora.layers(m, spec), {}, {}, {}
  model.each_linear(m, function(l)
    leaves[l.full:match("[^.]+$")] = true
    if not layers[l.layer] then return end
    local wanted = all and is_common(m, l)
    for _, t in ipairs(targets) do
      if lora.ends_with(l.full, t) then hits[t], wanted = true, true end
    end
    if wanted then
      list[#list + 1] = lora.of(l, spec, by_pattern(spec.rank_pattern, l.full, spec.r),
        by_pattern(spec.alpha_pattern, l.full, spec.alpha))
    end
  end)
  for _, t in ipairs(targets) do
    if not hits[t] then no_such(m, t, leaves) end
  end
  if #list == 0 then bs.fail("error", "targets: the chosen layers have no linear of 'all'") end
  return list
end

--- Register A [r, in] and B [out, r] of each adapter as parameters. Returns linear name -> {a, b (ids), scale,
-- dropout}.
function lora.register(m, list, params)
  local by_name, prefix = {}, lora.prefix(m)
  for _, a in ipairs(list) do
    local first = params:add(prefix .. a.full .. ".lora_A.weight", a.r, a.inn)
    local second = params:add(prefix .. a.full .. ".lora_B.weight", a.out, a.r)
    by_name[a.full] = { a = first, b = second, scale = a.scale, dropout = a.dropout }
  end
  return by_name
end

return lora
