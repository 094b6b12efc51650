-- SPDX-License-Identifier: Apache-2.0
--- Lines of files: what is read of them, in which memory; what is no file of lines.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local data = require "bs.data"
local files = require "bs.settings.files"
local lines = require "bs.data.lines"
local tiny = require "tiny"

local root = tiny.folder "lines"
local path = root .. "/f"

local function read_all(text, most)
  bs.write_file(path, text)
  local reader, out = assert(lines.open(path)), {}
  while true do
    local line, start, bytes = reader:next(most)
    if not start then break end
    out[#out + 1] = ("%s@%d+%d"):format(line or "-", start, bytes)
  end
  reader:close()
  return out
end

describe("lines", function()
  it("are those of the file, with their ends and places", function()
    assert.same({}, read_all("", 9))
    assert.same({ "a\n@0+2", "\n@2+1", "bc@3+2" }, read_all("a\n\nbc", 9))
    assert.same({ "a\r\n@0+3", "\0b\n@3+3" }, read_all("a\r\n\0b\n", 9))
  end)

  it("that are longer than wanted are passed over", function()
    assert.same({ "abc\n@0+4", "-@4+5", "e@9+1" }, read_all("abc\nabcd\ne", 4))
    assert.same({ "-@0+5" }, read_all("abcde", 4))
    for _, n in ipairs { 1 << 18, (1 << 18) - 1, (1 << 18) + 1, 3 << 18 } do -- around the size of a piece
      local long = ("x"):rep(n - 1) .. "\n"
      assert.same({ ("%s@0+%d"):format(long, n), ("z@%d+1"):format(n) }, read_all(long .. "z", n))
      assert.same({ ("-@0+%d"):format(n), ("z@%d+1"):format(n) }, read_all(long .. "z", n - 1))
    end
  end)

  it("can be read again by their places, in any order", function()
    local text = {}
    for i = 1, 200 do text[i] = ("%d:"):format(i) .. ("y"):rep(i * i) .. "\n" end
    bs.write_file(path, table.concat(text))
    local reader, at = assert(lines.open(path)), {}
    for i = 1, 200 do
      local line, start = reader:next(1 << 20)
      assert.equal(text[i], line)
      at[i] = start
    end
    for i = 200, 1, -7 do
      assert.equal(text[i], (reader:line_at(at[i], 1 << 20)))
      assert.equal(text[i + 1], (reader:next(1 << 20)))
    end
    assert.is_nil(reader:line_at(at[100], 50))
    reader:close()
  end)

  it("are those of regular files: nothing is waited for", function()
    os.execute(("rm -f '%s/fifo'; mkfifo '%s/fifo'"):format(root, root))
    for name, text in pairs {
      [root .. "/fifo"] = "a regular file is needed", ["/dev/zero"] = "a regular file is needed", [root] = "a folder",
      [root .. "/none"] = "No such file",
    } do
      local reader, message = lines.open(name)
      assert.is_nil(reader)
      assert.truthy(message:find(text, 1, true), message)
      local rows, why, word = data.open(name, { vocab = 9, micro_tokens = 8 })
      assert.is_nil(rows)
      assert.same({ message, "error" }, { why, word })
    end
  end)
end)

it("a place that cannot be had is told with the file's name", function()
  local ok, err = pcall(files.seek, { seek = function() return nil, "Value too large" end }, "f.jsonl", "set", 7)
  assert.is_false(ok)
  assert.same({ 1, "f.jsonl: Value too large" }, { err.bs_exit, err.message })
end)

-- ---- rows that are far too long ------------------------------------------------------------------------

local SCRIPT <const> = [[
local bs, data = require "bs", require "bs.data"
local _, before = bs.rss()
local rows = assert(data.open(arg[1], { vocab = 300, micro_tokens = 64, max_refused = 0.5,
  text = require("bs.data.formats").text(arg[2]) }))
local _, after = bs.rss()
print(#rows.stats.too_long.rows, rows.stats.rows, after - before)]]

describe("a row far beyond micro_tokens is dropped in little memory:", function()
  tiny.tokenizer(root, { special = { "</s>" }, eos = "</s>" })
  bs.write_file(root .. "/config.json", "{}")
  bs.write_file(root .. "/open.lua", SCRIPT)
  local good = '{"prompt": "a", "completion": "b"}\n'
  local bslua = os.getenv "BSLUA" or "build/release/bslua"

  -- A row in the middle of good ones; what the process grows by.
  local function grows(row)
    bs.write_file(path, good .. row .. "\n" .. good)
    local p <close> = assert(io.popen(("'%s' %s/open.lua '%s' '%s'"):format(bslua, root, path, root)))
    local dropped, all, bytes = p:read("n", "n", "n")
    assert.same({ 1, 3 }, { dropped, all })
    return bytes / (1 << 20)
  end

  -- MiB of rows, most that they may cost; each took its length 80 times when all of it was read and encoded.
  local function bounded(row, most)
    local cost = grows(row)
    assert.is_true(cost < most, ("%.1f MiB"):format(cost))
  end

  it("more than is read of one", function()
    bounded('{"prompt": "' .. ("a"):rep(40 << 20) .. '", "completion": "b"}', 24)
    bounded('{"text": "' .. ("a"):rep(40 << 20), 24) -- nor is its end looked for
  end)

  it("texts", function()
    bounded('{"prompt": "' .. ("a"):rep(6 << 20) .. '", "completion": "b"}', 40)
    bounded('{"prompt": "a", "completion": "' .. ("b "):rep(3 << 20) .. '"}', 40)
  end)

  it("lists of ids, whose tree would be large", function()
    bounded('{"prompt": "a", "completion": "b", "ids": [' .. ("1,"):rep(3 << 20) .. "1]}", 40)
  end)
end)
