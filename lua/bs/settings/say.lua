-- SPDX-License-Identifier: Apache-2.0
--- What programs print. A line for people is always printable (bs.printable): names of models, files, tensors and
-- fields come from anywhere, and a terminal obeys what it is sent. Results (a text that a model wrote, JSON) are the
-- same bytes in every pipe and file, and printable where standard output is a terminal.
local core = require "bs.core"
local exit = require "bs.settings.exit"

local say = {}

-- Write text at once; nil and the reason where it cannot be.
local function put(file, text)
  local ok, why = file:write(text)
  if ok then ok, why = file:flush() end
  return ok, why
end

local function line(file, fmt, ...) return put(file, core.printable(fmt:format(...)) .. "\n") end

local told = false

--- A line on standard output. One that cannot be written is no reason to lose what a program does: that is told once,
-- on standard error.
function say.line(fmt, ...)
  local ok, why = line(io.stdout, fmt, ...)
  if ok or told then return end
  told = true
  say.note("bslua: standard output cannot be written: %s; lines are lost", why)
end

--- A line on standard error, beside results.
function say.note(fmt, ...) line(io.stderr, fmt, ...) end

--- A part of a result, on standard output. Where it cannot be written the script ends with status 1.
function say.result(text)
  local ok, why = put(io.stdout, core.is_terminal "stdout" and core.printable(text, true) or text)
  if not ok then exit.fail("error", "standard output cannot be written: %s", why) end
end

return say
