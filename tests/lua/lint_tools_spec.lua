-- SPDX-License-Identifier: Apache-2.0
--- The readers that the lint specs rest on, with input that is hard to read.
package.path = "tests/support/?.lua;" .. package.path
local c_source = require "c_source"
local circles = require "circles"
local lua_source = require "lua_source"

local function lengths(list)
  local found = {}
  for i, f in ipairs(list) do found[i] = ("%d-%d"):format(f.first, f.last) end
  return table.concat(found, " ")
end

describe("functions of Lua:", function()
  local function of(text) return lengths(lua_source.functions(text)) end

  it("nested ones end before those around them", function()
    assert.equal("2-3 1-4", of "local function a()\n  return function()\n  end\nend\n")
  end)

  it("blocks inside do not end them", function()
    assert.equal("1-8", of([[function a()
      if x then elseif y then else end
      for i = 1, 2 do while i do break end end
      for k in pairs(t) do end
      repeat local z = 1 until z
      do end
      while true do if x then goto done end end ::done::
    end]]))
  end)

  it("words in strings are none", function()
    assert.equal("1-2", of 'function a() f("end", \'function\', "\\"end", \'\\\\\')\nend')
    assert.equal("1-3", of "function a() f[[end\n]] f[==[ ]] end ]==]\nend")
    assert.equal("1-3", of "function a() f 'a\\\nfunction'\nend")
    assert.equal("1-4", of 'function a()\n  return "a\\z\n    end"\nend')
  end)

  it("words in comments are none", function()
    assert.equal("1-7", of "function a() -- end\n--[[ end\nend ]] --[==[ ]] end\n]==] --[ end\n--end\n---[[ end\nend")
  end)

  it("words inside longer names, fields and numbers are none", function()
    assert.equal("1-3", of "function a()\n  ending, _end, endx = t.functions, 0xend0, 3..2\nend")
    assert.equal("1-1", of "function a() return 0xdo end")
  end)

  it("brackets of tables are no long strings", function()
    assert.equal("1-1", of "function a() return t[u[1]], t[ [=[end]=] ], a[b]==c end")
  end)

  it("a first line for the shell is skipped", function()
    assert.equal("2-2", of "#!/usr/bin/lua function\nfunction a() end")
  end)

  it("a describe is a group, an it is none", function()
    local list = lua_source.functions 'describe("a: function", function()\n  it("b", function() end)\nend)'
    assert.same({ { first = 2, last = 2 }, { first = 1, last = 3, group = true } }, list)
  end)

  it("what does not balance is refused, with its line", function()
    for text, message in pairs {
      ["function a()\nif x then end"] = "line 1: 'function' is not closed",
      ["\nend"] = "line 2: 'end' closes nothing",
      ["repeat end"] = "line 1: 'end' closes nothing",
      ["do until x"] = "line 1: 'until' closes nothing",
      ["a = 'b\n'"] = "a string does not end",
      ["a = [[b]"] = "a long bracket does not end",
    } do
      local ok, why = pcall(lua_source.functions, text)
      assert.is_false(ok, text)
      assert.equal(message, why)
    end
  end)
end)

describe("modules that Lua requires:", function()
  local function of(text)
    local found = {}
    for i, r in ipairs(lua_source.requires(text)) do found[i] = r.name .. (r.prefix and "*" or "") .. ":" .. r.line end
    return table.concat(found, " ")
  end

  it("every way to write it", function()
    assert.equal("a:1 b:2 c:3 d:3 e:4 f:5", of [[local a = require "a"
      local b = require('b').field
      for k in pairs(require [=[c]=]) do local ok = pcall(require, "d") end
      if x then return require"e" end
      return require "f".g]])
  end)

  it("a name that is put together counts by its beginning", function()
    assert.equal("bs.family.*:1", of 'require("bs.family." .. name)')
  end)

  it("neither text nor a name that is known at run time only", function()
    assert.equal("", of "-- require 'a'\nlocal s = \"require 'b'\"; require(name); required 'c'")
  end)
end)

