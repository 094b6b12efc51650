-- SPDX-License-Identifier: Apache-2.0
--- Ends a script with an exit status and one line, without a traceback.

--- Exit statuses of the program, by word.
local status <const> = {
  done = 0, error = 1,
  usage = 2,     -- a setting or an option
  plan = 3,      -- the budgets are too small
  data = 4,      -- the rows are refused
  nonfinite = 5, -- a step with NaN or infinity
  selftest = 6,  -- a saved adapter failed its test
}

local failure = {}
failure.__index = failure
function failure:__tostring() return self.message end

local exit = { status = status }

--- End the script. word: one of `status`, or a number; then a format and its values.
function exit.fail(word, fmt, ...)
  local code = math.type(word) == "integer" and word or status[word]
  if not code then error(("bs.fail: '%s' is no exit status"):format(tostring(word)), 2) end
  error(setmetatable({ bs_exit = code, message = fmt:format(...) }, failure), 0)
end

return exit
