-- SPDX-License-Identifier: Apache-2.0
--- Row formats: which one a row is, its ids and labels, chat layouts, what is refused and how it is told.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local chat = require "bs.chat"
local data = require "bs.data"
local rows = require "bs.data.formats"
local tiny = require "tiny"

local SPECIAL = { "<s>", "</s>", "<|im_start|>", "<|im_end|>" }
local BOS, EOS, START, END = 256, 257, 258, 259
local root = tiny.folder "rows"
local path = root .. "/rows.jsonl"

local function folder(name, o)
  tiny.tokenizer(root .. "/" .. name, o)
  return root .. "/" .. name
end
local with_bos = folder("bos", { special = SPECIAL, bos = "<s>", eos = "</s>" })
local plain = folder("plain", { special = SPECIAL, eos = "</s>" })

local function format(dir, layout, vocab)
  return rows.new(vocab or 300, rows.text(dir or plain, layout or chat.chatml))
end

-- Ids of a string's bytes and of the ids between them.
local function ids_of(...)
  local out = {}
  for _, part in ipairs { ... } do
    if type(part) == "number" then
      out[#out + 1] = part
    else
      for i = 1, #part do out[#out + 1] = part:byte(i) end
    end
  end
  return out
end

-- A row as text with its trained part in brackets.
local function shown(dir, row, layout)
  local f = format(dir, layout)
  local ids, labels = f:encode(row)
  if not ids then return nil, labels end
  return (rows.preview(ids, labels, f.tokenizer))
end

local function refused(text, row, f)
  local ids, why = (f or format()):encode(row)
  assert.is_nil(ids)
  assert.is_truthy(why:find(text, 1, true), ("'%s' is not in: %s"):format(text, why))
end

local function fails(code, text, f, row)
  local ok, err = pcall(f.encode, f, row)
  assert.is_false(ok)
  assert.equal(code, err.bs_exit)
  assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
end

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

  it("are encoded one by one, so that no token lies across their border", function()
    local merged = folder("merged", { special = SPECIAL, eos = "</s>", merges = { { "b", "c" } } })
    assert.same(ids_of("a", 260, EOS), (format(merged):encode { text = "abc" }))
    assert.same(ids_of("abc", EOS), (format(merged):encode { prompt = "ab", completion = "c" }))
  end)

  it("may be empty", function()
    local ids, labels = format(with_bos):encode { prompt = "", completion = "" }
    assert.same({ BOS, EOS }, ids)
    assert.same({ -100, EOS }, labels)
  end)
end)

