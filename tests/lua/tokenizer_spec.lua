-- SPDX-License-Identifier: Apache-2.0
-- The binding of the tokenizer over a vocabulary of a few bytes. That encoding is right is tested in C.
local bs = require "bs"

local function folder(files)
  local path = os.tmpname()
  os.remove(path)
  bs.mkdir(path)
  for name, value in pairs(files) do
    bs.write_file(path .. "/" .. name, type(value) == "string" and value or bs.json.encode(value))
  end
  finally(function() os.execute("rm -r " .. path) end)
  return path
end

-- The bytes a, b, c and the merge "ab"; "<s>" in front of a text, "</s>" ends it.
local function tiny()
  local function special(id, content)
    return {id = id, content = content, special = true, single_word = false, lstrip = false, rstrip = false,
            normalized = false}
  end
  local vocab = {a = 0, b = 1, c = 2, ab = 3}
  -- The byte alphabet has to be whole: e acute is the bytes C3 A9, which are written as these letters.
  vocab["\u{c3}"], vocab["\u{a9}"] = 4, 5
  local post = {type = "TemplateProcessing",
                single = {{SpecialToken = {id = "<s>", type_id = 0}}, {Sequence = {id = "A", type_id = 0}}},
                pair = {{Sequence = {id = "A", type_id = 0}}, {Sequence = {id = "B", type_id = 1}}},
                special_tokens = {["<s>"] = {id = "<s>", ids = {6}, tokens = {"<s>"}}}}
  local level = {type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = false}
  return {
    ["tokenizer.json"] = {
      version = "1.0", added_tokens = {special(6, "<s>"), special(7, "</s>")},
      pre_tokenizer = level, decoder = level, post_processor = post,
      model = {type = "BPE", vocab = vocab, merges = {"a b"}},
    },
    ["tokenizer_config.json"] = {bos_token = "<s>", eos_token = "</s>"},
  }
end

describe("tokenizer", function()
  it("encodes and decodes", function()
    local t <close> = assert(bs.tokenizer.open(folder(tiny())))
    assert.same({3, 2, 0}, t:encode "abca")
    assert.same({6, 3, 2}, t:encode("abc", {special = true}))
    assert.equal("abca", t:decode {3, 2, 0})
    assert.equal("<s>ab", t:decode {6, 3})
    assert.equal("ab", t:decode({6, 3}, {skip_special = true}))
    assert.equal("ab", t:decode(bs.array.new("i64", {1}, {3})))
    assert.same({}, t:encode "")
    assert.equal("", t:decode {})
  end)

  it("says which bytes an id stands for", function()
    local t <close> = assert(bs.tokenizer.open(folder(tiny())))
    local text = "cabca"
    local ids, first, last = t:encode(text, {offsets = true})
    assert.same({2, 3, 2, 0}, ids)
    local pieces = {}
    for i in ipairs(ids) do pieces[i] = text:sub(first[i], last[i]) end
    assert.same({"c", "ab", "c", "a"}, pieces)
    ids, first, last = t:encode(text, {offsets = true, special = true})
    assert.equal(6, ids[1])
    assert.equal("", text:sub(first[1], last[1]))
  end)

  it("knows its pieces and special tokens", function()
    local t <close> = assert(bs.tokenizer.open(folder(tiny())))
    assert.equal(8, t:vocab_size())
    assert.equal(3, t:id "ab")
    assert.is_nil(t:id "ba")
    assert.equal("ab", t:piece(3))
    assert.is_nil(t:piece(99))
    assert.equal(6, t:special "bos")
    assert.is_nil(t:special "pad")
    assert.same({bos = 6, eos = 7}, t:specials())
    assert.same({7}, t:stops())
  end)

  it("holds back half a character", function()
    local t <close> = assert(bs.tokenizer.open(folder(tiny())))
    local s <close> = t:stream()
    assert.same({"a", "", "\u{e9}", ""}, {s:push(0), s:push(4), s:push(5), s:finish()})
  end)

  it("encodes the lines of a file", function()
    local path = folder(tiny())
    local t <close> = assert(bs.tokenizer.open(path))
    bs.write_file(path .. "/lines", "abc\n\nca\n")
    local lines <close> = t:encode_file(path .. "/lines", {threads = 2})
    assert.equal(3, #lines)
    assert.equal(4, lines:ids())
    assert.same({{3, 2}, {}, {2, 0}}, {lines:get(1), lines:get(2), lines:get(3)})
    assert.error_matches(function() lines:get(4) end, "line out of range")
    assert.error_matches(function() lines:get(0) end, "line out of range")
  end)

  it("that is absent or not understood is an answer", function()
    local t, message, code = bs.tokenizer.open "/nowhere"
    assert.same({nil, "io"}, {t, code})
    assert.equal("io", bs.code(message))
    t, message, code = bs.tokenizer.open(folder {["tokenizer.json"] = "{"})
    assert.equal("format", bs.code(message))
    assert.same({nil, "format"}, {t, code})
  end)

  it("refuses wrong ids and options", function()
    local t = assert(bs.tokenizer.open(folder(tiny())))
    assert.error_matches(function() t:decode {-1} end, "'ids'%[1%]: %-1 is no token id")
    assert.error_matches(function() t:decode {1 << 40} end, "is no token id")
    assert.error_matches(function() t:encode("a", {specials = true}) end, "unknown option 'specials'")
    local s = t:stream()
    t:close()
    assert.error_matches(function() s:push(0) end, "closed bs.tokenizer.stream")
    assert.error_matches(function() t:encode "a" end, "closed bs.tokenizer")
  end)
end)
