-- SPDX-License-Identifier: Apache-2.0
--- Row formats: which one a row is, its ids and labels, what is refused and how it is told.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local chat = require "bs.chat"
local data = require "bs.data"
local rows = require "bs.data.formats"
local case = require "row_case" "rows"

local SPECIAL, BOS, EOS, START = case.SPECIAL, case.BOS, case.EOS, case.START
local root, folder, plain, format = case.root, case.folder, case.plain, case.format
local ids_of, refused, fails = case.ids_of, case.refused, case.fails
local path = root .. "/rows.jsonl"
local with_bos = folder("bos", { special = SPECIAL, bos = "<s>", eos = "</s>" })

before_each(case.listen)
after_each(function() bs.log_to(nil) end)

describe("text", function()
  it("is trained whole, with the token that ends it", function()
    local ids, labels = format():encode { text = "abc" }
    assert.same(ids_of("abc", EOS), ids)
    assert.same(ids, labels)
  end)

  it("begins as the tokenizer's post-processor says, once", function()
    local f = format(with_bos)
    assert.same(ids_of(BOS, "abc", EOS), (f:encode { text = "abc" }))
    assert.same(ids_of(BOS, "abc", EOS), (f:encode { text = "<s>abc" }))
    assert.same(ids_of(BOS, EOS), (f:encode { text = "" }))
  end)

  it("ends once where the tokenizer puts an end, too; prompts go without it", function()
    local dir = folder("after", { special = SPECIAL, bos = "<s>", eos = "</s>" })
    local t = bs.json.decode(assert(bs.read_file(dir .. "/tokenizer.json")))
    table.insert(t.post_processor.single, { SpecialToken = { id = "</s>", type_id = 0 } })
    t.post_processor.special_tokens["</s>"] = { id = "</s>", ids = { EOS }, tokens = { "</s>" } }
    bs.write_file(dir .. "/tokenizer.json", bs.json.encode(t))
    assert.same(ids_of(BOS, "abc", EOS), (format(dir):encode { text = "abc" }))
    assert.same(ids_of(BOS, "ab", "c", EOS), (format(dir):encode { prompt = "ab", completion = "c" }))
    assert.is_truthy(case.told()[1]:find("puts the end 257 behind every text; prompts go without it", 1, true))
  end)

  it("that ends itself gets no second end; its special tokens are tokens", function()
    assert.same(ids_of("a", START, EOS), (format():encode { text = "a<|im_start|></s>" }))
  end)
end)

describe("prompt and completion", function()
  it("trains the completion and the end", function()
    local ids, labels = format(with_bos):encode { prompt = "ab", completion = "cd" }
    assert.same(ids_of(BOS, "ab", "cd", EOS), ids)
    assert.same(ids_of(-100, -100, -100, "cd", EOS), labels)
  end)

  it("are encoded one by one where a token lies across their border, which is marked", function()
    local merged = folder("merged", { special = SPECIAL, eos = "</s>", merges = { { "b", "c" } } })
    assert.same(ids_of("a", 260, EOS), (format(merged):encode { text = "abc" }))
    local ids, labels, marks = format(merged):encode { prompt = "ab", completion = "c" }
    assert.same(ids_of("abc", EOS), ids)
    assert.same(ids_of(-100, -100, "c", EOS), labels)
    assert.same({ border = true }, marks)
    assert.same({ {}, {} }, { select(3, format(merged):encode { prompt = "a", completion = "bc" }),
                              select(3, format(merged):encode { text = "abc" }) })
  end)

  -- Tokenizers after SentencePiece put a space before a text, and the older ones before what follows a token.
  local function spaced(name, o)
    local dir = folder(name, { special = SPECIAL, bos = "<s>", eos = "</s>" })
    local t = bs.json.decode(assert(bs.read_file(dir .. "/tokenizer.json")))
    for key, value in pairs(o) do t[key] = value end
    bs.write_file(dir .. "/tokenizer.json", bs.json.encode(t))
    return dir
  end

  it("are one text: nothing is put before the second", function()
    local level = { type = "ByteLevel", add_prefix_space = true, trim_offsets = true, use_regex = false }
    for name, over in pairs { prepend = { normalizer = { type = "Prepend", prepend = " " } },
                              prefix = { pre_tokenizer = level } } do
      local dir = spaced(name, over)
      for _, row in ipairs { { "2+2=", "4" }, { "def f():", "\n    return 1" }, { "A:", " yes" }, { "", "4" },
                             { "a</s>", "b" }, { "a ", "b" }, { "<s>", "b" }, { "<s>a", "" } } do
        local whole = format(dir):encode { text = row[1] .. row[2] }
        local ids, labels, marks = format(dir):encode { prompt = row[1], completion = row[2] }
        assert.same(whole, ids)
        assert.same({}, marks)
        local text = rows.preview(ids, labels, format(dir).tokenizer or assert(bs.tokenizer.open(dir)))
        assert.is_truthy(text:find(("[%s</s>]"):format(row[2]:gsub("\n", "\\n")), 1, true) or row[1] == ""
          or row[1] == "a</s>" or row[1] == "<s>", text)
      end
    end
  end)

  it("show a space that ids hold", function()
    local dir = spaced("metaspace", { decoder = { type = "Sequence", decoders = { { type = "ByteLevel" },
      { type = "Strip", content = " ", start = 1, stop = 0 } } } })
    local f = format(dir)
    local ids, labels = f:encode { prompt = " a", completion = " b" }
    assert.equal("<s> a[ b</s>]", (rows.preview(ids, labels, f.tokenizer)))
  end)

  it("may be empty", function()
    local ids, labels = format(with_bos):encode { prompt = "", completion = "" }
    assert.same({ BOS, EOS }, ids)
    assert.same({ -100, EOS }, labels)
  end)
end)

