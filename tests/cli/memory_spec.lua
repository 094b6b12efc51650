-- SPDX-License-Identifier: Apache-2.0
--- What is promised of memory: the resident set of a program never passes vram= + ram= + what the process had before,
-- also while an adapter is saved and tested. The budgets are what the plan needs; the adapters are much larger than
-- what is left between that and the promise.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local create = require "bs.model.create"
local tiny = require "tiny"

local bslua = os.getenv "BSLUA" or "build/release/bslua"
local root = tiny.folder("memory-" .. bs.pid())
local base, adapter, script = root .. "/base", root .. "/adapter", root .. "/peak.lua"
local rows = "tests/data/rows.jsonl"
local MIB <const>, R <const> = 1 << 20, 192
local LAYERS <const>, CHANNELS <const>, INNER <const> = 6, 256, 512
teardown(function() os.execute("rm -r " .. root) end)

setup(function()
  create(base, tiny.qwen3_config { vocab_size = 320, num_hidden_layers = LAYERS, hidden_size = CHANNELS,
                                   intermediate_size = INNER, tie_word_embeddings = true }, { seed = 1 })
  -- Runs a recipe; the last line has the bytes before it, with the device open, and the most that were.
  bs.write_file(script, [[
    local bs = require "bs"
    for _, name in ipairs { "bs.cli.finetune", "bs.model.merge", "bs.tokenizer" } do require(name) end
    bs.device.open("cpu", { threads = 1 }):close()
    local before = bs.rss()
    local recipe = table.remove(arg, 1)
    dofile(recipe)
    print(("bytes %d %d"):format(before, (select(2, bs.rss()))))]])
end)

-- The output of a recipe, the bytes of the process before it and the most that it had.
local function run(recipe, words)
  local p <close> = assert(io.popen(("%s %s recipes/%s.lua %s 2>&1"):format(bslua, script, recipe,
    table.concat(words, " "))))
  local text = p:read("a")
  local before, most = text:match("\nbytes (%d+) (%d+)\n$")
  assert.is_truthy(before, text)
  return text, tonumber(before), tonumber(most)
end

local function with(words, ...)
  local all = table.move(words, 1, #words, 1, {})
  return table.move({ ... }, 1, select("#", ...), #all + 1, all)
end

-- Budgets that the plan of such a run needs, in whole MiB.
local function needs(recipe, words)
  local text = run(recipe, with(words, "vram=512MiB", "ram=64MiB"))
  local device, host = text:match("device peak ([%d.]+) MiB, host ([%d.]+) MiB")
  assert.is_truthy(device, text)
  return math.ceil(tonumber(device)), math.max(1, math.ceil(tonumber(host)))
end

-- out: the word of where the recipe saves, which is none where only the plan is asked for.
local function holds(recipe, words, out)
  local vram, ram = needs(recipe, with(words, out and "out="))
  local text, before, most = run(recipe, with(words, ("vram=%dMiB"):format(vram), ("ram=%dMiB"):format(ram), out))
  local promised = (vram + ram) * MIB + before
  assert.is_true(most <= promised, ("%s: %.1f MiB at most, %d + %d + %.1f are promised\n%s"):format(recipe, most / MIB,
    vram, ram, before / MIB, text))
end

describe("vram + ram + process hold", function()
  local model = { "model=" .. base, "threads=1", "home=disk" }

  it("a training run and the save of its adapter", function()
    holds("qwen8b_lora", with(model, "data=" .. rows, "steps=2", "r=" .. R, "step_tokens=48", "micro_tokens=48"),
      "out=" .. adapter)
  end)

  it("an evaluation with the adapter", function()
    holds("eval", with(model, "data=" .. rows, "adapter=" .. adapter, "micro_tokens=48", "pass_tokens=96"))
  end)

  it("generation with the adapter", function()
    holds("generate", with(model, "ids=5,6,7", "adapter=" .. adapter, "max_new=8"))
  end)
end)

it("a merge holds one weight with its A and B, however large the files are that it copies", function()
  local f <close> = assert(io.open(base .. "/notes.txt", "wb"))
  f:seek("set", 48 * MIB)
  f:write "x"
  f:close()
  local _, before, most = run("merge", { "model=" .. base, "adapter=" .. adapter, "out=" .. root .. "/merged",
                                         "threads=1" })
  local weight = 4 * (CHANNELS * INNER + R * (CHANNELS + INNER))
  local pieces = 4 * MIB + MIB -- of a tensor that is copied, of a weight that is merged
  assert.is_true(most <= before + weight + pieces + 4 * MIB, ("%.1f MiB at most, %.1f before"):format(most / MIB,
    before / MIB))
  local copy <close> = assert(io.open(root .. "/merged/notes.txt", "rb"))
  assert.equal(48 * MIB + 1, copy:seek "end")
end)
