-- SPDX-License-Identifier: Apache-2.0
--- Layers of C: who includes whom, no circles by includes nor by symbols, no Lua and no CUDA in libbs, public headers
-- that stand alone. What is a layer is data: tests/support/layers.lua.
package.path = "tests/support/?.lua;" .. package.path
local c_source = require "c_source"
local circles = require "circles"
local layers = require "layers"
local sources = require "sources"

local files = sources.find("src kernels", "c h cu cuh cpp")
local exists = {}
for _, path in ipairs(files) do exists[path] = true end

local function none(faults) assert.is_true(#faults == 0, "\n" .. table.concat(faults, "\n")) end

-- The path of what a file includes by "name"; nil: not a file of src or kernels.
local function resolve(path, name)
  local own = circles.folder_of(path) .. "/" .. name
  if exists[own] then return own end
  for _, folder in ipairs(layers.include_path) do
    if exists[folder .. "/" .. name] then return folder .. "/" .. name end
  end
end

local layer_of_folder, named = {}, {}
for _, layer in ipairs(layers.c) do
  named[layer[1]] = true
  for _, folder in ipairs(layer[2]) do layer_of_folder[folder] = layer[1] end
end

local function layer_of(path)
  local folder, name = circles.folder_of(path), path:match "([^/]+)%.h$"
  if folder == layers.public_folder and named[name] then return name end
  while folder ~= "." do
    if layer_of_folder[folder] then return layer_of_folder[folder] end
    folder = circles.folder_of(folder)
  end
end

describe("includes point one way:", function()
  it("every file of src and kernels is in a layer", function()
    local faults = {}
    for _, path in ipairs(files) do
      if not layer_of(path) then faults[#faults + 1] = path end
    end
    none(faults)
  end)

  it("a layer may name none that stands after it", function()
    local seen = {}
    for _, layer in ipairs(layers.c) do
      for _, name in ipairs(layer[3]) do assert.is_true(seen[name] == true, layer[1] .. " may include " .. name) end
      seen[layer[1]] = true
    end
  end)

  for _, layer in ipairs(layers.c) do
    it(layer[1], function()
      local may, faults = { [layer[1]] = true }, {}
      for _, name in ipairs(layer[3]) do may[name] = true end
      for _, path in ipairs(files) do
        for _, name in ipairs(layer.public or {}) do
          may[name] = circles.folder_of(path) == layers.public_folder or nil
        end
        for _, header in ipairs(layer_of(path) == layer[1] and c_source.includes(sources.read(path)) or {}) do
          local target = not header.system and resolve(path, header.name)
          if not header.system and not (target and may[layer_of(target)]) then
            faults[#faults + 1] = ("%s:%d: includes %s"):format(path, header.line, header.name)
          end
        end
      end
      none(faults)
    end)
  end
end)

describe("libbs", function()
  it("knows neither Lua nor CUDA outside the folders that may", function()
    local faults = {}
    for _, path in ipairs(files) do
      for _, header in ipairs(c_source.includes(sources.read(path))) do
        for _, foreign in ipairs(header.system and layers.foreign or {}) do
          local allowed = not header.name:find(foreign[1])
          for _, folder in ipairs(foreign[2]) do allowed = allowed or circles.folder_of(path) == folder end
          if not allowed then faults[#faults + 1] = ("%s:%d: <%s>"):format(path, header.line, header.name) end
        end
      end
    end
    none(faults)
  end)

  local headers = sources.find(layers.public_folder, "h")
  headers[#headers + 1] = "src/bs.h"
  for language, command in pairs { ["C11"] = "gcc -std=c11 -x c", ["C++17"] = "g++ -std=c++17 -x c++" } do
    it("has public headers that are valid " .. language .. ", each alone", function()
      assert.is_true(#headers > 5)
      for _, header in ipairs(headers) do
        local line = "printf '#include \"%s\"\\n' | %s -fsyntax-only -Wall -Wextra -pedantic -Werror -I src - 2>&1"
        local out = sources.lines_of(line:format(header:gsub("^src/", ""), command))
        assert.is_true(#out == 0, header .. ":\n" .. table.concat(out, "\n"))
      end
    end)
  end
end)

describe("no circle across folders, at most " .. layers.most_circles .. " inside one,", function()
  it("by includes", function()
    local graph = {}
    for _, path in ipairs(files) do
      for _, header in ipairs(c_source.includes(sources.read(path))) do
        local target = resolve(path, header.name)
        if target then circles.edge(graph, path, target, "line " .. header.line) end
      end
    end
    assert.is_truthy(next(graph))
    none(circles.faults(graph, circles.folder_of, layers.most_circles))
  end)

  it("by the symbols of the build's objects", function()
    local build = (os.getenv "BSLUA" or ""):match "^(.*)/[^/]*$" or "build/release"
    local graph, why = circles.of_symbols(build)
    if not graph then return pending(why) end
    none(circles.faults(graph, circles.folder_of, layers.most_circles))
  end)
end)
