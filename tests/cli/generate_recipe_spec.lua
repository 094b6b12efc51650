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

  local function recipe(words)
    local err = root .. "/err"
    local p = assert(io.popen(("%s recipes/generate.lua model=%s %s 2>%s"):format(bslua, dir, words, err)))
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
