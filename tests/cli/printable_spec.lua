-- SPDX-License-Identifier: Apache-2.0
-- What terminals are sent: nothing that comes from a model, data, an adapter or the name of a file reaches one as
-- it is; results in pipes are the bytes that they are.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local family = require "bs.model.find_family"
local models = require "family_models"
local tiny = require "tiny"

local root = tiny.folder("printable")
-- A title and a cleared screen, C1, a mark that turns writing, a line that pretends to be a message, no UTF-8.
local HOSTILE <const> = "x\27]0;T\7\27[2J\u{9B}31m\u{202E}\u{2028}\nbslua: all is well\r\xFF"
local SHOWN <const> = [[x\x1B]0;T\x07\x1B[2J\u{009B}31m\u{202E}\u{2028}\nbslua: all is well\r]]

local function clean(text)
  assert.is_nil(text:match "[\0-\8\11-\31\127\128]", text)
  for _, mark in ipairs { "\u{9B}", "\u{202E}", "\u{2028}", "\u{200F}", "\u{2066}", "\xFF" } do
    assert.is_nil(text:find(mark, 1, true), text)
  end
  assert.is_nil(("\n" .. text):find("\nbslua: all is well", 1, true), text)
end

-- The program must fail with one line that shows the hostile text, or what of it JSON can hold.
local function refused(code, words, shown)
  local got, out, err = broken.run(words)
  clean(out)
  clean(err)
  assert.equal(code, got, err)
  assert.truthy(err:find(shown or SHOWN, 1, true), err)
  assert.equal(1, select(2, err:gsub("\n", "")), err)
end

-- A model with random weights and a tokenizer whose tokens are bytes.
local writer = root .. "/writer"
local config = models.config("llama", { vocab_size = 257, eos_token_id = 256 })
tiny.checkpoint(writer, family.find(config), config, "f32")
tiny.tokenizer(writer, { special = { "</s>" }, eos = "</s>" })

local function generate(dir) return { "recipes/generate.lua", "model=" .. dir, "ids=1", "max_new=1" } end
local function eval(path) return { "recipes/eval.lua", "model=" .. writer, "data=" .. path } end

describe("a terminal is not sent", function()
  local json = HOSTILE:sub(1, -2) -- JSON is UTF-8

  it("what a config.json holds", function()
    for _, over in ipairs {
      { model_type = json }, { hidden_act = json }, { rope_scaling = { rope_type = json, factor = 2.0 } },
    } do
      refused(1, generate(broken.with_config(over)))
    end
  end)

  it("names of tensors, or of their files", function()
    refused(1, generate(broken.with_header(function(header)
      header[json] = { dtype = json, shape = { 1 }, data_offsets = { 0, 4 } }
    end)))
    refused(1, generate(broken.checkpoint(function(dir)
      os.remove(dir .. "/model.safetensors")
      bs.write_file(dir .. "/model.safetensors.index.json", bs.json.encode { weight_map = { a = json } })
    end)))
  end)

  it("what rows hold", function()
    local short, shown = "\27[2J\u{202E}\nbslua: all is well", [[\x1B[2J\u{202E}\nbslua: all is well]]
    for _, row in ipairs {
      { [short] = 1 }, { messages = { { role = short, content = "a" } } },
      { messages = { { role = "user", content = "a", [short] = 1 } } }, { input_ids = { short } },
    } do
      bs.write_file(root .. "/rows.jsonl", bs.json.encode(row) .. "\n")
      refused(4, eval(root .. "/rows.jsonl"), shown)
    end
  end)

  it("what words of the command line and names of files hold", function()
    local name = HOSTILE:gsub("/", "")
    refused(1, generate(root .. "/" .. name), SHOWN .. [[\xFF]])
    refused(1, eval(root .. "/" .. name), SHOWN .. [[\xFF]])
    refused(1, { root .. "/" .. name }, SHOWN .. [[\xFF]])
    refused(2, { "recipes/eval.lua", name .. "=1" }, SHOWN .. [[\xFF]])
    bs.write_file(root .. "/" .. name, '{"input_ids": [1, 2, 3], "\\u202e\\u001b[2J": 1}\n')
    local code, out, err = broken.run(eval(root .. "/" .. name))
    assert.equal(0, code, err)
    clean(out)
    assert.truthy(out:find(SHOWN, 1, true), out)
    assert.truthy(out:find([[fields not used: \u{202E}\x1B[2J]], 1, true), out)
  end)

  it("what a script raises", function()
    bs.write_file(root .. "/raise.lua", "error('\\27[2J\\u{202E} bad')")
    local code, _, err = broken.run { root .. "/raise.lua" }
    assert.equal(1, code)
    clean(err)
    assert.truthy(err:find([[\x1B[2J\u{202E} bad]], 1, true), err)
    assert.truthy(err:find("\nstack traceback:\n\t", 1, true), err) -- which keeps its lines
  end)
end)

describe("results", function()
  -- Some prompt whose answer has a control character; any random model has one soon.
  local function writes_control()
    for b = 65, 90 do
      local prompt = "prompt=" .. string.char(b)
      local _, out = broken.run { "recipes/generate.lua", "model=" .. writer, prompt, "max_new=40" }
      if out:sub(1, -2):find "[\1-\8\11-\31\127]" then return string.char(b), out end
    end
  end

  it("are the model's bytes in a pipe, and printable on a terminal", function()
    local prompt, piped = writes_control()
    assert.is_string(prompt)
    if not os.execute "command -v script >/dev/null" then return end -- makes a terminal
    local typed = root .. "/typed"
    os.execute(("script -qec \"'%s' recipes/generate.lua model=%s prompt=%s max_new=40 2>/dev/null\" /dev/null >%s")
      :format(os.getenv "BSLUA" or "build/release/bslua", writer, prompt, typed))
    local shown = broken.read(typed):gsub("\r\n", "\n") -- the terminal's own line ends
    assert.is_nil(shown:find "[\0-\8\11-\31\127]", shown)
    assert.equal(bs.printable(piped, true), shown)
  end)
end)
