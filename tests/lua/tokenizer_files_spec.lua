-- SPDX-License-Identifier: Apache-2.0
-- A tokenizer is what several files say: which of them decides, what is told where they differ, what is refused; and
-- texts that go on from another.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local tiny = require "tiny"

local root = tiny.folder "tokenizer-files"

local function token(id, content, more)
  local t = { id = id, content = content, special = true, single_word = false, lstrip = false, rstrip = false,
              normalized = false }
  for key, value in pairs(more or {}) do t[key] = value end
  return t
end

-- tokenizer.json: the letters a, b, c, e and the words "ab", "<t>"; "<s>" 9 stands before a text, "</s>" 10 ends one.
local function tokenizer(over)
  local t = {
    version = "1.0", added_tokens = { token(9, "<s>"), token(10, "</s>") },
    post_processor = {
      type = "TemplateProcessing",
      single = { { SpecialToken = { id = "<s>", type_id = 0 } }, { Sequence = { id = "A", type_id = 0 } } },
      special_tokens = { ["<s>"] = { id = "<s>", ids = { 9 }, tokens = { "<s>" } } },
    },
    decoder = { type = "Fuse" },
    model = {
      type = "BPE", unk_token = "<unk>",
      vocab = { ["<unk>"] = 0, a = 1, b = 2, c = 3, ab = 4, [" "] = 5, ["<t>"] = 6, ["▁"] = 7, ["▁a"] = 8 },
      merges = { { "a", "b" }, { "▁", "a" } },
    },
  }
  for key, value in pairs(over or {}) do t[key] = value end
  return t
end

local function folder(files)
  local dir = root .. "/case"
  os.execute(("rm -rf '%s' && mkdir '%s'"):format(dir, dir))
  files["tokenizer.json"] = files["tokenizer.json"] or tokenizer()
  for name, value in pairs(files) do
    bs.write_file(dir .. "/" .. name, type(value) == "string" and value or bs.json.encode(value))
  end
  return dir
end

local function open(files) return assert(bs.tokenizer.open(folder(files))) end