describe("functions of C:", function()
  local function of(text) return lengths(c_source.functions(text)) end

  it("begin at the type of their result", function()
    assert.equal("1-5 6-6", of "static inline int\na(int x)\n{\n    return x;\n}\nint b(void) { return 1; }")
  end)

  it("neither types, initializers nor name spaces", function()
    assert.equal("", of [[struct a { int x; };
      struct __attribute__((aligned(8))) b { int y; };
      static const int c[] = {1, 2, (3)};
      enum { D = (1) };
      extern "C" { int e(void); }
      namespace { namespace f { int g; } }
      typedef union h { int i; } h;]])
  end)

  it("of C++ and CUDA, in name spaces and types", function()
    assert.equal("2-3 5-5 8-9", of [[namespace {
      template <int N = (3)> __global__ void __launch_bounds__(128, 2) a(const float *x)
      { if (x) { f(); } }
      struct b {
        __device__ int operator()(int i) const { return i; }
      };
      }
      extern "C" bs_status c(void (*f)(void), int n)
      { auto g = [&](int i) { return i; }; return g(n); }]])
  end)

  it("braces in strings, characters and comments are none", function()
    assert.equal("1-4", of "int a(void)\n{\n    f(\"}\\\"{\", '}', '\\'', '{', L'}', u8'{');\n}")
    assert.equal("1-4", of "int a(void)\n{ // }\n    /* }\n // */ g(1'000, 0xf'f, 4 / 2 /* { */); }")
    assert.equal("1-5", of "int a(void)\n{\n    g(0); // }\n    /* } \n // */ g(1'000, L'}'); }")
    assert.equal("1-4", of 'int a(void)\n{ return f(R"x(}\n)" })x");\n}')
  end)

  it("braces of macros are none, and a macro of many lines is told", function()
    local list = c_source.functions "#define A(x) \\\n  do { \\\n    x; \\\n  }\n#define B {\nint c(void)\n{\n}\n"
    assert.same({ { first = 1, last = 4, macro = true }, { first = 6, last = 8 } }, list)
  end)

  it("what does not balance is refused, with its line", function()
    for text, message in pairs {
      ["int a(void)\n{"] = "line 2: '{' is not closed", ["}"] = "line 1: '}' closes nothing",
      ["/* a"] = "a comment does not end", ['f("a\n")'] = "a string does not end",
    } do
      local ok, why = pcall(c_source.functions, text)
      assert.is_false(ok, text)
      assert.equal(message, why)
    end
  end)

  it("headers are told apart from the system's", function()
    assert.same({ { name = "a/b.h", line = 1 }, { name = "c.h", line = 2, system = true } },
      c_source.includes '#include "a/b.h"\n  # include <c.h>\nconst char *s = "#include";')
  end)
end)

describe("circles:", function()
  local function graph(text)
    local g = {}
    for from, to in text:gmatch "(%S+)>(%S+)" do circles.edge(g, from, to, "x") end
    return g
  end

  it("are the sets of files that reach each other", function()
    assert.same({}, circles.find(graph "a>b b>c a>c d>d"))
    assert.same({ { "a", "b", "c" }, { "e", "f" } }, circles.find(graph "c>a a>b b>c c>d d>e e>f f>e a>e"))
  end)

  it("two that share a file are one", function()
    assert.same({ { "a", "b", "c" } }, circles.find(graph "a>b b>a b>c c>b"))
  end)

  it("across folders are faults even where no file is in one", function()
    local faults = circles.faults(graph "x/a>y/a y/b>x/b", circles.folder_of, 1)
    assert.equal(1, #faults)
    assert.matches("folders in a circle: x, y", faults[1])
    assert.matches("x/a %-> y/a %(x%)", faults[1])
  end)

  it("of files in one folder are faults from the second on", function()
    local one, two = graph "x/a>x/b x/b>x/a y/a>y/b y/b>y/a", graph "x/a>x/b x/b>x/a x/c>x/d x/d>x/c"
    assert.same({}, circles.faults(one, circles.folder_of, 1))
    assert.equal(2, #circles.faults(one, circles.folder_of, 0))
    assert.equal(1, #circles.faults(two, circles.folder_of, 1))
  end)
end)
