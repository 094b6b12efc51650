-- SPDX-License-Identifier: Apache-2.0
--- Arguments of recipes: `key=value` words against a table of settings, {name = {default, "help"}}; a
-- number may have bounds, {default, "help", least, most}, and a text the words that it may be.
-- The type of a value is that of its default: a boolean, an integer, a float, a string, or a list
-- (written a,b,c; its items take the type of the default's first item). Integers accept sizes (64MB,
-- 1.5GiB), floats accept fractions (1/8). The word `help` prints the settings.

local exit = require "bs.settings.exit"
local options = require "bs.settings.options"

local args = {}

-- ---- values ----------------------------------------------------------------------------------------

local unit = {
  [""] = 1, b = 1,
  k = 1000, kb = 1000, m = 1000^2, mb = 1000^2, g = 1000^3, gb = 1000^3, t = 1000^4, tb = 1000^4,
  kib = 1024, mib = 1024^2, gib = 1024^3, tib = 1024^4,
}

--- "64MB", "1.5GiB", "2e3": an integer, or nil.
function args.size(text)
  local number, suffix = text:match "^([%d%.eE+-]-)%s*(%a*)$"
  if number and not tonumber(number) then number, suffix = text, "" end
  local n, factor = tonumber(number), unit[(suffix or ""):lower()]
  if not n or not factor then return nil end
  return math.tointeger(n * factor) or (factor > 1 and math.tointeger(n * factor // 1)) or nil
end

--- "1/8", "0.5": a float, or nil.
function args.fraction(text)
  local a, b = text:match "^([^/]+)/([^/]+)$"
  a, b = tonumber(a or text), tonumber(b or 1)
  return a and b and b ~= 0 and a / b or nil
end

local truth = {["true"] = true, yes = true, on = true, ["1"] = true,
               ["false"] = false, no = false, off = false, ["0"] = false}

local convert = {
  boolean = function(text) return truth[text] end,
  integer = args.size,
  float = args.fraction,
  string = function(text) return text end,
}
local expected = {
  boolean = "true or false", integer = "an integer or a size such as 64MB or 1.5GiB",
  float = "a number or a fraction such as 1/8", string = "text",
}

local function kind(value)
  return math.type(value) or type(value)
end

local function list(text, default)
  local out, item = {}, kind(default[1] or "")
  for word in text:gmatch "[^,]+" do
    local v = convert[item](word)
    if v == nil then return nil, expected[item] .. " for each item" end
    out[#out + 1] = v
  end
  return out
end

-- The rule of a setting (options.lua): bounds of a number, or the words that a text may be.
local function rule_of(setting)
  local k, least, most = kind(setting[1]), setting[3], setting[4]
  if type(least) == "table" then return { words = least, also = "one of " .. table.concat(least, ", ") } end
  if not least then return { type = "any" } end
  return {
    type = k == "integer" and k or "number", least = least, most = most,
    also = most and ("%g to %g"):format(least, most) or ("at least %g"):format(least),
  }
end

-- The value of a setting; nil and what is expected.
local function read(text, setting)
  local default = setting[1]
  local k = kind(default)
  if k == "table" then return list(text, default) end
  local value = convert[k](text)
  if value == nil then return nil, type(setting[3]) == "table" and rule_of(setting).also or expected[k] end
  local rule = rule_of(setting)
  if not options.fits(rule, value) then return nil, rule.also end
  return value
end

local function show(value)
  local k = kind(value)
  if k == "table" then
    local words = {}
    for i, v in ipairs(value) do words[i] = show(v) end
    return table.concat(words, ",")
  end
  return k == "float" and string.format("%.6g", value) or tostring(value)
end

-- ---- parsing ---------------------------------------------------------------------------------------

--- The text that `help` prints.
function args.help(settings, about)
  local width, out = 0, {about}
  local names = options.nearest(nil, settings)
  for _, name in ipairs(names) do width = math.max(width, #name) end
  for _, name in ipairs(names) do
    local s = settings[name]
    out[#out + 1] = ("  %-" .. width .. "s  %s [%s]"):format(name, s[2] or "", show(s[1]))
  end
  return table.concat(out, "\n") .. "\n"
end

--- Settings from a list of words. Returns their values by name, and a set of the names that were given.
-- A bad word ends the script with status 2; `help` prints the settings and ends it with status 0.
function args.parse(words, settings, about)
  local out, given = {}, {}
  for name, s in pairs(settings) do out[name] = s[1] end
  for _, word in ipairs(words) do
    if word == "help" or word == "--help" then
      io.stdout:write(args.help(settings, about))
      os.exit(0, true)
    end
    local name, text = word:match "^([%w_]+)=(.*)$"
    if not name then
      exit.fail("usage", "'%s' is not of the form key=value ('help' lists the settings)", word)
    elseif not settings[name] then
      options.unknown("", name, settings)
    elseif given[name] then
      exit.fail("usage", "setting '%s' is given twice", name)
    end
    local value, wanted = read(text, settings[name])
    if value == nil then
      exit.fail("usage", "setting '%s': %s expected, got '%s'", name, wanted, text)
    end
    out[name], given[name] = value, true
  end
  return out, given
end

return args
