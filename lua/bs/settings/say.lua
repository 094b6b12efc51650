-- SPDX-License-Identifier: Apache-2.0
--- What programs print. A line for people is always printable (bs.printable): names of models, files, tensors and
-- fields come from anywhere, and a terminal obeys what it is sent. Results (a text that a model wrote, JSON) are the
-- same bytes in every pipe and file, and printable where standard output is a terminal.
local core = require "bs.core"

local say = {}

local function line(file, fmt, ...)
  file:write(core.printable(fmt:format(...)), "\n")
  file:flush()
end

--- A line on standard output.
function say.line(fmt, ...) line(io.stdout, fmt, ...) end

--- A line on standard error, beside results.
function say.note(fmt, ...) line(io.stderr, fmt, ...) end

--- A part of a result, on standard output.
function say.result(text)
  io.stdout:write(core.is_terminal "stdout" and core.printable(text, true) or text)
  io.stdout:flush()
end

return say
