-- SPDX-License-Identifier: Apache-2.0
--- Which linears get an adapter, and with which rank and scale (PEFT's rules: Hu et al. 2021, rsLoRA:
-- Kalajdzievski 2023).
local bs = require "bs"
local args = require "bs.args"
local model = require "bs.model"

local lora = {}

-- PEFT's suffix rule: a module matches a key that it equals or ends with after a dot.
local function matches(full, key) return full == key or full:sub(-#key - 1) == "." .. key end

-- The first pattern key (sorted: tables have no order) that matches, else the default.
local function by_pattern(patterns, full, default)
  local keys = {}
  for key in pairs(patterns or {}) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do
    if matches(full, key) then return patterns[key] end
  end
  return default
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
    return set
  end
  local f = spec.top_fraction or 1
  if f <= 0 or f > 1 then bs.fail(2, "top_fraction=%g: a number in (0, 1] is expected", f) end
  for i = L - math.max(1, math.floor(L * f + 0.5)), L - 1 do set[i] = true end
  return set
end

--- Adapters for a model: list of {full, layer, inn, out, r, alpha, scale, dropout} in model order.
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
          scale = spec.rslora and alpha / math.sqrt(r) or alpha / r, dropout = spec.dropout or 0,
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
