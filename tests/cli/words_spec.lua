-- SPDX-License-Identifier: Apache-2.0
-- Every word of every recipe with values that cannot be: the program ends with a status of its own and one line, and
-- shows neither a traceback nor a place in its code.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local family = require "bs.model.find_family"
local models = require "family_models"
local tiny = require "tiny"

local root = assert(bs.real_path(tiny.folder "words"))
local program = assert(bs.real_path(os.getenv "BSLUA" or "build/release/bslua"))
local recipes <const>, data <const> = assert(bs.real_path "recipes"), assert(bs.real_path "tests/data")
local model, adapter, rows = root .. "/model", root .. "/adapter", root .. "/rows.jsonl"
local config = models.config("llama", { vocab_size = 257, eos_token_id = 256 })
tiny.checkpoint(model, family.find(config), config, "f32")
tiny.tokenizer(model, { special = { "</s>" }, eos = "</s>" })
bs.write_file(rows, '{"prompt": "a", "completion": "b"}\n')
bs.write_file(root .. "/junk", "\0\xFF{[\"\n\27[2J" .. ("\1\x80"):rep(40))
bs.write_file(root .. "/empty", "")
bs.mkdir(root .. "/cwd")

-- Paths that lead nowhere, or to what is no file of the kind. None is a folder that could be written.
local PATHS <const> = {
  "\xFF\xFE\nbslua: all is well", root .. "/junk", root .. "/empty", rows .. "/x", ("x/"):rep(2500),
}
local NUMBERS <const> = { "nan", "-1", "1e400", "0x1p70", "\xFF\n" }
local TEXTS <const> = { "\xFF\n", ("x"):rep(5000), "," }
local is_path = {}
for _, name in ipairs { "model", "data", "valid", "adapter", "out", "prompts", "reference", "json", "dir", "family" } do
  is_path[name] = true
end

-- Exit status and stderr of words, in a folder of their own and a time that ends.
local function run(words)
  return broken.run({ "20", program, table.unpack(words) }, ("cd '%s/cwd';"):format(root), "timeout")
end

local function ends(words)
  local code, out, err = run(words)
  local text = ("%s: status %d\n%s%s"):format(bs.printable(table.concat(words, " "):sub(1, 300)), code, out, err)
  assert.is_true(code >= 0 and code <= 6, text)
  assert.is_nil(err:find("stack traceback", 1, true) or err:find "%.lua:%d+:", text)
  assert.is_nil(("\n" .. err):find("\nbslua: all is well", 1, true), text)
  local told = 0
  for line in err:gmatch "[^\n]+" do told = told + (line:find "^bslua: " and 1 or 0) end
  assert.is_true(code == 0 or told == 1, text)
end

-- The words of a recipe and their defaults, as its help lists them.
local function words_of(first)
  local _, out = run { first, "help" }
  local list = {}
  for name, default in out:gmatch "\n  ([%w_]+) +[^\n]*%[([^%]\n]*)%]" do list[#list + 1] = { name, default } end
  assert(#list >= 3, out)
  return list
end

-- A run that works, with each word replaced in turn.
local function sweep(base)
  for _, word in ipairs(words_of(base[1])) do
    local name, default = word[1], word[2]
    local values = is_path[name] and PATHS or tonumber(default) and NUMBERS or TEXTS
    for _, value in ipairs(values) do
      local words = {}
      for _, w in ipairs(base) do
        local key = w:match "^([%w_]+)="
        if key ~= name and not (key == "prompt" and (name == "prompts" or name == "ids")) then
          words[#words + 1] = w
        end
      end
      words[#words + 1] = name .. "=" .. value
      ends(words)
    end
  end
end

describe("wrong words of", function()
  local train = {
    recipes .. "/qwen8b_lora.lua", "model=" .. model, "data=" .. rows, "steps=1", "step_tokens=16", "micro_tokens=16",
    "out=",
  }
  do
    local words = table.move(train, 1, #train - 1, 1, {})
    words[#words + 1] = "out=" .. adapter
    local code, _, err = run(words)
    assert(code == 0, err)
  end

  it("finetuning end in one line", function() sweep(train) end)

  it("eval.lua end in one line", function()
    sweep { recipes .. "/eval.lua", "model=" .. model, "data=" .. rows, "micro_tokens=16", "pass_tokens=64" }
  end)

  it("generate.lua end in one line", function()
    sweep { recipes .. "/generate.lua", "model=" .. model, "prompt=a", "max_new=2" }
  end)

  it("merge.lua end in one line", function()
    sweep { recipes .. "/merge.lua", "model=" .. model, "adapter=" .. adapter, "out=" .. root .. "/merged",
      "overwrite=true" }
  end)

  it("parity.lua end in one line", function()
    local llama = data .. "/llama"
    sweep { recipes .. "/parity.lua", "model=" .. llama, "reference=" .. llama .. "/reference.safetensors" }
  end)

  it("--doctor end in one line", function() sweep { "--doctor", "dir=" .. root, "size=1MiB" } end)

  it("the program itself end in one line, and one that points to help", function()
    for _, words in ipairs {
      { "" }, { "\xFF.lua" }, { "a\nb.lua" }, { root }, { root .. "/empty/x" }, { "-l", "nothing" },
      { "-l", "\xFF\n" }, { "-\xFF\n" }, { "--nothing" }, { ("x"):rep(5000) }, { "-e" },
      { recipes .. "/eval.lua", "steps" }, { recipes .. "/eval.lua", "\xFF\n=1" }, { recipes .. "/eval.lua", "=1" },
      { recipes .. "/eval.lua", "model=a", "model=b" }, { recipes .. "/eval.lua", "" },
    } do
      ends(words)
    end
  end)
end)