describe("the format", function()
  it("is that of the first row, for all", function()
    local f = format()
    assert.equal("", f:name())
    refused("no format fits its fields ('a', 'prompt'); expected are messages, or prompt + completion, or input_ids, "
      .. "or text", { a = 1, prompt = "x" }, f)
    refused("no format fits its fields (none)", {}, f)
    assert(f:encode { text = "a" })
    assert.equal("text", f:name())
    refused("no field 'text'", { input_ids = { 1 } }, f)
    refused("no field 'text'", { a = "x" }, f)
    refused("'text' is null", { text = bs.json.null }, f)
  end)

  it("is one: a row that fits two is refused", function()
    refused("fits two formats, 'messages' and 'text'", { text = "a", messages = {} })
    refused("fits two formats, 'prompt and completion' and 'input_ids'",
      { prompt = "a", completion = "", input_ids = {} })
    local f = format()
    assert(f:encode { text = "a" })
    refused("fits two formats", { text = "a", input_ids = { 1 } }, f)
    refused("field 'prompt' does not belong to rows of text", { text = "a", prompt = "b" }, f)
    refused("field 'labels' does not belong to rows of text", { text = "a", labels = { 1 } }, f)
    assert(f:encode { text = "a", messages = bs.json.null })
  end)

  it("has texts", function()
    refused("'text' is a number, not a text", { text = 3 })
    refused("'prompt' is a list, not a text", { prompt = { { role = "user" } }, completion = "a" })
    refused("'completion' is an object, not a text", { prompt = "a", completion = { a = 1 } })
  end)

  it("does not pass over fields that change the meaning; others are listed", function()
    refused("field 'tools' is not supported", { text = "a", tools = {} })
    refused("field 'images' is not supported", { text = "a", images = {} })
    local f = format()
    assert(f:encode { text = "a", source = "x", tools = bs.json.null })
    assert(f:encode { text = "a", id = 3 })
    assert.same({ "id", "source" }, f:ignored())
  end)
end)

describe("the tokenizer", function()
  it("is opened at the first need only, and asked for by name", function()
    local f = format(root .. "/nowhere")
    assert(f:encode { input_ids = { 1, 2 } })
    fails(1, "rows of text need the model's tokenizer", format(root .. "/nowhere"), { text = "a" })
    fails(1, "rows of text need a tokenizer", rows.new(300), { text = "a" })
  end)

  it("must know how a text ends", function()
    fails(1, "config.json names the token that ends a text (eos)", format(folder("endless", { special = SPECIAL })),
      { text = "a" })
  end)

  it("may know more tokens than the model", function()
    local f = format(plain, nil, 258)
    assert(f:encode { text = "a" })
    refused("token '<|im_end|>' (259) is outside the model's vocabulary of 258", { text = "<|im_end|>" }, f)
  end)
end)

