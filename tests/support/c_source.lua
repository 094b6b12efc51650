-- SPDX-License-Identifier: Apache-2.0
--- What a C, C++ or CUDA file is made of, read from its tokens: functions and macros with their first and last line,
-- and the headers that it includes. Words inside strings and comments count for nothing.
local c_source = {}

-- Whether the ' at `at` stands between the digits of a number.
local function in_number(text, at)
  return text:sub(math.max(at - 40, 1), at - 1):find "%f[%w_']%d[%w']*$" ~= nil
end

-- A text of the same lines with no comment, string or character literal in it: each is one space or "" in place.
local function bare(text)
  local out, at = {}, 1
  local function skip(from, to, instead)
    local newlines = text:sub(from, to):gsub("[^\n]", "")
    out[#out + 1] = instead .. newlines
    at = to + 1
  end
  while at <= #text do
    local start = text:find("[/\"'R]", at)
    if not start then break end
    out[#out + 1] = text:sub(at, start - 1)
    local before, raw = text:sub(start - 1, start - 1), text:match('^R"([^(%s]*)%(', start)
    at = start
    if text:find("^//", start) then
      skip(start, (text:find("\n", start, true) or #text + 1) - 1, " ")
    elseif text:find("^/%*", start) then
      local _, stop = text:find("*/", start + 2, true)
      skip(start, stop or error("a comment does not end", 0), " ")
    elseif raw and not before:find "[%w_]" then
      local _, stop = text:find(")" .. raw .. '"', start, true)
      skip(start, stop or error("a raw string does not end", 0), '""')
    elseif text:find('^"', start) or (text:find("^'", start) and not in_number(text, start)) then
      local quote, stop = text:sub(start, start), start + 1
      while text:sub(stop, stop) ~= quote do
        local c = text:sub(stop, stop)
        if c == "" or c == "\n" then error("a string does not end", 0) end
        stop = stop + (c == "\\" and 2 or 1)
      end
      skip(start, stop, '""')
    else -- a division, an R of a name, the ' between digits of a number
      out[#out + 1] = text:sub(start, start)
      at = start + 1
    end
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end

-- The text without preprocessor lines (their lines stay, empty), and the macros of more than one line.
local function without_macros(text)
  local out, macros, line, first = {}, {}, 0, nil
  local function finish(last, is_macro)
    if is_macro and last > first then macros[#macros + 1] = { first = first, last = last, macro = true } end
    first = nil
  end
  local is_macro
  for l in (text .. "\n"):gmatch "([^\n]*)\n" do
    line = line + 1
    local directive = first == nil and l:match "^%s*#%s*(%a*)"
    if directive then first, is_macro = line, directive == "define" end
    out[#out + 1] = first and "" or l
    if first and not l:find "\\%s*$" then finish(line, is_macro) end
  end
  return table.concat(out, "\n"), macros
end

-- What may stand between the parameters of a function and its body.
local qualifier = { const = true, noexcept = true, override = true, final = true, mutable = true }

-- Whether the tokens of a statement, before its "{", are the head of a function.
local function is_function(statement)
  local i = #statement
  while i > 0 and qualifier[statement[i].text] do i = i - 1 end
  return i > 1 and statement[i].text == ")"
end

--- Functions and macros of more than one line: {first, last, macro}; a function begins at the line of its return type.
-- Raises where braces do not balance.
function c_source.functions(text)
  local code, list = without_macros(bare(text))
  local open, statement, body, line, parens = {}, {}, nil, 1, 0
  local at = 1
  while true do
    local start = code:find("%S", at)
    line = line + select(2, code:sub(at, (start or #code + 1) - 1):gsub("\n", ""))
    if not start then break end
    local token = code:match("^[%a_][%w_]*", start) or code:sub(start, start)
    at = start + #token
    if token == "{" then
      open[#open + 1] = line
      if not body and is_function(statement) then body = { depth = #open, first = statement[1].line } end
      statement = {}
    elseif token == "}" then
      if #open == 0 then error(("line %d: '}' closes nothing"):format(line), 0) end
      if body and body.depth == #open then
        list[#list + 1] = { first = body.first, last = line }
        body = nil
      end
      open[#open], statement = nil, {}
    elseif token == ";" and parens == 0 then
      statement = {}
    else
      parens = parens + (token == "(" and 1 or token == ")" and -1 or 0)
      statement[#statement + 1] = { text = token, line = line }
    end
  end
  if #open > 0 then error(("line %d: '{' is not closed"):format(open[#open]), 0) end
  return list
end

--- Headers that are included: {name, line, system = true for <name>}.
function c_source.includes(text)
  local list, line = {}, 0
  for l in (text .. "\n"):gmatch "([^\n]*)\n" do
    line = line + 1
    local open, name = l:match '^%s*#%s*include%s*([<"])([^>"]+)[>"]'
    if name then list[#list + 1] = { name = name, line = line, system = open == "<" or nil } end
  end
  return list
end

return c_source
