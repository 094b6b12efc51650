-- SPDX-License-Identifier: Apache-2.0
local bs = require "bs"
local json = bs.json

describe("json.decode", function()
  it("is left alone where the value may take more memory than is allowed", function()
    assert.same({ 1, { a = "b" } }, json.decode('[1, {"a": "b"}]', 10000))
    local value, message = json.decode("[" .. ("1,"):rep(1000) .. "1]", 10000)
    assert.is_nil(value)
    assert.matches("2003 bytes of JSON may need %d+ bytes of memory, 10000 are allowed", message)
    assert.has_error(function() json.decode("[1", 10000) end)
    assert.has_error(function() json.decode("[1]", -1) end)
  end)

  it("keeps integers integers and the rest floats", function()
    local t = json.decode '[1, -3, 2.5, 1e2, 9007199254740991, 9007199254740992]'
    assert.equal("integer", math.type(t[1]))
    assert.equal("integer", math.type(t[2]))
    assert.equal("float", math.type(t[3]))
    assert.equal("integer", math.type(t[4]))
    assert.equal(9007199254740991, t[5])
    assert.equal("float", math.type(t[6]))
  end)

  it("reads objects, text, null and booleans", function()
    local t = json.decode '{"a": {"b": [true, false, null]}, "c": "x\\u00e9\\n"}'
    assert.same({true, false, json.null}, t.a.b)
    assert.equal("x\u{e9}\n", t.c)
    assert.equal(json.null, json.decode "null")
    assert.equal(1, json.decode "\xEF\xBB\xBF1") -- behind a byte order mark
  end)

  it("says where the text is wrong", function()
    local ok, err = pcall(json.decode, '{"a": 1,\n "b": x}')
    assert.is_false(ok)
    assert.matches("line 2", err)
    assert.equal("format", bs.code(err))
    for _, bad in ipairs {"", "[1,", "[1] 2", "{'a':1}", "[1]\0", "nul", "NaN"} do
      assert.has_error(function() json.decode(bad) end)
    end
  end)

  it("refuses a zero character, which C text cannot hold, but not an escaped backslash", function()
    assert.has_error(function() json.decode [["a\u0000b"]] end)
    assert.equal([[\u0000]], json.decode [["\\u0000"]])
  end)

  it("refuses nesting that would exhaust the stack", function()
    assert.has_error(function() json.decode(("["):rep(100000) .. ("]"):rep(100000)) end)
    assert.equal("table", type(json.decode(("["):rep(500) .. ("]"):rep(500))))
  end)
end)

describe("json.encode", function()
  it("sorts keys by default", function()
    assert.equal('{"a":1,"b":2,"c":[1,2]}', json.encode {b = 2, c = {1, 2}, a = 1})
  end)

  it("writes numbers so that they read back the same", function()
    assert.equal("[1,1.0,0.1,-0.0,1e+300]", json.encode {1, 1.0, 0.1, -0.0, 1e300})
    for _, x in ipairs {math.pi, 1 / 3, 5e-324, 1.7976931348623157e308, 123456789.123} do
      assert.equal(x, json.decode(json.encode(x)))
    end
    assert.equal(tostring(math.mininteger), json.encode(math.mininteger))
  end)

  it("knows empty arrays from empty objects", function()
    assert.equal('[{},[]]', json.encode {{}, json.array {}})
    assert.equal('{"a":[]}', json.encode(json.decode '{"a": []}'))
  end)

  it("indents by two", function()
    assert.equal('{\n  "a": [\n    1,\n    2\n  ],\n  "b": {}\n}',
                 json.encode({a = {1, 2}, b = {}}, {pretty = true}))
  end)

  it("escapes text", function()
    assert.equal([["a\"\\\n\u0001]] .. "\u{e9}\u{1F600}" .. '"', json.encode "a\"\\\n\1\u{e9}\u{1F600}")
    assert.equal([["\u0000"]], json.encode "\0")
  end)

  it("refuses what JSON cannot hold", function()
    local cycle = {}
    cycle[1] = cycle
    for _, bad in ipairs {print, {1, a = 2}, {[1.5] = 1}, {[3] = 1}, "\xff", "\u{D800}", cycle, io.stdout} do
      local ok, err = pcall(json.encode, bad)
      assert.is_false(ok)
      assert.equal("arg", bs.code(err))
    end
    for _, bad in ipairs {0 / 0, math.huge} do
      local ok, err = pcall(json.encode, bad)
      assert.is_false(ok)
      assert.equal("nonfinite", bs.code(err))
    end
  end)

  it("grows for large values", function()
    local t = {}
    for i = 1, 20000 do t[i] = {id = i, text = ("x"):rep(i % 50)} end
    assert.same(t, json.decode(json.encode(t)))
  end)

  it("rejects an unknown option and lists the valid ones", function()
    local ok, err = pcall(json.encode, {}, {prety = true})
    assert.is_false(ok)
    assert.matches("unknown option 'prety' %(valid: pretty, sort%)", err)
  end)
end)
