-- SPDX-License-Identifier: Apache-2.0
--- tests/README.md names every file of the tests, and no other; pages name no file that does not exist.
package.path = "tests/support/?.lua;" .. package.path
local sources = require "sources"

describe("tests/README.md", function()
  local page, files = sources.read "tests/README.md", {}
  local found = sources.find("tests/c tests/lua tests/cli tests/support tests/fuzz tests/optional", "*")
  table.move(sources.lines_of "ls tests/*.sh", 1, 1 << 10, #found + 1, found)
  for _, path in ipairs(found) do files[path:match "[^/]+$"] = path end

  local named, alone = {}, {} -- by the last part of a path; written without a folder
  for name in page:gmatch "`([^`\n]+)`" do
    named[name:match "[^/]+/?$"] = true
    if name:find "^[%w_]+%.lua$" or name:find "^[%w_]+%.[ch]p*$" or name:find "^[%w_]+%.sh$" then alone[name] = true end
  end
  for _, name in ipairs { "fuzz_model.lua", "fuzz_safetensors.c", "fuzz_tokenizer.c" } do
    named[name] = named["fuzz/"]
  end

  it("names every file", function()
    assert.is_true(#found > 100)
    for name, path in pairs(files) do assert.is_true(named[name], path .. " is not named") end
  end)

  it("names no file that does not exist", function()
    for name in pairs(alone) do assert.is_truthy(files[name], name .. " is named, but is not there") end
  end)
end)

describe("paths in", function()
  -- NAME and LAYER stand for what a reader fills in; build/ and what is made there is not in the tree.
  local function example(path) return path:find "%u%u%u" and not path:find "%.md$" or path:find "^build/" end

  for _, page in ipairs { "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/lua.md", "tests/README.md" } do
    it(page .. " exist", function()
      local text = sources.read(page):gsub("\n```.-\n```", "")
      for path in text:gmatch "`([%w_.*/-]+/[%w_.*-]+%.%a+)`" do
        if not example(path) then
          local command = ("ls -d PATH tests/PATH tests/data/PATH 2>/dev/null"):gsub("PATH", (path:gsub("%%", "%%%%")))
          local found = sources.lines_of(command)
          assert.is_true(#found > 0, ("%s names %s, which is not there"):format(page, path))
        end
      end
    end)
  end
end)
