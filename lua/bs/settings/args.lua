-- SPDX-License-Identifier: Apache-2.0
-- Arguments of recipes: `key=value` words against a table of settings, {name = {default, "help"}}; a
-- number may have bounds, {default, "help", least, most}, and a text the words that it may be.
-- The type of a value is that of its default: a boolean, an integer, a float, a string, or a list
-- (written a,b,c; its items take the type of the default's first item). Integers accept sizes (64MB,
-- 1.5GiB), floats accept fractions (1/8). The word `help` prints the settings.

local args = {}

---------------------------------------------------------------------------------------------------
-- Ending with an exit status

local failure = {}
failure.__index = failure
function failure:__tostring() return self.message end

-- End the script with an exit status and a message; no traceback.
function args.fail(code, fmt, ...)
  error(setmetatable({bs_exit = code, message = string.format(fmt, ...)}, failure), 0)
end

local USAGE <const> = 2

---------------------------------------------------------------------------------------------------
-- Values

local unit = {
  [""] = 1, b = 1,
  k = 1000, kb = 1000, m = 1000^2, mb = 1000^2, g = 1000^3, gb = 1000^3, t = 1000^4, tb = 1000^4,
  kib = 1024, mib = 1024^2, gib = 1024^3, tib = 1024^4,
}

-- "64MB", "1.5GiB", "2e3": an integer, or nil.
function args.size(text)
  local number, suffix = text:match "^([%d%.eE+-]-)%s*(%a*)$"
  if number and not tonumber(number) then number, suffix = text, "" end
  local n, factor = tonumber(number), unit[(suffix or ""):lower()]
  if not n or not factor then return nil end
  return math.tointeger(n * factor) or (factor > 1 and math.tointeger(n * factor // 1)) or nil
end

-- "1/8", "0.5": a float, or nil.
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

-- The value of a setting; nil and what is expected.
local function read(text, setting)
  local default, least, most = setting[1], setting[3], setting[4]
  local k = kind(default)
  if k == "table" then return list(text, default) end
  local value, wanted = convert[k](text), expected[k]
  if type(least) == "table" then
    wanted = "one of " .. table.concat(least, ", ")
    for _, word in ipairs(least) do
      if word == value then return value end
    end
    return nil, wanted
  end
  if value and least and (value < least or value > (most or value)) then
    return nil, most and string.format("%g to %g", least, most) or string.format("at least %g", least)
  end
  return value, wanted
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

---------------------------------------------------------------------------------------------------
-- Names

-- Edits (insert, delete, replace, swap of neighbours) that turn a into b.
local function distance(a, b)
  local before, last = {}, {}
  for j = 0, #b do last[j] = j end
  for i = 1, #a do
    local row = {[0] = i}
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

-- The names of a table, those most like `word` first (by name without a word).
function args.nearest(word, names)
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

---------------------------------------------------------------------------------------------------
-- Parsing

-- The text that `help` prints.
function args.help(settings, about)
  local width, out = 0, {about}
  local names = args.nearest(nil, settings)
  for _, name in ipairs(names) do width = math.max(width, #name) end
  for _, name in ipairs(names) do
    local s = settings[name]
    out[#out + 1] = string.format("  %-" .. width .. "s  %s [%s]", name, s[2] or "", show(s[1]))
  end
  return table.concat(out, "\n") .. "\n"
end

-- Settings from a list of words. Returns their values by name, and a set of the names that were given.
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
      args.fail(USAGE, "'%s' is not of the form key=value ('help' lists the settings)", word)
    elseif not settings[name] then
      args.fail(USAGE, "unknown setting '%s'; did you mean %s?", name,
                table.concat(args.nearest(name, settings), ", "))
    elseif given[name] then
      args.fail(USAGE, "setting '%s' is given twice", name)
    end
    local value, wanted = read(text, settings[name])
    if value == nil then
      args.fail(USAGE, "setting '%s': %s expected, got '%s'", name, wanted, text)
    end
    out[name], given[name] = value, true
  end
  return out, given
end

return args
