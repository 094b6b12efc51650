-- SPDX-License-Identifier: Apache-2.0
--- What every source file keeps to: its licence, its size, the length of its functions, its format, luacheck.
package.path = "tests/support/?.lua;" .. package.path
local c_source = require "c_source"
local layers = require "layers"
local lua_source = require "lua_source"
local sources = require "sources"

local c_files = sources.find("src kernels tests bench", "c h cu cuh cpp")
local lua_files = sources.find("lua recipes tests bench", "lua")
local scripts = sources.find("recipes tests bench cmake", "sh py cmake")

local function none(faults) assert.is_true(#faults == 0, "\n" .. table.concat(faults, "\n")) end

describe("every source file", function()
  local all = {}
  for _, list in ipairs { c_files, lua_files, scripts } do table.move(list, 1, #list, #all + 1, all) end

  it("is found", function()
    assert.is_true(#c_files > 100 and #lua_files > 50 and #scripts > 5)
  end)

  it("starts with its licence", function()
    local faults = {}
    for _, path in ipairs(all) do
      local line = sources.read(path):gsub("^#![^\n]*\n", ""):match "^[^\n]*"
      if not line:find("SPDX-License-Identifier: Apache-2.0", 1, true) then faults[#faults + 1] = path end
    end
    none(faults)
  end)

  it("keeps within its size", function()
    local faults = {}
    for _, path in ipairs(all) do
      local _, n = sources.read(path):gsub("\n", "")
      local most = layers.most_lines[path:match "%.(%w+)$"]
      if most and n > most then
        faults[#faults + 1] = ("%s has %d lines, at most %d are allowed"):format(path, n, most)
      end
    end
    none(faults)
  end)
end)

it("no line of C, C++ or CUDA is longer than " .. layers.most_columns, function()
  local faults = {}
  for _, path in ipairs(c_files) do
    local n = 0
    for line in sources.read(path):gmatch "([^\n]*)\n" do
      n = n + 1
      if #line > layers.most_columns then faults[#faults + 1] = ("%s:%d: %d columns"):format(path, n, #line) end
    end
  end
  none(faults)
end)

describe("functions are at most " .. layers.most_function_lines .. " lines long in", function()
  local function long_functions(paths, functions_of)
    local faults, n = {}, 0
    for _, path in ipairs(paths) do
      local ok, list = pcall(functions_of, sources.read(path))
      if not ok then faults[#faults + 1] = path .. ": " .. tostring(list) end
      for _, f in ipairs(ok and list or {}) do
        local length = f.last - f.first + 1
        n = n + 1
        if length > layers.most_function_lines and not f.group then
          faults[#faults + 1] = ("%s:%d: a %s of %d lines"):format(path, f.first, f.macro and "macro" or "function",
            length)
        end
      end
    end
    none(faults)
    assert.is_true(n > 3 * #paths, "fewer functions than there must be: " .. n)
  end

  it("C, C++ and CUDA", function() long_functions(c_files, c_source.functions) end)
  it("Lua, where a describe is no function but a list of them", function()
    long_functions(lua_files, lua_source.functions)
  end)
end)

describe("the format", function()
  it("of C, C++ and CUDA is that of clang-format " .. layers.clang_format, function()
    local program
    for _, name in ipairs { "clang-format-" .. layers.clang_format, "clang-format" } do
      local version = sources.has(name) and sources.lines_of(name .. " --version")[1] or ""
      if version:find("version " .. layers.clang_format .. ".", 1, true) then program = program or name end
    end
    if not program then
      return pending(("there is no clang-format %d, the one version whose output is the format"):format(
        layers.clang_format))
    end
    local out = sources.lines_of(program .. " --dry-run -Werror " .. table.concat(c_files, " ") .. " 2>&1")
    local faults = {}
    for _, line in ipairs(out) do
      if line:find("error:", 1, true) then faults[#faults + 1] = line end
    end
    assert.is_true(#out == 0 or #faults > 0, table.concat(out, "\n"))
    none(faults)
  end)

  it("of Lua is clean under luacheck", function()
    local out = table.concat(sources.lines_of("luacheck -q --no-color lua recipes tests bench 2>&1"), "\n")
    assert.is_truthy(out:find("Total: 0 warnings / 0 errors", 1, true), out)
  end)
end)
