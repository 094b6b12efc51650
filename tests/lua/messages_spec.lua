-- SPDX-License-Identifier: Apache-2.0
--- Rows of messages: layouts of chats as ids and labels, which layout a model has, what is refused and how it is told.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local chat = require "bs.chat"
local rows = require "bs.data.formats"
local templates = require "bs.data.templates"
local case = require "row_case" "messages"

local SPECIAL, START, END = case.SPECIAL, case.START, case.END
local root, folder, plain, format = case.root, case.folder, case.plain, case.format
local ids_of, shown, refused, fails = case.ids_of, case.shown, case.refused, case.fails

before_each(case.listen)
after_each(function() bs.log_to(nil) end)

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
    { "chatml", chat.chatml, { "<|im_start|>", "<|im_end|>" },
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[D<|im_end|>]\\n" },
    { "qwen3", chat.qwen3, { "<|im_start|>", "<|im_end|>" },
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n[D<|im_end|>]\\n" },
    { "llama3", chat.llama, { "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>" },
      "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\nS<|eot_id|>"
      .. "<|start_header_id|>user<|end_header_id|>\\n\\nA<|eot_id|>"
      .. "<|start_header_id|>assistant<|end_header_id|>\\n\\n[B<|eot_id|>]"
      .. "<|start_header_id|>user<|end_header_id|>\\n\\nC<|eot_id|>"
      .. "<|start_header_id|>assistant<|end_header_id|>\\n\\n[D<|eot_id|>]" },
    { "llama2", chat.llama, { "<s>", "</s>" },
      "<s>[INST] <<SYS>>\\nS\\n<</SYS>>\\n\\nA [/INST][ B </s>]<s>[INST] C [/INST][ D </s>]" },
    { "llama with ChatML", chat.llama, { "<|im_start|>", "<|im_end|>" },
      "<|im_start|>system\\nS<|im_end|>\\n<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"
      .. "<|im_start|>user\\nC<|im_end|>\\n<|im_start|>assistant\\n[D<|im_end|>]\\n" },
    { "mistral", chat.mistral, { "<s>", "</s>" },
      "<s>[INST] S\\n\\nA [/INST][B</s>][INST] C [/INST][D</s>]" },
    { "mistral v3", chat.mistral, { "<s>", "</s>", "[INST]", "[/INST]" },
      "<s>[INST] S\\n\\nA[/INST][ B</s>][INST] C[/INST][ D</s>]" },
    { "mistral nemo", chat.mistral_nemo, { "<s>", "</s>", "[INST]", "[/INST]" },
      "<s>[INST]A[/INST][B</s>][INST]C[/INST][D</s>]", 2 },
    { "gemma", chat.gemma, { "<bos>", "<start_of_turn>", "<end_of_turn>" },
      "<bos><start_of_turn>user\\nS\\n\\nA<end_of_turn>\\n<start_of_turn>model\\n[B<end_of_turn>]\\n"
      .. "<start_of_turn>user\\nC<end_of_turn>\\n<start_of_turn>model\\n[D<end_of_turn>]\\n" },
    { "phi3", chat.phi, { "<|system|>", "<|user|>", "<|assistant|>", "<|end|>" },
      "<|system|>\\nS<|end|>\\n<|user|>\\nA<|end|>\\n<|assistant|>\\n[B<|end|>]\\n<|user|>\\nC<|end|>\\n"
      .. "<|assistant|>\\n[D<|end|>]\\n<eos>" },
    { "phi4 mini", chat.phi4_mini, { "<|system|>", "<|user|>", "<|assistant|>", "<|end|>" },
      "<|system|>S<|end|><|user|>A<|end|><|assistant|>[B<|end|>]<|user|>C<|end|><|assistant|>[D<|end|>]<eos>" },
    { "phi4", chat.phi, { "<|im_start|>", "<|im_sep|>", "<|im_end|>" },
      "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>A<|im_end|>"
      .. "<|im_start|>assistant<|im_sep|>[B<|im_end|>]<|im_start|>user<|im_sep|>C<|im_end|>"
      .. "<|im_start|>assistant<|im_sep|>[D<|im_end|>]" },
    { "glm4", chat.glm4, { "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>" },
      "[gMASK]<sop><|system|>\\nS<|user|>\\nA<|assistant|>[\\nB<|user|>]\\nC<|assistant|>[\\nD<|user|>]" },
  }

  for i, l in ipairs(layouts) do
    local name, layout, special, want, from = table.unpack(l)
    local dir
    local said = table.move(talk, from or 1, #talk, 1, {})
    setup(function()
      local eos = special[2] == "</s>" and "</s>" or "<eos>"
      table.insert(special, "<eos>")
      dir = folder("layout" .. i, { special = special, eos = eos })
    end)

    it("stand in the layout of " .. name, function() assert.equal(want, shown(dir, { messages = said }, layout)) end)

    it("begin as a prompt does in the layout of " .. name, function()
      local f = format(dir, layout)
      local ids, labels = f:encode { messages = said }
      f.context.generate = true
      local prompt = f:encode { messages = table.move(said, 1, #said - 1, 1, {}) }
      for t, id in ipairs(prompt) do assert.equal(ids[t], id) end
      assert.is_true(labels[#prompt] == -100 and labels[#prompt + 1] ~= -100)
    end)
  end

  it("that tokens of two layouts fit are refused where there is no template", function()
    local dir = folder("two", { eos = "<|eot_id|>", special = { "<|begin_of_text|>", "<|start_header_id|>",
      "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>" } })
    fails(1, "has the tokens of llama3 and of chatml; give layout=", format(dir, chat.llama), { messages = talk })
    local f = rows.new(300, rows.text(dir, chat.llama, "llama3_1"))
    local text = rows.preview((f:encode { messages = talk }), {}, f.tokenizer)
    assert.is_truthy(text:find("Today Date: 26 Jul 2024", 1, true))
  end)

  it("lose the reasoning of all answers but the last with Qwen3", function()
    local dir = folder("reason", { special = SPECIAL, eos = "</s>" })
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
    fails(1, "its family no chat layout; give layout= (chatml, ", rows.new(300, rows.text(plain)), { messages = talk })
    fails(1, "needs the token '<bos>'", format(plain, chat.gemma), { messages = { talk[2], talk[3] } })
  end)
end)

describe("the layout of a model", function()
  -- Which texts are known is chat_spec.lua's; here these two are.
  local CHATML, MIXTRAL = "{% a %}", "{% b %}"
  local layout_of = templates.layout
  setup(function()
    templates.layout = function(text) return ({ [CHATML] = "chatml", [MIXTRAL] = "mixtral" })[text] end
  end)
  teardown(function() templates.layout = layout_of end)
  local talk = { messages = { { role = "user", content = "A" }, { role = "assistant", content = "B" } } }
  local want = "<|im_start|>user\\nA<|im_end|>\\n<|im_start|>assistant\\n[B<|im_end|>]\\n"

  local function model(template)
    return folder("template", { special = SPECIAL, bos = "<s>", eos = "</s>", template = template })
  end
  local function text(dir, layout, asked)
    local f = rows.new(300, rows.text(dir, layout, asked))
    local ids, labels = f:encode(talk)
    return rows.preview(ids, labels, f.tokenizer), f
  end

  it("is that of its template where this is known, whatever its family has; told once", function()
    local got, f = text(model(CHATML), chat.mistral)
    assert.equal(want, got)
    f:encode(talk)
    assert.same({ root .. "/template: rows of messages stand in the layout chatml of the model's own template" },
      case.told())
  end)

  it("has the special tokens that the template names by variable, none where the model has none", function()
    assert.equal("<s>[INST] A [/INST][B</s>]", (text(model(MIXTRAL))))
    local dir = folder("bosless", { special = SPECIAL, eos = "<|im_end|>", template = MIXTRAL })
    assert.equal("[INST] A [/INST][B<|im_end|>]", (text(dir)))
  end)

  it("is asked for where its template is not known, and may be another", function()
    local dir = model "{{ messages }}"
    fails(1, "tokenizer_config.json: chat_template is a chat template that is not known here",
      rows.new(300, rows.text(dir, chat.chatml)), talk)
    assert.equal(want, (text(dir, chat.mistral, "chatml")))
    assert.same({ dir .. ": rows of messages stand in layout=chatml" }, case.told())
    assert.equal("<s>[INST] A [/INST][ B </s>]", (text(model(CHATML), nil, "llama2")))
    assert.same({ dir .. ": rows of messages stand in layout=llama2, while the model's own template makes chatml" },
      case.told())
  end)

  it("is its family's where it has no template, which is told", function()
    assert.equal(want, (text(model(), chat.chatml)))
    assert.same({ root .. "/template: the model has no chat template; rows of messages stand in its family's layout, "
      .. "chatml" }, case.told())
  end)

  it("that is asked for without chats is told", function()
    assert(rows.new(300, rows.text(plain, nil, "chatml")):encode { input_ids = { 1, 2 } })
    assert(rows.new(300, rows.text(plain, nil, "auto")):encode { text = "a" })
    assert.same({ "layout=chatml is for rows of messages; these are rows of input_ids" }, case.told())
  end)

  it("that there is not is refused", function()
    local ok, err = pcall(rows.text, plain, nil, "chatmll")
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
    assert.is_truthy(tostring(err):find("layout=chatmll; one of auto, chatml, ", 1, true), tostring(err))
  end)

  it("is not looked for where no row is a chat", function()
    assert(rows.new(300, rows.text(model "{{ messages }}", nil)):encode { text = "a" })
    assert.same({}, case.told())
  end)
end)
