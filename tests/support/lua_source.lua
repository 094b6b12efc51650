-- SPDX-License-Identifier: Apache-2.0
--- What a Lua file is made of, read from its tokens: functions with their first and last line, and the modules
-- that it requires. Words inside strings and comments count for nothing.
local lua_source = {}

-- The text of the long bracket that opens at `at` ([[, [=[, ..) and the place after it; nil: there is none.
local function long_bracket(text, at)
  local level = text:match("^%[(=*)%[", at)
  if not level then return nil end
  local first = at + #level + 2
  local stop, after = text:find("]" .. level .. "]", first, true)
  if not stop then error("a long bracket does not end", 0) end
  return text:sub(first, stop - 1), after + 1
end

-- The place after the quoted string that opens at `at`.
local function after_string(text, at)
  local quote, i = text:sub(at, at), at + 1
  while true do
    local c = text:sub(i, i)
    if c == "\\" and text:find("^z%s", i + 1) then
      i = text:find("%S", i + 2) or #text + 1
    elseif c == "\\" then
      i = i + 2
    elseif c == quote then
      return i + 1
    elseif c == "" or c == "\n" then
      error("a string does not end", 0)
    else
      i = i + 1
    end
  end
end

-- The token at `at`, which is no space: its kind ("comment", "string", "name", "number", "sign"), its value, and the
-- place after it.
local function token_at(text, at)
  if text:find("^%-%-", at) then
    local body, after = long_bracket(text, at + 2)
    return "comment", body, after or text:find("\n", at, true) or #text + 1
  end
  local body, after = long_bracket(text, at)
  if body then return "string", body, after end
  local c = text:sub(at, at)
  if c == '"' or c == "'" then
    after = after_string(text, at)
    return "string", text:sub(at + 1, after - 2), after
  end
  local name = text:match("^[%a_][%w_]*", at)
  if name then return "name", name, at + #name end
  local number = text:match("^0[xX][%x.]*[pP]?[+-]?%x*", at) or text:match("^%.?%d[%d.]*[eE][+-]?%d+", at)
    or text:match("^%.?%d[%d.]*", at)
  if number then return "number", number, at + #number end
  local dots = text:match("^%.%.%.?", at)
  return "sign", dots or c, at + #(dots or c)
end

--- Tokens without comments: {kind, value, line}.
function lua_source.tokens(text)
  local list, line, at = {}, 1, text:match "^#[^\n]*()" or 1
  while true do
    local start = text:find("%S", at)
    line = line + select(2, text:sub(at, (start or #text + 1) - 1):gsub("\n", ""))
    if not start then return list end
    local kind, value, after = token_at(text, start)
    if kind ~= "comment" then list[#list + 1] = { kind = kind, value = value, line = line } end
    line = line + select(2, text:sub(start, after - 1):gsub("\n", ""))
    at = after
  end
end

-- `while` and `for` have a `do`, which opens their block; `elseif` is a word of its own.
local opens = { ["function"] = true, ["if"] = true, ["do"] = true, ["repeat"] = true }
local closes = { ["end"] = true, ["until"] = true }

-- Whether the function whose word is tokens[i] is the list of tests of a describe("..", function() .. end).
local function is_group(tokens, i)
  for k = i - 1, 1, -1 do
    local token = tokens[k]
    if token.line ~= tokens[i].line then return false end
    if token.kind == "name" and token.value == "describe" then return tokens[k + 1].value == "(" end
  end
  return false
end

--- Functions, in the order in which they end: {first, last} lines, group = true for the list of tests of a
-- `describe`. Raises where blocks do not balance.
function lua_source.functions(text)
  local list, open, tokens = {}, {}, lua_source.tokens(text)
  for i, token in ipairs(tokens) do
    local word = token.kind == "name" and token.value
    if opens[word] then
      open[#open + 1] = { value = word, line = token.line, group = word == "function" and is_group(tokens, i) or nil }
    elseif closes[word] then
      local block = table.remove(open)
      if not block or (block.value == "repeat") ~= (word == "until") then
        error(("line %d: '%s' closes nothing"):format(token.line, word), 0)
      end
      if block.value == "function" then
        list[#list + 1] = { first = block.line, last = token.line, group = block.group }
      end
    end
  end
  if #open > 0 then error(("line %d: '%s' is not closed"):format(open[#open].line, open[#open].value), 0) end
  return list
end

--- Modules that are required by a literal name: {name, line}; prefix = true where the literal is only the beginning
-- of the name, as in require("bs.family." .. name).
function lua_source.requires(text)
  local list, tokens = {}, lua_source.tokens(text)
  for i, token in ipairs(tokens) do
    if token.kind == "name" and token.value == "require" then
      local at = tokens[i + 1]
      if at and at.kind == "sign" and (at.value == "(" or at.value == ",") then i, at = i + 1, tokens[i + 2] end
      if at and at.kind == "string" then
        local more = tokens[i + 2]
        local prefix = more ~= nil and more.kind == "sign" and more.value == ".."
        list[#list + 1] = { name = at.value, line = at.line, prefix = prefix or nil }
      end
    end
  end
  return list
end

return lua_source