local function noted(t, ...)
  local notes = t:notes()
  assert.equal(select("#", ...), #notes, table.concat(notes, "\n"))
  for i, text in ipairs { ... } do assert.is_truthy(notes[i]:find(text, 1, true), notes[i]) end
end

local function refused(files, code, ...)
  local t, message, status = bs.tokenizer.open(folder(files))
  assert.same({ nil, code }, { t, status })
  for _, text in ipairs { ... } do assert.is_truthy(message:find(text, 1, true), message) end
end

describe("an added token", function()
  it("that only tokenizer_config.json lists has the id that it states", function()
    local t <close> = open { ["tokenizer_config.json"] = { added_tokens_decoder = { ["11"] = token(nil, "<x>") } } }
    assert.same({ 1, 11, 2 }, t:encode "a<x>b")
    assert.equal(12, t:vocab_size())
    assert.equal("ab", t:decode({ 1, 11, 2 }, { skip_special = true }))
    noted(t)
  end)

  it("that only added_tokens.json lists has the id that it states", function()
    local t <close> = open { ["added_tokens.json"] = { ["<x>"] = 11, ["<y>"] = 14 },
                             ["tokenizer_config.json"] = { eos_token = "<y>" } }
    assert.same({ 11, 1, 14 }, t:encode "<x>a<y>")
    assert.equal("<x>a", t:decode({ 11, 1, 14 }, { skip_special = true }))
    assert.equal(14, t:special "eos")
  end)

  it("has the flags of tokenizer_config.json, which is told where they change ids", function()
    local dec = { ["10"] = token(nil, "</s>", { rstrip = true }), ["9"] = token(nil, "<s>", { special = false }) }
    local t <close> = open { ["tokenizer_config.json"] = { added_tokens_decoder = dec } }
    assert.same({ 1, 10, 2 }, t:encode "a</s>  b")
    noted(t, "tokenizer_config.json has 1 added tokens of tokenizer.json with other flags")
  end)

  it("has tokenizer.json's id where another file states another, which is told", function()
    local t <close> = open { ["tokenizer_config.json"] = { added_tokens_decoder = { ["12"] = token(nil, "</s>") } },
                             ["added_tokens.json"] = { ["<s>"] = 13 } }
    assert.same({ 10 }, t:encode "</s>")
    noted(t, "tokenizer_config.json gives 1 added tokens other ids than tokenizer.json ('</s>'",
      "added_tokens.json gives 1 added tokens other ids than tokenizer.json ('<s>'")
  end)

  it("with the id of another piece is refused", function()
    refused({ ["tokenizer_config.json"] = { added_tokens_decoder = { ["4"] = token(nil, "<x>") } } }, "format",
      "tokenizer_config.json: added token '<x>' has the id 4, which tokenizer.json gives to 'ab'")
    refused({ ["added_tokens.json"] = { ["<x>"] = 0 } }, "format", "added_tokens.json: added token '<x>' has the id 0")
  end)

  it("is a piece of the vocabulary that a file names as special", function()
    local plain <close> = open {}
    assert.same({ 0, 0, 0 }, plain:encode "<t>")
    for _, config in ipairs { { pad_token = "<t>" }, { additional_special_tokens = { "<t>" } },
                              { mask_token = { __type = "AddedToken", content = "<t>" } } } do
      local t <close> = open { ["tokenizer_config.json"] = config }
      assert.same({ 1, 6, 2 }, t:encode "a<t>b")
      local u <close> = open { ["special_tokens_map.json"] = config }
      assert.same({ 1, 6, 2 }, u:encode "a<t>b")
    end
  end)

  it("that a file names and no file has is told", function()
    local t <close> = open { ["tokenizer_config.json"] = { bos_token = "<s>", eos_token = "<gone>", sep_token = "a" } }
    assert.is_nil(t:special "eos")
    noted(t, "tokenizer_config.json names 1 special tokens that the tokenizer does not have ('<gone>'")
  end)

  it("that is malformed is refused with its file", function()
    for text, decoder in pairs {
      ["'x' is not an id"] = { x = token(nil, "<x>") }, ["'1.5' is not an id"] = { ["1.5"] = token(nil, "<x>") },
      ["the token of id 11 has no content"] = { ["11"] = { special = true } },
      ["lstrip: expected true or false"] = { ["11"] = token(nil, "<x>", { lstrip = "yes" }) },
      ["is a number, not an object"] = 3,
    } do
      refused({ ["tokenizer_config.json"] = { added_tokens_decoder = decoder } }, "format", "tokenizer_config.json",
        text)
    end
    refused({ ["added_tokens.json"] = { ["<x>"] = "11" } }, "format", "added_tokens.json: '<x>' has no id")
    refused({ ["added_tokens.json"] = "[1]" }, "format", "added_tokens.json: expected an object, found an array")
    refused({ ["special_tokens_map.json"] = '{"eos_token": "\xFF"}' }, "format", "special_tokens_map.json",
      "byte 15 is not UTF-8")
    refused({ ["tokenizer_config.json"] = "version https://git-lfs.github.com/spec/v1\n" }, "format",
      "tokenizer_config.json", "LFS pointer")
  end)
end)

describe("a special id", function()
  local config, map = { eos_token = "</s>" }, { eos_token = "<s>" }

  it("is named by special_tokens_map.json where tokenizer_config.json has no added_tokens_decoder", function()
    local t <close> = open { ["tokenizer_config.json"] = config, ["special_tokens_map.json"] = map }
    assert.equal(9, t:special "eos")
    noted(t, "eos_token is '<s>' in special_tokens_map.json and '</s>' in tokenizer_config.json; the first is used")
  end)

  it("is named by tokenizer_config.json else, and by the other where one of them is silent", function()
    local full = { eos_token = "</s>", added_tokens_decoder = { ["9"] = token(nil, "<s>") } }
    local t <close> = open { ["tokenizer_config.json"] = full, ["special_tokens_map.json"] = map }
    assert.equal(10, t:special "eos")
    noted(t, "eos_token is '</s>' in tokenizer_config.json and '<s>' in special_tokens_map.json; the first is used")
    local u <close> = open { ["tokenizer_config.json"] = { eos_token = bs.json.null, added_tokens_decoder = {} },
                             ["special_tokens_map.json"] = map }
    assert.equal(9, u:special "eos")
    local v <close> = open { ["special_tokens_map.json"] = { eos_token = { content = "</s>", lstrip = false } } }
    assert.same({ eos = 10 }, v:specials())
    assert.same({ 10 }, v:stops())
  end)

  it("that no file of the tokenizer names is that of generation_config.json, then config.json", function()
    local model = { eos_token_id = 10, bos_token_id = 9, pad_token_id = -1 }
    local t <close> = open { ["config.json"] = model }
    assert.same({ eos = 10, bos = 9 }, t:specials())
    local u <close> = open { ["config.json"] = model, ["generation_config.json"] = { eos_token_id = { 4, 10 } } }
    assert.equal(4, u:special "eos")
    local v <close> = open { ["config.json"] = { text_config = model } }
    assert.equal(10, v:special "eos")
    local w <close> = open { ["config.json"] = { eos_token_id = 77 } }
    assert.is_nil(w:special "eos")
    noted(t)
  end)
end)

describe("generation", function()
  it("ends at every id that a file states, and at the token named eos", function()
    local t <close> = open { ["tokenizer_config.json"] = { eos_token = "</s>" },
                             ["generation_config.json"] = { eos_token_id = { 4, 10 } }, ["config.json"] =
                             { eos_token_id = 3 } }
    assert.same({ 4, 10, 3 }, t:stops())
    noted(t)
  end)

  it("and training that end at different tokens are told", function()
    local t <close> = open { ["tokenizer_config.json"] = { eos_token = "</s>" },
                             ["generation_config.json"] = { eos_token_id = 4 } }
    assert.same({ 4, 10 }, t:stops())
    noted(t, "eos_token is 10, but eos_token_id of generation_config.json is 4")
  end)

  it("is not told of an end that is no id", function()
    for name, eos in pairs { ["generation_config.json"] = "</s>", ["config.json"] = { 1.5 } } do
      refused({ [name] = { eos_token_id = eos } }, "format", name .. ": eos_token_id is not an id or a list of ids")
    end
  end)
end)

describe("BOS", function()
  local bos = { bos_token = "<s>", eos_token = "</s>" }
  local function with(key, value)
    local c = { [key] = value }
    for name, text in pairs(bos) do c[name] = text end
    return c
  end

  it("is what tokenizer.json puts before a text; other files that say otherwise are told", function()
    local t <close> = open { ["tokenizer_config.json"] = with("add_bos_token", true), ["config.json"] =
                             { bos_token_id = 9 } }
    assert.same({ { 9 }, {} }, { t:around() })
    noted(t)
    local u <close> = open { ["tokenizer_config.json"] = with("add_bos_token", false) }
    assert.same({ 9, 1 }, u:encode("a", { special = true }))
    noted(u, "says add_bos_token false, but the post_processor of tokenizer.json puts BOS before a text; it is put")
    local v <close> = open { ["tokenizer.json"] = tokenizer { post_processor = bs.json.null },
                             ["tokenizer_config.json"] = with("add_bos_token", true) }
    assert.same({ 1 }, v:encode("a", { special = true }))
    noted(v, "says add_bos_token, but the post_processor of tokenizer.json puts no BOS before a text; none is put")
    local w <close> = open { ["tokenizer_config.json"] = bos, ["config.json"] = { bos_token_id = 4 } }
    noted(w, "texts begin with BOS 9, as the tokenizer says; config.json has bos_token_id 4")
  end)
end)

describe("a setting of tokenizer_config.json that tokenizer.json has otherwise", function()
  it("is told", function()
    local with = { normalizer = { type = "Prepend", prepend = "▁" } }
    for says, file in pairs { [true] = {}, [false] = with } do
      local t <close> = open { ["tokenizer.json"] = tokenizer(file), ["tokenizer_config.json"] =
                               { add_prefix_space = says } }
      noted(t, ("says add_prefix_space %s, tokenizer.json puts %s before a text"):format(says, says and "none" or
        "a space"))
      local u <close> = open { ["tokenizer.json"] = tokenizer(file), ["tokenizer_config.json"] =
                               { add_prefix_space = not says } }
      noted(u)
    end
    local v <close> = open { ["tokenizer_config.json"] = { split_special_tokens = true,
                                                           add_prefix_space = bs.json.null } }
    noted(v, "says split_special_tokens, which is not done")
  end)
end)

describe("a text that goes on from another", function()
  local parts = {
    { "Prepend", normalizer = { type = "Sequence", normalizers = { { type = "Prepend", prepend = "▁" },
      { type = "Replace", pattern = { String = " " }, content = "▁" } } } },
    { "Metaspace first", pre_tokenizer = { type = "Metaspace", replacement = "▁", prepend_scheme = "first" } },
    { "Metaspace always", pre_tokenizer = { type = "Metaspace", replacement = "▁", prepend_scheme = "always" } },
  }
  for _, over in ipairs(parts) do
    it("gets nothing in front: " .. over[1], function()
      local t <close> = open { ["tokenizer.json"] = tokenizer { normalizer = over.normalizer,
                                                                pre_tokenizer = over.pre_tokenizer } }
      assert.same({ 7, 4 }, (t:encode "ab"))
      assert.same({ 4 }, (t:encode("ab", { continued = true })))
      assert.same({ 8 }, (t:encode(" a", { continued = true })))
      assert.same({ 7, 8 }, (t:encode("  a", { continued = true })))
      assert.same({}, (t:encode("", { continued = true })))
      local ids, first, last = t:encode("ab", { continued = true, offsets = true })
      assert.same({ { 4 }, { 1 }, { 2 } }, { ids, first, last })
      -- What follows a token of its own begins as it always does.
      assert.same(t:encode "</s>ab", (t:encode("</s>ab", { continued = true })))
    end)
  end

  it("gets nothing in front: ByteLevel's add_prefix_space", function()
    local level = { type = "ByteLevel", add_prefix_space = true, trim_offsets = true, use_regex = true }
    local model = { type = "BPE", vocab = { a = 0, ["Ġ"] = 1, ["Ġa"] = 2 }, merges = { { "Ġ", "a" } } }
    local t <close> = open { ["tokenizer.json"] = tokenizer { pre_tokenizer = level, model = model } }
    assert.same({ 2 }, (t:encode "a"))
    assert.same({ 0 }, (t:encode("a", { continued = true })))
    assert.same({ 2, 2 }, (t:encode(" a a", { continued = true })))
  end)

  it("and one that follows a token gets what is put before every text, not before the first", function()
    for scheme, want in pairs { first = { 4 }, always = { 7, 4 } } do
      local t <close> = open { ["tokenizer.json"] = tokenizer { pre_tokenizer = { type = "Metaspace", replacement = "▁",
        prepend_scheme = scheme } } }
      assert.same(want, (t:encode("ab", { inside = true })))
      local whole = t:encode "</s>ab"
      assert.equal(10, table.remove(whole, 1))
      assert.same(want, whole)
    end
  end)

  it("begins with no BOS", function()
    local t <close> = open {}
    assert.error_matches(function() t:encode("a", { continued = true, special = true }) end, "goes on from another")
  end)
end)
