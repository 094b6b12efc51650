-- SPDX-License-Identifier: Apache-2.0
local bs = require "bs"

local function path()
  local p = os.tmpname()
  finally(function() os.remove(p) end)
  return p
end

local function read(p)
  local f <close> = assert(io.open(p, "rb"))
  return f:read "a"
end

describe("safetensors", function()
  -- A file of two tensors: its path, the first one, and the open file.
  local function two_tensors()
    local p, a = path(), bs.array.new("f32", {2, 2}, {1, 2, 3, 4})
    bs.safetensors.write(p, {["x.a"] = a, ["x.b"] = bs.array.new("i64", {3}, {7, 8, 9})}, {format = "pt"})
    return p, a, assert(bs.safetensors.open(p))
  end

  it("are described as written, in a list and by name", function()
    local _, _, f <close> = two_tensors()
    local list = f:tensors()
    assert.equal(2, #list)
    table.sort(list, function(s, t) return s.name < t.name end)
    assert.same({"x.a", "f32", {2, 2}, 16}, {list[1].name, list[1].dtype, list[1].dims, list[1].bytes})
    assert.same(list[2], f:find "x.b")
    assert.is_nil(f:find "x.c")
  end)

  it("come back with the content that was written", function()
    local _, a, f <close> = two_tensors()
    assert.equal(a:hash(), f:read("x.a"):hash())
    assert.same({7, 8, 9}, f:read("x.b"):table())
  end)

  it("tell the file's path, size and metadata", function()
    local p, _, f <close> = two_tensors()
    assert.equal(p, f:path())
    assert.equal(#read(p), f:bytes())
    assert.matches('"format":"pt"', read(p))
    assert.same({format = "pt"}, f:metadata())
  end)

  it("lie in the file where their description says", function()
    local p, a, f <close> = two_tensors()
    local t = f:find "x.a"
    assert.equal(a:bytes(), read(p):sub(t.offset + 1, t.offset + t.bytes))
  end)

  it("have the same bytes for the same content", function()
    local p, q = path(), path()
    local names = {}
    for i = 1, 20 do names["t" .. i] = bs.array.new("f32", {i}) end
    bs.safetensors.write(p, names, {a = "1", b = "2"})
    bs.safetensors.write(q, names, {b = "2", a = "1"})
    assert.equal(read(p), read(q))
  end)

  it("that are absent or bad are answers, not errors", function()
    local f, message, code = bs.safetensors.open "/nowhere/x.safetensors"
    assert.is_nil(f)
    assert.equal("io", code)
    assert.equal("io", bs.code(message))
    assert.matches("/nowhere/x.safetensors", message, 1, true)
    local p = path()
    bs.write_file(p, "version https://git-lfs.github.com/spec/v1\n")
    f, message, code = bs.safetensors.open(p)
    assert.is_nil(f)
    assert.equal("format", code)
    assert.matches("LFS", message)
  end)

  it("raise for a tensor that is not there and once closed", function()
    local p = path()
    bs.safetensors.write(p, {a = bs.array.new("u8", {1})})
    local f = assert(bs.safetensors.open(p))
    local ok, err = pcall(f.read, f, "b")
    assert.is_false(ok)
    assert.is_string(bs.code(err))
    f:close()
    assert.error_matches(function() f:find "a" end, "closed bs.safetensors")
  end)

  it("are not written from wrong tables", function()
    local p = path()
    local a = bs.array.new("f32", {1})
    local write = bs.safetensors.write
    assert.error_matches(function() write(p, {a = 1}) end, "'a': bs.array expected, got number")
    assert.error_matches(function() write(p, {a}) end, "names must be strings")
    assert.error_matches(function() write(p, {["a\0b"] = a}) end, "zero byte")
    assert.error_matches(function() write(p, {a = a}, {b = 1}) end, "'b': string expected, got number")
    a:close()
    assert.error_matches(function() write(p, {a = a}) end, "got a closed one")
    assert.equal("", read(p))
  end)
end)

describe("a writer", function()
  local list = {{name = "x", dtype = "f32", dims = {2}}, {name = "y", dtype = "U8", dims = {3, 1}}}

  it("writes tensors one by one, with metadata, and copies", function()
    local p, q = path(), path()
    local x, y = bs.array.new("f32", {2}, {1, 2}), bs.array.new("u8", {3, 1}, {7, 8, 9})
    bs.safetensors.write(p, {x = x, y = y}, {format = "pt"})
    local f <close> = assert(bs.safetensors.open(p))
    assert.same({format = "pt"}, f:metadata())
    local w <close> = bs.safetensors.writer(q, list, f:metadata())
    w:copy("y", f)
    w:add("x", x)
    assert.equal("", read(q))
    w:finish()
    assert.equal(read(p), read(q))
  end)

  it("leaves the file alone when it is closed early, and refuses what was not declared", function()
    local p = path()
    do
      local w <close> = bs.safetensors.writer(p, list)
      assert.error_matches(function() w:add("z", bs.array.new("f32", {2})) end, "was to have no tensor 'z'")
      assert.error_matches(function() w:add("x", bs.array.new("f32", {3})) end, "not as it was declared")
      assert.error_matches(function() w:finish() end, "tensor 'x' was not given")
    end
    assert.equal("", read(p))
    local writer = bs.safetensors.writer
    assert.error_matches(function() writer(p, {1}) end, "a list of")
    assert.error_matches(function() writer(p, {{name = "x", dtype = "f32"}}) end, "'dims': table expected")
    assert.error_matches(function() writer(p, {{dtype = "f32", dims = {}}}) end, "'name': string expected")
    assert.error_matches(function() writer(p, {{name = "x", dtype = "f31", dims = {}}}) end, "no dtype of the format")
  end)
end)

describe("write_file", function()
  it("replaces the whole file or nothing", function()
    local p = path()
    bs.write_file(p, "one")
    bs.write_file(p, "")
    assert.equal("", read(p))
    bs.write_file(p, "two\0three")
    assert.equal("two\0three", read(p))
    local ok, err = pcall(bs.write_file, "/nowhere/file", "x")
    assert.is_false(ok)
    assert.equal("io", bs.code(err))
  end)
end)
