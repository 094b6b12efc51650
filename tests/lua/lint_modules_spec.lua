-- SPDX-License-Identifier: Apache-2.0
--- Modules of lua/bs: what they require exists and has no circles, not between files and not between rooms. A room is
-- a folder of lua/bs with the file of the same name beside it, or else a single file; their order is data:
-- tests/support/layers.lua.
package.path = "tests/support/?.lua;" .. package.path
local circles = require "circles"
local layers = require "layers"
local lua_source = require "lua_source"
local sources = require "sources"

local files = sources.find("lua/bs", "lua")
local path_of, folders = {}, {} -- by the name of a module; rooms that are folders
for _, path in ipairs(files) do
  local name = path:gsub("^lua/", ""):gsub("%.lua$", ""):gsub("/init$", ""):gsub("/", ".")
  path_of[name] = path
  local folder = path:match "^lua/bs/([^/]+)/"
  if folder then folders[folder] = true end
end
local in_c = { ["bs.core"] = true, ["bs.host"] = true }

local function room_of(path) return path:match "^lua/bs/([^/]+)/" or path:match "^lua/bs/([^/]+)%.lua$" end

local graph, missing = {}, {}
for _, path in ipairs(files) do
  for _, r in ipairs(lua_source.requires(sources.read(path))) do
    local why = "line " .. r.line
    for name, target in pairs(r.prefix and path_of or {}) do
      if name:sub(1, #r.name) == r.name then circles.edge(graph, path, target, why) end
    end
    if not r.prefix and path_of[r.name] then
      circles.edge(graph, path, path_of[r.name], why)
    elseif not r.prefix and r.name:find "^bs%f[.\0]" and not in_c[r.name] then
      missing[#missing + 1] = ("%s:%d: there is no module %s"):format(path, r.line, r.name)
    end
  end
end

local function none(faults) assert.is_true(#faults == 0, "\n" .. table.concat(faults, "\n")) end

describe("modules of lua/bs", function()
  it("require modules that exist", function()
    assert.is_truthy(next(graph))
    none(missing)
  end)

  it("have no circle between files", function()
    local faults = {}
    for _, circle in ipairs(circles.find(graph)) do faults[#faults + 1] = circles.describe(graph, circle) end
    none(faults)
  end)

  it("have no circle between rooms", function()
    local rooms, faults = circles.grouped(graph, room_of), {}
    for _, circle in ipairs(circles.find(rooms)) do faults[#faults + 1] = circles.describe(rooms, circle) end
    none(faults)
  end)

  it("are in rooms of one order", function()
    local rank, faults, flat = {}, {}, true
    for i, line in ipairs(layers.rooms) do
      for _, name in ipairs(line) do rank[name] = i end
    end
    for folder in pairs(folders) do flat = flat and folder == "family" end
    if flat and not next(rank) then return pending "lua/bs has no rooms" end
    for _, path in ipairs(files) do
      if not rank[room_of(path)] then faults[#faults + 1] = path .. ": its room is not in layers.rooms" end
    end
    for room in pairs(rank) do
      local there = folders[room] or path_of["bs." .. room] or path_of.bs and room == "init"
      if not there then faults[#faults + 1] = "layers.rooms names " .. room .. ", which does not exist" end
    end
    for from, edges in pairs(circles.grouped(graph, room_of)) do
      for to, why in pairs(edges) do
        if rank[from] and rank[to] and rank[to] >= rank[from] then
          faults[#faults + 1] = ("%s may not require %s: %s"):format(from, to, why)
        end
      end
    end
    table.sort(faults)
    none(faults)
  end)
end)
