-- SPDX-License-Identifier: Apache-2.0
--- White space at the ends of texts, as two others see it: templates of chats (str.strip of Python, as Jinja's trim)
-- and tokenizers (White_Space of Unicode, for tokens that take the space beside them). Lua's %s knows ASCII only.
local spaces = {}

local unicode = { 0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000 }
for c = 0x2000, 0x200A do unicode[#unicode + 1] = c end

local function set(ascii)
  local s = {}
  for c in ascii:gmatch "." do s[c] = true end
  for _, c in ipairs(unicode) do s[utf8.char(c)] = true end
  return s
end

local token <const> = set "\t\n\v\f\r "
local python <const> = set "\t\n\v\f\r \x1C\x1D\x1E\x1F"

-- Bytes of white space at the beginning of a text that is UTF-8, and at its end.
local function head(text, of)
  local n = 0
  while n < #text do
    local c = text:match("^" .. utf8.charpattern, n + 1)
    if not of[c] then break end
    n = n + #c
  end
  return n
end

local function tail(text, of)
  local n = 0
  while n < #text do
    local at = utf8.offset(text, -1, #text - n + 1)
    if not of[text:sub(at, #text - n)] then break end
    n = #text - at + 1
  end
  return n
end

--- A text as Jinja's trim gives it.
function spaces.trim(text)
  local first = head(text, python)
  if first == #text then return "" end
  return text:sub(first + 1, #text - tail(text, python))
end

--- How many bytes of white space, as tokenizers see it, a text begins with; ends with.
function spaces.before(text) return head(text, token) end
function spaces.after(text) return tail(text, token) end

return spaces