describe("bytes that are not UTF-8", function()
  it("are told, not replaced", function()
    refused("byte 2 of 'text' is not UTF-8", { text = "a\xFF" })
    refused("byte 1 of 'completion' is not UTF-8", { prompt = "a", completion = "\xE4\xB8" })
    refused("messages[0]: byte 3 of its content is not UTF-8",
      { messages = { { role = "user", content = "ab\xED\xA0\x80" } } })
  end)
end)

describe("a preview", function()
  it("marks what is trained", function()
    local f = format(with_bos)
    local ids, labels = f:encode { prompt = "a\n\t", completion = "b\1" }
    local text, trained = rows.preview(ids, labels, f.tokenizer)
    assert.equal("<s>a\\n\\t[b\\x01</s>]", text)
    assert.equal(3, trained)
    text, trained = rows.preview({ 5, 6, 7, 8 }, { 5, 6, 7, -100 })
    assert.same({ "[5 6 7] 8", 2 }, { text, trained })
  end)

  it("leaves out the middle of long rows, between characters", function()
    local f = format()
    local ids, labels = f:encode { text = ("é"):rep(200) }
    local text = rows.preview(ids, labels, f.tokenizer, 41)
    assert.equal("[" .. ("é"):rep(9) .. " ... " .. ("é"):rep(8) .. "</s>]", text)
  end)
end)

describe("a file of rows", function()
  local function write(lines)
    bs.write_file(path, table.concat(lines, "\n"))
  end
  local function open(opts)
    local o = { vocab = 300, micro_tokens = 16, text = rows.text(plain, chat.chatml) }
    for key, value in pairs(opts or {}) do o[key] = value end
    return data.open(path, o)
  end

  it("is told with file, line and reason", function()
    write { '{"text": "a"}', '{"text": "a", "input_ids": [1]}', "{", '{"text": 1}',
            '{"prompt": "a", "completion": "b"}' }
    local d, message, why = open()
    assert.is_nil(d)
    assert.equal("data", why)
    for line, what in pairs { [2] = "fits two formats, 'input_ids' and 'text'", [3] = "not JSON",
                              [4] = "'text' is a number", [5] = "no field 'text'" } do
      assert.is_truthy(message:find(("%s:%d: %s"):format(path, line, what), 1, true), message)
    end
    assert.is_truthy(message:find("4 of 5 rows were dropped", 1, true))
  end)

  it("tells which rows' borders lie inside a token, and which messages hold the text of one", function()
    local merged = folder("merged file", { special = SPECIAL, eos = "</s>", merges = { { "b", "c" } } })
    write { '{"prompt": "a", "completion": "bc"}', '{"prompt": "ab", "completion": "c"}' }
    local d <close> = assert(open { text = rows.text(merged) })
    local border = "; 1 rows whose border is inside a token of the whole text (%s:2)"
    assert.is_truthy(d:describe():find(border:format(path), 1, true), d:describe())
    local function talk(text)
      return ('{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "b"}]}'):format(text)
    end
    write { talk "a", talk "</s>" }
    local e <close> = assert(open { micro_tokens = 64 })
    local special = "; 1 rows with the text of a special token in a message, which is plain text there (%s:2)"
    assert.is_truthy(e:describe():find(special:format(path), 1, true), e:describe())
  end)

  it("that is not UTF-8 is told with the line and the byte", function()
    write { '{"text": "a"}', '{"text": "a", "note": "\xC3"}', '{"text": "\\ud800"}' }
    local d, message = open()
    assert.is_nil(d)
    assert.is_truthy(message:find(path .. ":2: byte 24 of the line is not UTF-8", 1, true), message)
    assert.is_truthy(message:find(path .. ":3: not JSON", 1, true), message)
  end)

  it("gives the same rows again when a step needs them", function()
    write { '{"text": "ab"}', '{"text": "c", "n": 1}', ('{"text": "%s"}'):format(("x"):rep(16)), '{"text": ""}' }
    local d = assert(open { max_refused = 0.5 })
    assert.equal("text: 2 rows, 5 tokens, 3 of them trained, longest row 3; 2 of 4 rows were dropped; "
      .. "1 longer than micro_tokens=16 (" .. path .. ":3); 1 without a trained token (" .. path .. ":4); "
      .. "fields not used: n", d:describe())
    local m = d:pass(1)[1]
    assert.same(ids_of("ab", EOS, "c", EOS), m.ids)
    assert.same(m.ids, m.labels)
    assert.same({ 3, 2 }, m.row_len)
    d:close()
  end)
end)
