-- SPDX-License-Identifier: Apache-2.0
--- Chat layouts against what the templates that they stand for make of conversations (tests/data/chat), how templates
-- of a folder are found, and the layout of a model without one.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local chat = require "bs.chat"
local spaces = require "bs.data.spaces"
local templates = require "bs.data.templates"
local tiny = require "tiny"

local function read(path)
  local f <close> = assert(io.open(path, "rb"))
  return f:read("a")
end

local data = bs.json.decode(read "tests/data/chat/renderings.json")

-- The text of a layout's segments; nil and the reason.
local function text_of(layout, messages, more)
  local ctx = { has = function() return true end, bos = "<s>", eos = "</s>", today = "09 Mar 2025" }
  for key, value in pairs(more or {}) do ctx[key] = value end
  local list, reason = layout(messages, ctx)
  if not list then return nil, reason end
  local parts = {}
  for i, s in ipairs(list) do parts[i] = s.text end
  return table.concat(parts), list
end

-- Templates that leave a system text out without a word. Their layouts refuse such rows.
local loses_system <const> = { mistral_nemo = true }

describe("a template that is known", function()
  local held = {}

  for _, t in ipairs(data.templates) do
    it("makes what its layout makes: " .. t.name, function()
      local name = assert(templates.by_digest(t.digest), "no layout")
      held[t.digest] = true
      local made = 0
      for i, messages in ipairs(data.conversations) do
        local want = data.renderings[t.renderings][i]
        local row, more, prompt = table.unpack(want, 1, 3)
        local function null(v) return v == nil or v == bs.json.null end
        if null(prompt) then prompt = null(more) and row or row .. more end
        local got = text_of(chat[name], messages)
        if null(row) then
          assert.is_nil(got)
        elseif got or not (loses_system[name] and messages[1].role == "system") then
          assert.equal(row, got, ("conversation %d"):format(i))
          assert.equal(prompt, (text_of(chat[name], messages, { generate = true })))
          made = made + 1
        end
      end
      assert.is_true(made >= 8, made)
    end)
  end

  it("is cut only where a token is or training begins or ends", function()
    for _, name in ipairs(chat.layouts) do
      for _, messages in ipairs(data.conversations) do
        local list = select(2, text_of(chat[name], messages))
        for i = 2, type(list) == "table" and #list or 0 do
          local a, b = list[i - 1], list[i]
          assert.is_true(a.special or b.special or a.trained ~= b.trained, name)
        end
      end
    end
  end)

  it("has renderings", function()
    assert.same({}, templates.without(held))
  end)

  it("is known whatever its line ends are, and no other is", function()
    local text = "{% for m in messages %}\n{{ m.content }}\n{% endfor %}"
    assert.equal(templates.digest(text), templates.digest(text .. "\n"))
    assert.equal(templates.digest(text), templates.digest((text:gsub("\n", "\r\n"))))
    assert.not_equal(templates.digest(text), templates.digest(text .. "\n\n"))
    assert.not_equal(templates.digest(text), templates.digest(text .. " "))
    assert.is_nil(templates.layout(text))
  end)
end)

describe("published tokenizers", function()
  local shared = (os.getenv("BS_SHARED") or "../shared") .. "/tokenizers"
  local names = { qwen3 = "qwen3", llama3_0 = "llama3", gemma3 = "gemma" }
  local function unpacked(path)
    local p = io.popen(("xz -dc '%s' 2>/dev/null"):format(path))
    local text = p and p:read("a") or ""
    if p then p:close() end
    return text ~= "" and text or nil
  end
  local list = unpacked(shared .. "/chat.json.xz")
  if not list then
    it("are not at hand", function() pending("no folder " .. shared .. " (BS_SHARED)") end)
    return
  end
  for folder, name in pairs(names) do
    it("have templates that are known: " .. folder, function()
      local config = bs.json.decode(unpacked(("%s/%s/tokenizer_config.json.xz"):format(shared, folder)))
      assert.equal(name, templates.layout(config.chat_template))
      for key, row in pairs(bs.json.decode(list)[folder]) do
        if not (name == "qwen3" and key:match "%+gen$") then -- there thinking was on
          assert.equal(row.text, (text_of(chat[name], row.messages, {
            generate = key:match "%+gen$" ~= nil, bos = config.bos_token, eos = config.eos_token,
          })), key)
        end
      end
    end)
  end
end)

