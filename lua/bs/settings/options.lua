-- SPDX-License-Identifier: Apache-2.0
--- Checked options: every table of settings, and every value of a word on a command line, is held against rules here.
--
-- A rule is a table:
--   type      "integer", "number", "string", "boolean", "table", "function", "list" (of texts, or one text) or "any"
--   least, most   bounds of a number; above, below: the same, exclusive
--   finite    a number that is not infinite
--   words     texts that are taken as well, or instead where there is no type
--   share     a float above 0 and up to 1 is taken as well: a part of what is free
--   default   what is taken where nothing is given
--   required  there is no default, and something must be given
--   also      a sentence that says what is expected, in place of the one that the rule would give
local exit = require "bs.settings.exit"

local options = {}

-- ---- names ---------------------------------------------------------------------------------------------

-- Edits (insert, delete, replace, swap of neighbours) that turn a into b (Damerau 1964).
local function distance(a, b)
  local before, last = {}, {}
  for j = 0, #b do last[j] = j end
  for i = 1, #a do
    local row = { [0] = i }
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      row[j] = math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        row[j] = math.min(row[j], before[j - 2] + 1)
      end
    end
    before, last = last, row
  end
  return last[#b]
end

--- The names of a table, those most like `word` first (by name without a word).
function options.nearest(word, names)
  local order, far = {}, {}
  for name in pairs(names) do
    order[#order + 1] = name
    far[name] = word and distance(word, name) or 0
  end
  table.sort(order, function(a, b)
    if far[a] ~= far[b] then return far[a] < far[b] end
    return a < b
  end)
  return order
end

--- End the script: `name` is none of the names of a table. where: whose it would be, "job: " or "".
function options.unknown(where, name, names)
  exit.fail("usage", "%sunknown setting '%s'; did you mean %s?", where, tostring(name),
    table.concat(options.nearest(tostring(name), names), ", "))
end

-- ---- values --------------------------------------------------------------------------------------------

local function one_of(words, value)
  for _, word in ipairs(words or {}) do
    if word == value then return true end
  end
  return false
end

local function within(rule, v)
  return (not rule.least or v >= rule.least) and (not rule.most or v <= rule.most)
    and (not rule.above or v > rule.above) and (not rule.below or v < rule.below)
    and (not rule.finite or math.abs(v) ~= math.huge)
end

local function is(rule, value)
  local kind = rule.type
  if kind == "any" then return true end
  if kind == "integer" then return math.type(value) == "integer" and within(rule, value) end
  if kind == "number" then return type(value) == "number" and value == value and within(rule, value) end
  if kind == "list" then return type(value) == "table" or type(value) == "string" end
  return kind ~= nil and type(value) == kind
end

local function number_text(rule)
  local what = rule.type == "integer" and "an integer" or rule.finite and "a finite number" or "a number"
  if rule.least and rule.most then
    return rule.type == "integer" and ("an integer %d..%d"):format(rule.least, rule.most)
      or ("a number %g to %g"):format(rule.least, rule.most)
  end
  if rule.above and rule.most then return ("%s in (%g, %g]"):format(what, rule.above, rule.most) end
  if rule.least and rule.below then return ("%s in [%g, %g)"):format(what, rule.least, rule.below) end
  if rule.least then return ("%s >= %s"):format(what, rule.least) end
  if rule.above then return rule.above == 0 and "a positive number" or ("%s above %s"):format(what, rule.above) end
  return what
end

--- What a rule expects, in words.
function options.expected(rule)
  if rule.also then return rule.also end
  local parts = {}
  if rule.type == "integer" or rule.type == "number" then
    parts[1] = number_text(rule)
  elseif rule.type and rule.type ~= "any" then
    parts[1] = "a " .. rule.type
  end
  if rule.share then parts[#parts + 1] = "a fraction above 0 and up to 1" end
  if rule.words then parts[#parts + 1] = table.concat(rule.words, ", ") end
  return table.concat(parts, " or ")
end

--- Does a value keep to a rule?
function options.fits(rule, value)
  return one_of(rule.words, value) or is(rule, value)
    or rule.share == true and math.type(value) == "float" and value > 0 and value <= 1
end

--- End the script with status 2 unless a value keeps to a rule. where: whose setting it is, "lora: " or "".
function options.value(where, name, value, rule)
  if options.fits(rule, value) then return end
  exit.fail("usage", "%s%s=%s; %s is expected", where, name, tostring(value), options.expected(rule))
end

--- A checked copy of a table, defaults filled in. rules: name -> rule. where: as above. A name without a rule, a value
-- that does not keep to its rule, or nothing where something is required ends the script with status 2.
function options.read(where, given, rules)
  local out = {}
  if given ~= nil and type(given) ~= "table" then
    exit.fail("usage", "%s%s is given; a table of settings is expected", where, tostring(given))
  end
  for name, value in pairs(given or {}) do
    local rule = rules[name] or options.unknown(where, name, rules)
    options.value(where, name, value, rule)
    out[name] = value
  end
  for name, rule in pairs(rules) do
    if out[name] == nil then
      if rule.required then
        exit.fail("usage", "%s%s= is missing; %s is expected", where, name, options.expected(rule))
      end
      out[name] = rule.default
    end
  end
  return out
end

return options
