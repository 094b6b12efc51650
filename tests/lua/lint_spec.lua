-- SPDX-License-Identifier: Apache-2.0
--- The architecture as a test: which layer may include which, how large files may be, what every source
-- file starts with.
local function lines_of(command)
  local p, out = assert(io.popen(command)), {}
  for line in p:lines() do out[#out + 1] = line end
  p:close()
  return out
end

local function read(path)
  local f = assert(io.open(path))
  local text = f:read("a")
  f:close()
  return text
end

-- What a folder may include besides its own headers, the public API and the system's.
local may_include = {
  ["src/base"] = {}, ["src/dev"] = { "base", "bsk.h" }, ["src/engine"] = { "base", "dev", "bsk.h" },
  ["src/backend/nvml"] = { "dev" }, ["src/backend/meta"] = { "dev" }, ["src/backend/check"] = { "dev" },
  ["src/backend/cpu"] = { "dev", "bsk.h" }, ["src/backend/cuda"] = { "dev", "backend/nvml", "cuda" },
  ["src/backend"] = { "dev", "backend/nvml", "backend/meta", "backend/check", "backend/cpu", "backend/cuda" },
  ["src/io"] = { "base" }, ["src/tensor"] = { "base", "dev", "engine", "bsk.h" },
  ["src/stream"] = { "base", "dev", "engine", "io", "bsk.h" },
  ["src/train"] = { "base", "dev", "engine", "tensor", "bsk.h" }, ["src/text"] = { "base" },
  ["src/lua"] = { "bs.h", "bslua.h" },
  ["src/host"] = { "bs.h", "bslua.h", "lua" }, ["kernels/cpu"] = { "base", "bsk.h" },
}

local function folder_of(path)
  local found
  for folder in pairs(may_include) do
    if path:sub(1, #folder + 1) == folder .. "/" and #folder > #(found or "") then found = folder end
  end
  return found
end

local sources = lines_of("find src kernels tests recipes lua bench -name '*.[ch]' -o -name '*.lua' | sort")

describe("every source file", function()
  it("starts with its licence", function()
    for _, path in ipairs(sources) do
      local first = read(path):match("^[^\n]*")
      assert.is_truthy(first:find("SPDX-License-Identifier: Apache-2.0", 1, true), path)
    end
  end)

  it("keeps within its size", function()
    for _, path in ipairs(sources) do
      local _, n = read(path):gsub("\n", "")
      local most = path:match("%.lua$") and 400 or 900
      assert.is_true(n <= most, ("%s has %d lines, at most %d are allowed"):format(path, n, most))
    end
  end)

  it("keeps C functions under 80 lines", function()
    for _, path in ipairs(sources) do
      if path:match("%.c$") then
        local start, n = nil, 0
        for line in (read(path) .. "\n"):gmatch("([^\n]*)\n") do
          n = n + 1
          if line == "{" then start = n end
          if line == "}" and start then
            assert.is_true(n - start <= 80, ("%s:%d: a function of %d lines"):format(path, start, n - start))
            start = nil
          end
        end
      end
    end
  end)
end)

describe("includes point one way:", function()
  for folder, allowed in pairs(may_include) do
    it(folder, function()
      local own = folder:match("^%w+/(.*)$")
      for _, path in ipairs(sources) do
        if folder_of(path) == folder then
          for header in read(path):gmatch('#include "([^"]+)"') do
            local layer = header:match("^bs/(%w+)%.h$") or header:match("^(.*)/") or header
            local ok = layer == own or not header:find("/", 1, true)
              and io.open(folder .. "/" .. header) ~= nil
            for _, a in ipairs(allowed) do ok = ok or layer == a or header == a end
            assert.is_true(ok, ("%s includes %s"):format(path, header))
          end
        end
      end
    end)
  end

  it("libbs knows neither Lua nor CUDA", function()
    for _, path in ipairs(sources) do
      local folder = folder_of(path)
      if folder and folder ~= "src/lua" and folder ~= "src/host" then
        assert.is_nil(read(path):match('#include [<"]l[ua]+x?l?i?b?%.h[>"]'), path)
        assert.is_nil(read(path):match("#include <cuda"), path)
      end
    end
  end)

  it("the public headers are valid C++, each alone", function()
    for _, header in ipairs(lines_of("ls src/bs.h src/bs/*.h")) do
      assert.is_true((os.execute("g++ -std=c++17 -fsyntax-only -I src -x c++ " .. header)), header)
    end
  end)
end)

describe("Lua files", function()
  it("are clean under luacheck", function()
    local out = table.concat(lines_of("luacheck -q --no-color lua recipes tests bench 2>&1"), "\n")
    assert.is_truthy(out:find("Total: 0 warnings / 0 errors", 1, true), out)
  end)
end)