describe("the template of a folder", function()
  local dir = tiny.folder "templates"
  local function folder(contents)
    os.execute(("rm -rf '%s' && mkdir -p '%s/additional_chat_templates'"):format(dir, dir))
    for name, value in pairs(contents) do
      bs.write_file(dir .. "/" .. name, type(value) == "string" and value or bs.json.encode(value))
    end
    return templates.of(dir)
  end

  it("is that of chat_template.jinja, of tokenizer_config.json, of chat_template.json", function()
    local t, others = folder { ["chat_template.jinja"] = "a", ["tokenizer_config.json"] = { chat_template = "a" },
                               ["chat_template.json"] = { chat_template = "a\n" } }
    assert.same({ "a", "chat_template.jinja", {} }, { t.text, t.place, others })
    t, others = folder { ["tokenizer_config.json"] = { chat_template = "b" }, ["chat_template.json"] =
                         { chat_template = "c" } }
    assert.equal("b", t.text)
    assert.same({ "the template of tokenizer_config.json: chat_template is used; that of chat_template.json: "
      .. "chat_template is another" }, others)
    t, others = folder { ["chat_template.jinja"] = "a", ["tokenizer_config.json"] = { chat_template = "b" } }
    assert.equal("a", t.text)
    assert.equal(1, #others)
    t = folder { ["chat_template.json"] = { chat_template = "c" }, ["tokenizer_config.json"] = {} }
    assert.equal("c", t.text)
    assert.is_nil((folder { ["tokenizer_config.json"] = { chat_template = bs.json.null } }))
    assert.is_nil((folder {}))
  end)

  it("is the default one of a list; the others are named", function()
    local list = { { name = "tool_use", template = "b" }, { name = "default", template = "a" } }
    local t, others = folder { ["tokenizer_config.json"] = { chat_template = list },
                               ["additional_chat_templates/rag.jinja"] = "r" }
    assert.equal("a", t.text)
    assert.same({ "templates that are not used: 'tool_use' (tokenizer_config.json: chat_template), "
      .. "'rag' (additional_chat_templates/rag.jinja)" }, others)
    list[2] = nil
    t = folder { ["tokenizer_config.json"] = { chat_template = list } }
    assert.equal("templates by name, none of them default", t.place)
    assert.is_nil(templates.layout(t.text))
  end)

  it("is refused where its file cannot be read", function()
    folder {}
    os.execute(("ln -s nowhere '%s/chat_template.jinja'"):format(dir))
    local ok, err = pcall(templates.of, dir)
    assert.is_false(ok)
    assert.is_truthy(tostring(err):find("chat_template.jinja", 1, true), tostring(err))
  end)

  it("is refused where it is no text", function()
    for text, value in pairs { ["is a number, not a text"] = 3, ["has a name and a template"] = { { name = "x" } } } do
      local ok, err = pcall(folder, { ["tokenizer_config.json"] = { chat_template = value } })
      assert.is_false(ok)
      assert.is_truthy(tostring(err):find("tokenizer_config.json: chat_template", 1, true), tostring(err))
      assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
    end
  end)
end)

describe("white space at the ends of a text", function()
  it("is what Jinja's trim takes", function()
    for text, want in pairs {
      [" a "] = "a", ["\u{a0}a b\u{3000}"] = "a b", ["\x1ca\x1f\n"] = "a", ["\u{2003}\u{85}"] = "", [""] = "",
      ["\u{200b}a"] = "\u{200b}a", ["é "] = "é", [" "] = "",
    } do assert.equal(want, spaces.trim(text)) end
  end)

  it("is what a token takes", function()
    assert.same({ 3, 2 }, { spaces.before " \u{a0}a\n ", spaces.after " \u{a0}a\n " })
    assert.same({ 0, 0 }, { spaces.before "\x1ca\x1c", spaces.after "\x1ca\x1c" })
    assert.same({ 2, 2 }, { spaces.before "  ", spaces.after "  " })
  end)
end)
