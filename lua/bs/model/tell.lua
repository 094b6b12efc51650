-- SPDX-License-Identifier: Apache-2.0
--- What the user is told about a model folder. A process may open a folder several times; a line is told once.
local bs = require "bs"

local told = {}

local SHOWN <const>, WIDTH <const> = 3, 100

local tell = {}

--- Tell a line, unless it has been told before. It begins with the folder.
function tell.once(fmt, ...)
  local line = fmt:format(...)
  if told[line] then return end
  told[line] = true
  bs.log("%s", line)
end

--- The first names of a list and how many more there are: "'a', 'b', 'c' and 7 more".
function tell.names(list)
  local out = {}
  for i = 1, math.min(#list, SHOWN) do
    local name = list[i]
    out[i] = "'" .. (#name > WIDTH and name:sub(1, WIDTH) .. "..." or name) .. "'"
  end
  return table.concat(out, ", ") .. (#list > SHOWN and (" and %d more"):format(#list - SHOWN) or "")
end

return tell
