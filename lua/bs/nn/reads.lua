-- SPDX-License-Identifier: Apache-2.0
--- Which keys of a table from a config.json have been read: so that a key which nothing reads can be told or refused. A
-- table is entered by `over`, by a reader (config.lua) or by `note`; one that is not counts as read as a whole.
local bs = require "bs"

local reads = {}

local noted = setmetatable({}, { __mode = "k" }) -- plain table -> {key = true}
local plain_of = setmetatable({}, { __mode = "k" }) -- what `over` returned -> plain table

--- The plain table behind what `over` returned; anything else as it is.
function reads.plain(t) return plain_of[t] or t end

--- Note that a key is read, or known to do nothing.
function reads.note(t, key)
  t = reads.plain(t)
  noted[t] = noted[t] or {}
  noted[t][key] = true
end

--- A view of a table that notes what is read by index or by pairs (not by next). instead: {key = value} that hides the
-- table's own.
function reads.over(t, instead)
  if plain_of[t] then return t end
  noted[t] = noted[t] or {}
  local function get(key)
    reads.note(t, key)
    if instead and instead[key] ~= nil then return instead[key] end
    return t[key]
  end
  local view = setmetatable({}, {
    __index = function(_, key) return get(key) end,
    __len = function() return #t end,
    __pairs = function()
      return function(_, last)
        local key = next(t, last)
        if key ~= nil then return key, get(key) end
      end
    end,
  })
  plain_of[view] = t
  return view
end

--- Keys of a table that were read, there or not, as a set.
function reads.noted(t)
  local out = {}
  for key in pairs(noted[reads.plain(t)] or {}) do out[key] = true end
  return out
end

--- Keys that nothing has read, of a table and of those in it that were entered: a list of {path, key, value, table},
-- sorted by path. null counts as absent.
function reads.unread(t)
  local out = {}
  local function walk(at, path)
    for key, value in pairs(at) do
      local full = path .. tostring(key)
      if not (noted[at] or {})[key] then
        if value ~= bs.json.null then out[#out + 1] = { path = full, key = key, value = value, table = at } end
      elseif type(value) == "table" and noted[value] then
        walk(value, full .. ".")
      end
    end
  end
  walk(reads.plain(t), "")
  table.sort(out, function(a, b) return a.path < b.path end)
  return out
end

return reads
