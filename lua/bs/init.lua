-- SPDX-License-Identifier: Apache-2.0
-- Module "bs": the C part; `fail`, with which Lua code ends a run with an exit status; `log` with a format; and
-- what programs print. Everything else written in Lua is a module of its own under "bs.", loaded by whoever needs it.
local bs = require "bs.core"

local write_log <const> = bs.log

bs.fail = require("bs.settings.exit").fail

--- One line that the user is told: on stderr, or to the function of bs.log_to.
function bs.log(fmt, ...) write_log(fmt:format(...)) end

local say <const> = require "bs.settings.say"
bs.say, bs.note, bs.result = say.line, say.note, say.result

return bs
