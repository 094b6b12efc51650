-- SPDX-License-Identifier: Apache-2.0
--- Ends a script with an exit status and one line, without a traceback.

-- Words and numbers of exit statuses are the program's (src/bslua.h).
local status <const> = require("bs.core").exit

local failure = {}
failure.__index = failure
function failure:__tostring() return self.message end

local exit = {}

--- End the script. word: one of bs.exit, or a number; then a format and its values.
function exit.fail(word, fmt, ...)
  local code = math.type(word) == "integer" and word or status[word]
  if not code then error(("bs.fail: '%s' is no exit status"):format(tostring(word)), 2) end
  error(setmetatable({ bs_exit = code, message = fmt:format(...) }, failure), 0)
end

return exit
