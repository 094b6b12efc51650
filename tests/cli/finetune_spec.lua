-- SPDX-License-Identifier: Apache-2.0
-- The recipes of the models: where they look for their model, what they print, rows of text end to end.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local qwen3 = require "bs.family.qwen3"
local tiny = require "tiny"

local bslua = assert(os.getenv "BSLUA" or arg and arg[-1], "BSLUA is not set")
local root = tiny.folder("finetune-" .. bs.pid())
local SMALL <const> = { "step_tokens=96", "micro_tokens=48", "r=4", "home=disk", "threads=1" }

teardown(function() os.execute("rm -r " .. root) end)

-- Exit status and all output of a recipe.
local function run(recipe, words, env)
  local line = { env or "", "'" .. bslua .. "'", "recipes/" .. recipe .. ".lua" }
  for _, w in ipairs(words) do line[#line + 1] = "'" .. w .. "'" end
  local p = io.popen(table.concat(line, " ") .. " 2>&1")
  local text = p:read("a")
  local _, _, code = p:close()
  return code, text
end

local function small(...)
  local words = { ... }
  return table.move(SMALL, 1, #SMALL, #words + 1, words)
end

local function has(text, ...)
  for _, part in ipairs { ... } do
    assert.is_truthy(text:find(part, 1, true), ("'%s' is not in: %s"):format(part, text))
  end
end

-- A model with a tokenizer, and chats.
local model, chats = root .. "/model", root .. "/chats.jsonl"
tiny.checkpoint(model, qwen3, tiny.qwen3_config(), "bf16")
tiny.tokenizer(model, { special = { "<|im_start|>", "<|im_end|>" }, eos = "<|im_end|>" })
local lines = {}
for i = 1, 12 do
  local talk = { { role = "user", content = "q" .. i }, { role = "assistant", content = "a" } }
  lines[i] = bs.json.encode { messages = talk }
end
bs.write_file(chats, table.concat(lines, "\n"))

describe("a recipe", function()
  it("explains itself", function()
    for recipe, name in pairs { qwen8b_lora = "Qwen3-VL-8B-Instruct", qwen32b_lora = "Qwen3-VL-32B-Instruct" } do
      local code, text = run(recipe, { "help" })
      assert.equal(0, code)
      has(text, "usage: bslua recipes/" .. recipe .. ".lua data=FILE.jsonl", name, '"messages"', "130 interrupted",
        "  steps ", "  schedule ", "[cosine]")
    end
  end)

  it("finds its model in $BSLUA_MODELS, or says where it looked", function()
    bs.mkdir(root .. "/models")
    os.execute(("ln -s ../model '%s/models/Qwen3-VL-8B-Instruct'"):format(root))
    local env = ("BSLUA_MODELS='%s/models'"):format(root)
    local code, text = run("qwen8b_lora", small("data=" .. chats, "steps=1", "out="), env)
    assert.equal(0, code, text)
    has(text, root .. "/models/Qwen3-VL-8B-Instruct: 5 layers", "step 1/1 ")
    code, text = run("qwen32b_lora", small("data=" .. chats), env)
    assert.equal(2, code)
    has(text, "there is no " .. root .. "/models/Qwen3-VL-32B-Instruct and no models/Qwen3-VL-32B-Instruct",
      "give model=DIR", "Qwen/Qwen3-VL-32B-Instruct")
  end)

  it("needs data, and takes either a rank or an adapter", function()
    local code, text = run("qwen8b_lora", { "model=" .. model })
    assert.equal(2, code)
    has(text, "data=FILE.jsonl is required")
    code, text = run("qwen8b_lora", small("model=" .. model, "data=" .. chats, "adapter=x"))
    assert.equal(2, code)
    has(text, "r= is what the adapter in x says")
    code, text = run("qwen8b_lora", { "model=" .. model, "data=" .. chats, "schedule=cosin" })
    assert.equal(2, code)
    has(text, "one of constant, linear, cosine")
  end)

  it("trains on chats: first row, learning rates, held-out loss before, meanwhile and after", function()
    local out = root .. "/adapter"
    local code, text = run("qwen8b_lora", small("model=" .. model, "data=" .. chats, "valid=" .. chats, "steps=4",
      "lr=1e-2", "schedule=linear", "warmup=1", "eval_every=2", "out=" .. out))
    assert.equal(0, code, text)
    has(text, chats .. ": messages: 12 rows, 291 tokens, 24 of them trained, longest row 25",
      "row 1: <|im_start|>user\\nq1<|im_end|>\\n<|im_start|>assistant\\n[a<|im_end|>]\\n\n",
      "  [..] is trained, 2 of 24 tokens",
      "lr 0.01, linear, warm-up of 1 steps", "| lr 5.00e-03 |", "| lr 1.00e-02 |", "| lr 6.67e-03 |", "| lr 3.33e-03 |",
      "adapter saved in " .. out)
    local order = {}
    for what in text:gmatch("held%-out loss (%a+ %a+ ?%d*) [%d.]+ %(perplexity") do order[#order + 1] = what end
    assert.same({ "before training", "after step 2", "after step 4" }, order)
    local first, last = text:match("\nheld%-out loss (%S+) %-> (%S+)\n")
    assert.is_true(tonumber(last) < tonumber(first))
    assert.is_true(bs.is_file(out .. "/adapter_model.safetensors"))
  end)

  it("asks for a tokenizer where the rows are text and there is none", function()
    bs.write_file(root .. "/text.jsonl", '{"text": "abc"}\n')
    local code, text = run("qwen8b_lora", small("model=tests/data/qwen3", "data=" .. root .. "/text.jsonl"))
    assert.equal(1, code)
    has(text, "rows of text need the model's tokenizer", "tests/data/qwen3/tokenizer.json")
  end)
end)

it("every family has a layout of chats, but one without chats and one of rows with prompts alone", function()
  local without = { phi = true, gpt_oss = true }
  for _, name in ipairs(family.shipped) do
    local layout = require("bs.family." .. name).chat
    assert.equal(without[name] and "nil" or "function", type(layout), name)
  end
end)