describe("messages", function()
  local talk = {
    { role = "system", content = "S" }, { role = "user", content = "A" }, { role = "assistant", content = "B" },
    { role = "user", content = "C" }, { role = "assistant", content = "D" },
  }

  it("train every answer and the end of its turn", function()
    local ids, labels = format():encode { messages = { talk[2], talk[3] } }
    assert.same(ids_of(START, "user\nA", END, "\n", START, "assistant\nB", END, "\n"), ids)
    local want = {}
    for t = 1, #ids do want[t] = -100 end
    want[#ids - 2], want[#ids - 1] = ("B"):byte(), END
    assert.same(want, labels)
  end)

  it("hold special tokens as plain text", function()
    local ids = format():encode { messages = { { role = "user", content = "<|im_end|>" } } }
    assert.same(ids_of(START, "user\n<|im_end|>", END, "\n"), ids)
  end)

  it("drop the white space that a token takes", function()
    local strip = folder("strip", { special = SPECIAL, eos = "</s>",
      strip = { ["<|im_start|>"] = "rstrip", ["<|im_end|>"] = "lstrip" } })
    local ids = format(strip, function()
      return { { text = "<|im_start|>", special = true, trained = false }, { text = "\n a \n", trained = true },
               { text = "<|im_end|>", special = true, trained = true }, { text = "\n", trained = false } }
    end):encode { messages = { talk[2] } }
    assert.same(ids_of(START, "a", END, "\n"), ids)
  end)

  -- Layouts with the special tokens of each, on the same talk.
  local layouts = {
    { "chatml", chat.chatml, { "<|im_start|>", "<|im_end|>" }, "",
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[D<|im_end|>]\\n" },
    { "qwen3", chat.qwen3, { "<|im_start|>", "<|im_end|>" }, "{% if enable_thinking %}",
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n[D<|im_end|>]\\n" },
    { "qwen3 without thinking", chat.qwen3, { "<|im_start|>", "<|im_end|>" }, "",
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[D<|im_end|>]\\n" },
    { "llama3", chat.llama, { "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" }, "",
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nS<|eot_id|>"
      .. "<|start_header_id|>user<|end_header_id|>\\n\\nA<|eot_id|>"
      .. "<|start_header_id|>assistant<|end_header_id|>\\n\\n[B<|eot_id|>]"
      .. "<|start_header_id|>user<|end_header_id|>\\n\\nC<|eot_id|>"
      .. "<|start_header_id|>assistant<|end_header_id|>\\n\\n[D<|eot_id|>]" },
    { "llama2", chat.llama, { "<s>", "</s>" }, "",
      "<s>[INST] <<SYS>>\\nS\\n<</SYS>>\\n\\nA [/INST][B </s>]<s>[INST] C [/INST][D </s>]" },
    { "llama with ChatML", chat.llama, { "<|im_start|>", "<|im_end|>" }, "'<|im_start|>system\\nHELP<|im_end|>\\n'",
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[D<|im_end|>]\\n" },
    { "mistral", chat.mistral, { "<s>", "</s>" }, "",
      "<s>[INST] S\\n\\nA [/INST][B</s>][INST] C [/INST][D</s>]" },
    { "mistral v3", chat.mistral, { "<s>", "</s>", "[INST]", "[/INST]" }, "",
      "<s>[INST] S\\n\\nA[/INST][ B</s>][INST] C[/INST][ D</s>]" },
    { "mistral tekken", chat.mistral, { "<s>", "</s>", "[INST]", "[/INST]" }, "'[INST]' + content",
      "<s>[INST]S\\n\\nA[/INST][B</s>][INST]C[/INST][D</s>]" },
    { "gemma", chat.gemma, { "<bos>", "<start_of_turn>", "<end_of_turn>" }, "",
      "<bos><start_of_turn>user\\nS\\n\\nA<end_of_turn>\\n<start_of_turn>model\\n[B<end_of_turn>]\\n"
      .. "<start_of_turn>user\\nC<end_of_turn>\\n<start_of_turn>model\\n[D<end_of_turn>]\\n" },
    { "phi3", chat.phi3, { "<|system|>", "<|user|>", "<|assistant|>", "<|end|>" }, "",
      "<|system|>\\nS<|end|>\\n<|user|>\\nA<|end|>\\n<|assistant|>\\n[B<|end|>]\\n<|user|>\\nC<|end|>\\n"
      .. "<|assistant|>\\n[D<|end|>]\\n" },
    { "phi4 mini", chat.phi3, { "<|system|>", "<|user|>", "<|assistant|>", "<|end|>" }, "'<|' + role + '|>' + content",
      "<|system|>S<|end|><|user|>A<|end|><|assistant|>[B<|end|>]<|user|>C<|end|><|assistant|>[D<|end|>]" },
    { "phi4", chat.phi3, { "<|im_start|>", "<|im_sep|>", "<|im_end|>" }, "",
      "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>A<|im_end|>"
      .. "<|im_start|>assistant<|im_sep|>[B<|im_end|>]<|im_start|>user<|im_sep|>C<|im_end|>"
      .. "<|im_start|>assistant<|im_sep|>[D<|im_end|>]" },
    { "glm4", chat.glm4, { "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>" }, "",
      "[gMASK]<sop><|system|>\\nS<|user|>\\nA<|assistant|>[\\nB<|user|>]\\nC<|assistant|>[\\nD<|user|>]" },
  }

  for i, l in ipairs(layouts) do
    local name, layout, special, template, want = table.unpack(l)
    local dir
    setup(function()
      table.insert(special, "<eos>")
      dir = folder("layout" .. i, { special = special, eos = "<eos>", template = template })
    end)

    it("stand in the layout of " .. name, function() assert.equal(want, shown(dir, { messages = talk }, layout)) end)

    it("begin as a prompt does in the layout of " .. name, function()
      local f = format(dir, layout)
      local ids, labels = f:encode { messages = talk }
      f.context.generate = true
      local prompt = f:encode { messages = table.move(talk, 1, 4, 1, {}) }
      for t, id in ipairs(prompt) do assert.equal(ids[t], id) end
      assert.is_true(labels[#prompt] == -100 and labels[#prompt + 1] ~= -100)
    end)
  end

  it("get the system turn that the template has for them", function()
    local dir = folder("default", { special = SPECIAL, eos = "</s>",
      template = "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}" })
    assert.equal("<|im_start|>system\\nBe kind.<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n",
      shown(dir, { messages = { talk[2] } }))
    assert.is_truthy(shown(dir, { messages = talk }):find("system\\nS<|im_end|>", 1, true))
  end)

  it("get the dates of Llama 3.1", function()
    local dir = folder("dates", { eos = "<|eot_id|>", template = "Cutting Knowledge Date: December 2023",
      special = { "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" } })
    assert.is_truthy(shown(dir, { messages = talk }, chat.llama):find(
      "Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\nS<|eot_id|>", 1, true))
  end)

  it("lose the reasoning of all answers but the last with Qwen3", function()
    local dir = folder("reason", { special = SPECIAL, eos = "</s>", template = "enable_thinking" })
    local b, d = "<think>\nx\n</think>\n\nB", "<think>\ny\n</think>\n\nD"
    local text = shown(dir, { messages = { talk[2], { role = "assistant", content = b }, talk[4],
                                           { role = "assistant", content = d } } }, chat.qwen3)
    assert.equal("<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[<think>\\ny\\n</think>\\n\\nD<|im_end|>]\\n", text)
  end)

  it("that no layout can hold are refused", function()
    refused("messages: this model's layout takes user and assistant in turn",
      { messages = { talk[2], talk[2] } }, format(folder("gemma", {
        special = { "<bos>", "<start_of_turn>", "<end_of_turn>" }, eos = "<end_of_turn>" }), chat.gemma))
  end)

  it("that are malformed are told by their place", function()
    refused("'messages' is a text, not a list", { messages = "x" })
    refused("'messages' must be a list", { messages = {} })
    refused("'messages' must be a list", { messages = { role = "user" } })
    refused("messages[1] is a text, not an object", { messages = { talk[2], "x" } })
    refused("messages[0]: role 'bot'; system, user or assistant", { messages = { { role = "bot", content = "" } } })
    refused("messages[0]: role null", { messages = { { content = "" } } })
    refused("messages[0]: content is a list, not a text", { messages = { { role = "user", content = { "x" } } } })
    refused("messages[0]: content is null", { messages = { { role = "assistant", content = bs.json.null } } })
    refused("messages[1]: a system message must be the first", { messages = { talk[2], talk[1] } })
    refused("messages[0] has 'tool_calls', which is not supported",
      { messages = { { role = "assistant", content = "", tool_calls = { 1 } } } })
    assert(format():encode { messages = { { role = "user", content = "", tool_calls = bs.json.null } } })
  end)

  it("need a layout, and its tokens", function()
    fails(1, "this family has no chat layout", rows.new(300, rows.text(plain)), { messages = talk })
    fails(1, "needs the token '<bos>'", format(plain, chat.gemma), { messages = { talk[2], talk[3] } })
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
    fails(1, "the token that ends a text", format(folder("endless", { special = SPECIAL })), { text = "a" })
  end)

  it("may know more tokens than the model", function()
    local f = format(plain, nil, 258)
    assert(f:encode { text = "a" })
    refused("token '<|im_end|>' (259) is outside the model's vocabulary of 258", { text = "<|im_end|>" }, f)
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
