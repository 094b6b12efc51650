-- SPDX-License-Identifier: Apache-2.0
--- Names of linears by regular expressions, as the keys of PEFT's rank_pattern and alpha_pattern are: `key` means every
-- name for which `(.*\.)?(key)$` matches. What such keys are written with is understood: names, ., \d, \w, sets,
-- groups with alternatives, the quantifiers * + ? {m,n} of single characters, ^ and $. A key becomes Lua patterns, one
-- for each way through its alternatives.
local name_pattern = {}

-- An expression beyond these takes long to match, or stands for too many names.
local WAYS <const>, OPEN <const>, REPEATS <const> = 256, 4, 16
local BEGIN <const>, END <const> = "\1", "\2" -- stand for ^ and $ until the ways are complete

local classes = { d = "%d", w = "[%w_]", D = "%D", W = "[^%w_]" }

local function literal(c) return (c:gsub("%W", "%%%0")) end

local function unsupported(what) error({ unsupported = what }, 0) end

-- A set from after its bracket: the Lua set, and the position after it.
local function read_set(s, at)
  local out = "["
  if s:sub(at, at) == "^" then out, at = out .. "^", at + 1 end
  local first = at
  while true do
    local c = s:sub(at, at)
    if c == "" then unsupported "a set that does not end" end
    if c == "]" and at > first then return out .. "]", at + 1 end
    if c == "\\" then
      at = at + 1
      c = s:sub(at, at)
      local class = c == "w" and "%w_" or c == "d" and "%d"
      if not class and c:match("[%w]") then unsupported("'\\" .. c .. "' in a set") end
      out = out .. (class or literal(c))
    else
      out = out .. (c == "-" and "-" or literal(c))
    end
    at = at + 1
  end
end

-- How often an item is repeated, from position `at`: least, most (nil: any number), and the position after it.
local function read_quantifier(s, at)
  local c = s:sub(at, at)
  if not c:match("^[*+?{]$") then return 1, 1, at end
  local least, most = c == "+" and 1 or 0, c == "?" and 1 or nil
  if c == "{" then
    local low, comma, high, after = s:match("^{(%d+)(,?)(%d*)}()", at)
    least, most = tonumber(low), tonumber(high)
    if comma == "" then most = least end
    if not low or comma == "" and high ~= "" or least > REPEATS or (most or 0) > REPEATS then
      unsupported "such a number of repeats"
    end
    at = after
  else
    at = at + 1
  end
  if s:sub(at, at) == "?" then at = at + 1 end -- the least is as good where the whole name has to match
  if s:match("^[*+{]", at) then unsupported "two quantifiers in a row" end
  return least, most, at
end

-- The ways of `parts` followed by those of `more`.
local function product(parts, more)
  if #parts * #more > WAYS then unsupported "so many alternatives" end
  local out = {}
  for _, a in ipairs(parts) do
    for _, b in ipairs(more) do out[#out + 1] = a .. b end
  end
  return out
end

local function repeated(item, least, most, state)
  if least == 1 and most == 1 then return { item } end
  state.open = state.open + (most and 0 or 1)
  if state.open > OPEN then unsupported "so many quantifiers" end
  return { item:rep(least) .. (most and (item .. "?"):rep(most - least) or item .. "*") }
end

-- Alternatives from position `at` up to the bracket that closes them, or the end: a list of ways, and the position.
local function read_alternatives(s, at, state, depth)
  local ways, here = {}, { "" }
  while true do
    local c = s:sub(at, at)
    if c == "" or c == ")" then
      if (c == ")") ~= (depth > 0) then unsupported "a bracket without its other" end
      return table.move(here, 1, #here, #ways + 1, ways), at + 1
    elseif c == "|" then
      table.move(here, 1, #here, #ways + 1, ways)
      here, at = { "" }, at + 1
    elseif c == "(" then
      local inside, least, most
      at = s:match("^%(%?:()", at) or at + 1
      if s:sub(at, at) == "?" then unsupported "'(?'" end
      inside, at = read_alternatives(s, at, state, depth + 1)
      least, most, at = read_quantifier(s, at)
      if most ~= 1 then unsupported "a group that is repeated" end
      if least == 0 then inside[#inside + 1] = "" end
      here = product(here, inside)
    else
      local item, least, most
      if c == "[" then
        item, at = read_set(s, at + 1)
      elseif c == "\\" then
        c, at = s:sub(at + 1, at + 1), at + 2
        item = classes[c]
        if not item and c:match("^%w?$") then unsupported("'\\" .. c .. "'") end
        item = item or literal(c)
      elseif c:match("^[*+?{]$") then
        unsupported "a quantifier of nothing"
      else
        item, at = c == "." and "." or c == "^" and BEGIN or c == "$" and END or literal(c), at + 1
      end
      least, most, at = read_quantifier(s, at)
      here = product(here, repeated(item, least, most, state))
    end
  end
end

local function matches(way, name)
  if way.whole then return name:find(way.text) ~= nil end
  local from = 1
  repeat
    if name:find(way.text, from) then return true end
    from = name:match("^[^.]*%.()", from)
  until not from
  return false
end

--- fn(name) -> boolean for a key, or nil and what in it is not understood.
function name_pattern.new(key)
  local ok, ways = pcall(read_alternatives, key, 1, { open = 0 }, 0)
  if not ok then
    if type(ways) ~= "table" then error(ways, 0) end
    return nil, ways.unsupported
  end
  local list = {}
  for i, text in ipairs(ways) do
    local plain = text:gsub("^" .. BEGIN .. "+", ""):gsub(END .. "+$", "")
    if plain:find("[" .. BEGIN .. END .. "]") then return nil, "'^' or '$' amid a name" end
    list[i] = { text = "^" .. plain .. "$", whole = text:sub(1, 1) == BEGIN }
  end
  return function(name)
    for _, way in ipairs(list) do
      if matches(way, name) then return true end
    end
    return false
  end
end

return name_pattern
