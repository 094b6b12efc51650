-- SPDX-License-Identifier: Apache-2.0
-- Pipes, devices, sockets and folders where a file is named: each is refused, or left alone, and nothing waits.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local family = require "bs.model.find_family"
local models = require "family_models"
local tiny = require "tiny"

local program = os.getenv "BSLUA" or "build/release/bslua"
local root = assert(bs.real_path(tiny.folder "special-files"))
local model = root .. "/model"
local config = models.config("llama", { vocab_size = 257, eos_token_id = 256 })
tiny.checkpoint(model, family.find(config), config, "f32")
tiny.tokenizer(model, { special = { "</s>" }, eos = "</s>" })
local rows = root .. "/rows.jsonl"
bs.write_file(rows, '{"prompt": "a", "completion": "b"}\n')
os.execute(("mkfifo '%s/fifo'"):format(root))

-- What a path may lead to. A device that reads without an end, and one that is empty.
local specials = { root .. "/fifo", "/dev/zero", "/dev/null", root }

local function copy(from, name)
  local dir = root .. "/" .. name
  os.execute(("rm -rf '%s'; cp -r '%s' '%s'"):format(dir, from, dir))
  return dir
end

-- Every word in a recipe that names a file or folder.
local function train(more)
  local words, given = { "recipes/qwen8b_lora.lua", "steps=1", "step_tokens=16", "micro_tokens=16" }, {}
  for _, word in ipairs(more) do given[word:match "^[^=]+"] = true end
  if not given.model then words[#words + 1] = "model=" .. model end
  if not given.data then words[#words + 1] = "data=" .. rows end
  if not given.out then words[#words + 1] = "out=" end
  return table.move(more, 1, #more, #words + 1, words)
end

local adapter = root .. "/adapter"
do
  local code, _, err = broken.run(train { "out=" .. adapter })
  assert(code == 0, err)
end

-- Ends in time, with one of the statuses, without a traceback. before: commands for the shell.
local function ends(words, codes, before)
  local code, out, err = broken.run({ "20", program, table.unpack(words) }, before, "timeout")
  local text = ("%s: status %d\n%s%s"):format(table.concat(words, " "), code, out, err)
  assert.truthy(codes[code], text)
  assert.is_nil(err:find("stack traceback", 1, true) or err:find("given twice", 1, true), text)
  assert.is_true(code == 0 or select(2, err:gsub("\n", "")) >= 1, text)
end

local REFUSED <const>, EITHER <const> = { [1] = true, [2] = true }, { [0] = true, [1] = true, [2] = true, [4] = true }

describe("a file that is none", function()
  it("is refused as a word of a recipe", function()
    for _, path in ipairs(specials) do
      for _, words in ipairs {
        train { "data=" .. path }, train { "valid=" .. path }, train { "family=" .. path },
        { "recipes/eval.lua", "model=" .. model, "data=" .. path },
        { "recipes/generate.lua", "model=" .. model, "prompts=" .. path },
        { "recipes/parity.lua", "model=" .. model, "reference=" .. path },
        { path },
      } do
        ends(words, REFUSED)
      end
    end
    for _, path in ipairs { root .. "/fifo", "/dev/zero", "/dev/null" } do
      for _, words in ipairs {
        train { "out=" .. path }, train { "adapter=" .. path }, train { "model=" .. path },
        { "recipes/merge.lua", "model=" .. model, "adapter=" .. adapter, "out=" .. path },
        { "--doctor", "dir=" .. path },
      } do
        ends(words, REFUSED)
      end
    end
  end)

  it("is refused, or left alone, as part of a model", function()
    for _, name in ipairs {
      "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
      "generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
      "chat_template.json", "more.txt", "more.safetensors", "llama.lua",
    } do
      for _, special in ipairs(specials) do
        local dir = copy(model, "part")
        os.execute(("rm -f '%s/%s'; ln -s '%s' '%s/%s'"):format(dir, name, special, dir, name))
        ends(train { "model=" .. dir }, EITHER)
        ends({ "recipes/generate.lua", "model=" .. dir, "prompt=a", "max_new=1" }, EITHER)
        if special == specials[1] then -- what is copied is slow to be on the disk
          ends({ "recipes/merge.lua", "model=" .. dir, "adapter=" .. adapter, "out=" .. root .. "/merged",
            "overwrite=true" }, EITHER)
        end
      end
    end
  end)

  it("is refused as part of an adapter", function()
    for _, name in ipairs { "adapter_config.json", "adapter_model.safetensors" } do
      for _, special in ipairs(specials) do
        local dir = copy(adapter, "half")
        os.execute(("rm -f '%s/%s'; ln -s '%s' '%s/%s'"):format(dir, name, special, dir, name))
        ends(train { "adapter=" .. dir }, REFUSED)
      end
    end
  end)

  it("does not stop --doctor where it lies among a model's weights", function()
    local dir = copy(model, "doctor")
    os.execute(("mkfifo '%s/a.safetensors'"):format(dir))
    ends({ "--doctor", "dir=" .. dir, "size=1MiB" }, { [0] = true })
  end)
end)

it("names that are not UTF-8 are names like others", function()
  local odd = copy(model, "m\xFF")
  local data, out, merged = root .. "/r\xFF.jsonl", root .. "/a\xFF", root .. "/out\xFF"
  bs.write_file(data, '{"prompt": "a", "completion": "b"}\n')
  for _, words in ipairs {
    train { "model=" .. odd, "data=" .. data, "valid=" .. data, "out=" .. out },
    train { "model=" .. odd, "data=" .. data, "adapter=" .. out, "out=" .. out },
    { "recipes/eval.lua", "model=" .. odd, "adapter=" .. out, "data=" .. data },
    { "recipes/generate.lua", "model=" .. odd, "adapter=" .. out, "prompts=" .. data, "max_new=1" },
    { "recipes/merge.lua", "model=" .. odd, "adapter=" .. out, "out=" .. merged, "overwrite=true" },
    { "recipes/eval.lua", "model=" .. merged, "data=" .. data },
    { "--doctor", "dir=" .. odd, "size=1MiB", "json=" .. root .. "/d\xFF.json" },
  } do
    ends(words, { [0] = true })
  end
end)

it("a system without /proc runs all the same", function()
  local hide = "unshare -m sh -c 'mount -t tmpfs none /proc && \"$@\"' -"
  if not os.execute(hide .. " true 2>/dev/null") then return end -- not ours to hide
  for _, words in ipairs {
    train { "out=" .. root .. "/hidden" },
    { "recipes/eval.lua", "model=" .. model, "data=" .. rows },
    { "recipes/generate.lua", "model=" .. model, "prompt=a", "max_new=1" },
    { "recipes/merge.lua", "model=" .. model, "adapter=" .. adapter, "out=" .. root .. "/merged", "overwrite=true" },
    { "--doctor", "dir=" .. model, "size=1MiB" },
  } do
    ends(words, { [0] = true }, hide)
  end
end)
