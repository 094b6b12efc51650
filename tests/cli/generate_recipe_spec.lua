-- SPDX-License-Identifier: Apache-2.0
--- The recipes that use a model: generate.lua and eval.lua.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local models = require "family_models"
local tiny = require "tiny"

local bslua = os.getenv("BSLUA") or "build/release/bslua"
local root = tiny.folder("generate-recipe")

describe("recipes/generate.lua", function()
  local dir = root .. "/talker"
  local config = models.config("llama", { vocab_size = 260, eos_token_id = 300 })
  tiny.checkpoint(dir, family.find(config), config, "f32")
  tiny.tokenizer(dir, { special = { "<s>", "</s>" } })

  local function recipe(words, model)
    local err = root .. "/err"
    local p = assert(io.popen(("%s recipes/generate.lua model=%s %s 2>%s"):format(bslua, model or dir, words, err)))
    local out = p:read("a")
    local _, _, code = p:close()
    local f <close> = assert(io.open(err))
    return out, f:read("a"), code
  end

  it("streams one prompt, as text or ids", function()
    local ids, log = recipe("ids=72,105 max_new=5")
    assert.matches("^%d+,%d+,%d+,%d+,%d+\n$", ids)
    assert.matches("1 prompts of 2 tokens, 5 new tokens in 5 walks", log, 1, true)
    local bytes = {}
    for id in ids:gmatch("%d+") do bytes[#bytes + 1] = tonumber(id) end
    local t <close> = assert(bs.tokenizer.open(dir))
    local text, _, code = recipe("prompt=Hi max_new=5")
    assert.equal(0, code or 0)
    assert.equal(t:decode(bytes, { skip_special = true }) .. "\n", text)
  end)

  it("answers a file of prompts as JSON lines, each as alone", function()
    bs.write_file(root .. "/p.txt", "Hi\n\nHello there\n")
    bs.write_file(root .. "/p.jsonl", '{"prompt": "Hi"}\n{"prompt": "Hello there", "more": 1}\n')
    local text = recipe("max_new=6 prompts=" .. root .. "/p.txt")
    local same = recipe("max_new=6 prompts=" .. root .. "/p.jsonl")
    local rows, twin = {}, {}
    for line in text:gmatch("[^\n]+") do rows[#rows + 1] = bs.json.decode(line) end
    for line in same:gmatch("[^\n]+") do twin[#twin + 1] = bs.json.decode(line) end
    assert.same(rows, twin)
    assert.equal(2, #rows)
    for _, row in ipairs(rows) do
      assert.equal(recipe(("max_new=6 prompt='%s'"):format(row.prompt)), row.text .. "\n")
      assert.equal("length", row.reason)
    end
  end)

  it("ends at the ids of generation_config.json, a number or a list", function()
    local free = {}
    for id in recipe("ids=72,105 max_new=6"):gmatch("%d+") do free[#free + 1] = tonumber(id) end
    local upto = {}
    for i, id in ipairs(free) do
      upto[i] = tostring(id)
      if id == free[3] then break end
    end
    for _, eos in ipairs { tostring(free[3]), ("[259, %d]"):format(free[3]) } do
      bs.write_file(dir .. "/generation_config.json", ('{"eos_token_id": %s}'):format(eos))
      assert.equal(table.concat(upto, ",") .. "\n", recipe("ids=72,105 max_new=6"))
    end
    os.remove(dir .. "/generation_config.json")
  end)

  it("tells which ids end an answer: the end of a turn of the model's chats is one", function()
    for words, want in pairs {
      ["ids=72,105"] = "300, '</s>' (257)", ["prompt=Hi layout=llama2"] = "300, '</s>' (257)",
      ["prompt=Hi layout=chatml"] = "300", -- a vocabulary without its tokens
    } do
      local _, log = recipe("max_new=1 " .. words)
      assert.is_truthy(log:find("an answer ends at " .. want .. "\n", 1, true), log)
    end
    bs.write_file(dir .. "/special_tokens_map.json", '{"eos_token": "<s>"}')
    local _, log = recipe "ids=72,105 max_new=1"
    assert.is_truthy(log:find("an answer ends at 300, '<s>' (256)\n", 1, true), log) -- llama2 ends with eos
    os.remove(dir .. "/special_tokens_map.json")
    bs.write_file(dir .. "/chat_template.jinja", "{{ messages }}")
    _, log = recipe "prompt=Hi max_new=1"
    assert.is_truthy(log:find("an answer ends at 300; no end of a chat's turn is known", 1, true), log)
    os.remove(dir .. "/chat_template.jinja")
  end)

  it("begins a prompt as training does, with one BOS", function()
    local bos = root .. "/bos"
    os.execute(("cp -r '%s' '%s'"):format(dir, bos))
    tiny.tokenizer(bos, { special = { "<s>", "</s>" }, bos = "<s>", eos = "</s>" })
    local plain = recipe("prompt=Hi max_new=4", bos)
    local written, log = recipe("'prompt=<s>Hi' max_new=4", bos)
    assert.equal(plain, written)
    assert.matches("1 prompts of 3 tokens", log, 1, true)
    assert.equal(plain, (recipe("prompt=Hi max_new=4", bos)))
  end)

  it("reads files with CRLF and a byte order mark as without", function()
    bs.write_file(root .. "/p.txt", "Hi\nHello there\n")
    bs.write_file(root .. "/crlf.txt", "\xEF\xBB\xBFHi\r\n\r\nHello there\r\n")
    bs.write_file(root .. "/crlf.jsonl", '\xEF\xBB\xBF{"prompt": "Hi"}\r\n{"prompt": "Hello there"}\r\n')
    local want = recipe("max_new=4 prompts=" .. root .. "/p.txt")
    assert.equal(want, (recipe("max_new=4 prompts=" .. root .. "/crlf.txt")))
    assert.equal(want, (recipe("max_new=4 prompts=" .. root .. "/crlf.jsonl")))
  end)

  it("says where a prompt is not UTF-8", function()
    bs.write_file(root .. "/bad.txt", "Hi\na\xFFb\n")
    bs.write_file(root .. "/bad.jsonl", '{"prompt": "\xE4\xB8"}\n')
    for words, text in pairs {
      ["prompts=" .. root .. "/bad.txt"] = "bad.txt:2: byte 2 is not UTF-8",
      ["prompts=" .. root .. "/bad.jsonl"] = "bad.jsonl:1: byte 13 is not UTF-8",
      ["'prompt=ab\xC0\x80'"] = "prompt=: byte 3 is not UTF-8",
    } do
      local out, log, code = recipe(words)
      assert.equal("", out)
      assert.equal(1, code)
      assert.is_truthy(log:find(text, 1, true), log)
    end
  end)

  it("draws the same for the same seed", function()
    local words = "ids=72,105 max_new=12 temperature=1.5 top_k=40 top_p=0.95 min_p=0.001"
    local one = recipe(words .. " seed=3")
    assert.equal(one, recipe(words .. " seed=3"))
    assert.not_equal(one, recipe(words .. " seed=4"))
    assert.not_equal(one, recipe("ids=72,105 max_new=12"))
  end)

  it("says what is wrong with its settings", function()
    for _, case in ipairs {
      { "", "one of prompt=, prompts= and ids=" }, { "prompt=a ids=1", "one of prompt=" },
      { "ids=1,x", "'x' is no token id" }, { "ids=999", "prompt 1 has id 999; the model has ids 0..259" },
      { "prompt=a max_new=0", "max_new" }, { "prompts=/nowhere", "/nowhere" },
      { "ids=1 adapter=/nowhere", "/nowhere" },
    } do
      local out, log, code = recipe(case[1])
      assert.equal("", out)
      assert.is_true(code ~= 0 and code ~= nil)
      assert.is_truthy(log:find(case[2], 1, true), log)
    end
    bs.write_file(root .. "/bad.jsonl", '{"prompt": "a"}\n{"text": "b"}\n')
    local _, log = recipe("prompts=" .. root .. "/bad.jsonl")
    assert.is_truthy(log:find("bad.jsonl:2: a JSON object with a text 'prompt'", 1, true), log)
  end)
end)

describe("recipes/eval.lua", function()
  it("gives the loss that training gives, with and without an adapter", function()
    local base, dir = "tests/data/llama", root .. "/eval-adapter"
    local function output(words)
      local p <close> = assert(io.popen(("%s %s 2>&1"):format(bslua, words)))
      return p:read("a")
    end
    local log = output(("recipes/qwen8b_lora.lua model=%s data=tests/data/rows.jsonl valid=tests/data/rows.jsonl "
      .. "steps=3 step_tokens=48 micro_tokens=40 lr=1e-2 out=%s"):format(base, dir))
    local before, after = log:match("held%-out loss ([%d.]+) %-> ([%d.]+)")
    local eval = ("recipes/eval.lua model=%s data=tests/data/rows.jsonl micro_tokens=40 "):format(base)
    local loss, perplexity = output(eval):match("loss ([%d.]+), perplexity ([%d.]+)")
    assert.equal(before, loss)
    assert.is_true(math.abs(math.log(tonumber(perplexity)) - tonumber(loss)) < 1e-3)
    assert.equal(after, output(eval .. "adapter=" .. dir):match("loss ([%d.]+)"))
    assert.is_true(tonumber(after) < tonumber(before))
  end)
end)
