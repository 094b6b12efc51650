-- SPDX-License-Identifier: Apache-2.0
--- Files and settings that are wrong: each ends in one message that says what, where and what to do, with
-- the right exit status, and leaves the process as it was.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local job = require "bs.job"

local UP <const> = "model.layers.1.mlp.up_proj.weight"
local FILE <const> = "case/model.safetensors"

-- A job on this checkpoint ends with status 1 and these texts.
local function refused(dir, ...) broken.fails(1, { ... }, broken.train, { model = dir }) end

describe("weights", function()
  after_each(broken.check_usable)
  local W = broken.weights

  it("that are no weights are told as what they are", function()
    refused(broken.with_weights(""), FILE, "is empty", "download it again")
    refused(broken.with_weights("<!DOCTYPE html><html>log in</html>"), FILE, "HTML page", "download it again")
    refused(broken.with_weights("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), FILE,
      "Git LFS pointer", "git lfs pull")
    refused(broken.with_weights("short"), FILE, "shorter than 8 bytes")
    refused(broken.checkpoint(function(dir) os.remove(dir .. "/model.safetensors") end), "/case:",
      "neither model.safetensors nor model.safetensors.index.json")
    refused(broken.checkpoint(function(dir)
      os.execute(("cd '%s' && rm model.safetensors && mkfifo model.safetensors"):format(dir))
    end), "neither model.safetensors nor model.safetensors.index.json")
  end)

  it("that are truncated name the file and the tensor", function()
    refused(broken.with_weights(W:sub(1, -2)), FILE, "tensor 'model.norm.weight'", "truncated", "download it again")
    refused(broken.with_weights(W:sub(1, 300)), FILE, "300 bytes", "truncated", "download it again")
    refused(broken.with_weights(W .. "x"), FILE, "damaged")
  end)

  it("whose header lies are refused before anything is believed", function()
    local n = string.unpack("<i8", W)
    refused(broken.with_weights(string.pack("<i8", n - 5) .. W:sub(9)), FILE, "not valid JSON at byte")
    refused(broken.with_weights(string.pack("<i8", 1 << 40) .. W:sub(9)), FILE, "header would be larger")
    refused(broken.with_weights(string.pack("<i8", -1) .. W:sub(9)), FILE, "header would be larger")
    refused(broken.with_header(function(h) h[UP].data_offsets[2] = h[UP].data_offsets[2] + (1 << 40) end), FILE,
      "'" .. UP .. "'", "data ends at byte")
    refused(broken.with_header(function(h)
      local o = h[UP].data_offsets
      o[1], o[2] = o[1] - 64, o[2] - 64
    end), FILE, "'" .. UP .. "'", "overlaps the tensor that ends at")
    refused(broken.with_header(function(h) h[UP].shape = { 1 << 40, 1 << 40 } end), FILE, "'" .. UP .. "'",
      "product of its dimensions overflows")
  end)

  it("that lack a tensor, or have another shape, contradict config.json", function()
    refused(broken.with_header(function(h)
      h[UP:gsub("up", "upper")], h[UP] = h[UP], nil
    end), "'" .. UP .. "' [48, 32] is missing", "config.json asks for it")
    refused(broken.with_header(function(h) h[UP].shape = { 32, 48 } end), FILE, "'" .. UP .. "' is [32, 48]",
      "config.json implies [48, 32]")
    refused(broken.with_config { hidden_size = 40 }, FILE, "config.json implies [40]")
    refused(broken.with_config { num_hidden_layers = 6 }, "'model.layers.5.", "is missing")
  end)

  it("of a dtype that is not computed with name it", function()
    for _, dtype in ipairs { "I8", "F8_E4M3", "U8" } do
      refused(broken.with_header(function(h)
        h[UP].dtype, h[UP].shape = dtype, { 48, 64 }
      end), FILE, "'" .. UP .. "'", "stored as " .. (dtype == "U8" and "u8" or dtype), "f32, bf16 and f16")
    end
    refused(broken.with_header(function(h) h[UP].dtype = "Q4_K" end), FILE, "'" .. UP .. "'", "unknown dtype 'Q4_K'",
      "known are")
  end)
end)

describe("an index", function()
  after_each(broken.check_usable)

  -- The good weights in two shards, the index changed by fn(index, folder).
  local function sharded(fn)
    return broken.checkpoint(function(dir)
      local file <close> = assert(bs.safetensors.open(dir .. "/model.safetensors"))
      local parts, map = { {}, {} }, {}
      for i, t in ipairs(file:tensors()) do
        parts[i % 2 + 1][t.name] = file:read(t.name)
        map[t.name] = ("%d.safetensors"):format(i % 2 + 1)
      end
      for i, arrays in ipairs(parts) do bs.safetensors.write(("%s/%d.safetensors"):format(dir, i), arrays) end
      os.remove(dir .. "/model.safetensors")
      local index = { weight_map = map }
      local text = fn(index, dir) or bs.json.encode(index)
      broken.write(dir .. "/model.safetensors.index.json", text)
    end)
  end
  local INDEX <const> = "case/model.safetensors.index.json"

  it("that is right is read", function() broken.train { model = sharded(function() end) } end)

  it("that names absent files lists them", function()
    refused(sharded(function(index) index.weight_map[UP] = "3.safetensors" end), INDEX,
      "names files that are not there: 3.safetensors", "download")
    refused(sharded(function(_, dir) os.remove(dir .. "/2.safetensors") end), INDEX, ": 2.safetensors;")
  end)

  it("that says a file holds a tensor which it lacks names both", function()
    local dir = sharded(function(index)
      index.weight_map[UP] = index.weight_map[UP] == "1.safetensors" and "2.safetensors" or "1.safetensors"
    end)
    refused(dir, INDEX, "'" .. UP .. "'", "does not hold it")
    refused(sharded(function(index) index.weight_map.more = "1.safetensors" end), INDEX, "'more' is in 1.safetensors")
    refused(sharded(function(index) index.weight_map[UP] = nil end), "'" .. UP .. "' [48, 32] is missing")
  end)

  it("that is no index says so", function()
    for _, value in ipairs { 3, bs.json.null, "../good/model.safetensors" } do
      refused(sharded(function(index) index.weight_map[UP] = value end), INDEX, "'" .. UP .. "'",
        "name of a file in the folder is expected")
    end
    refused(sharded(function() return "{}" end), INDEX, "'weight_map' is missing or empty")
    refused(sharded(function() return "<html>" end), INDEX, "is not JSON")
    refused(sharded(function(_, dir) broken.write(dir .. "/1.safetensors", "") end), "case/1.safetensors", "is empty")
  end)
end)

describe("config.json", function()
  after_each(broken.check_usable)

  local function text(s)
    return broken.checkpoint(function(dir) broken.write(dir .. "/config.json", s) end)
  end

  it("that is missing or not JSON says where", function()
    refused(broken.root .. "/nowhere", "nowhere: there is no config.json", "Hugging Face checkpoint folder")
    refused(broken.checkpoint(function(dir) os.remove(dir .. "/config.json") end), "there is no config.json")
    refused(text '{"model_type": "qwen3",', "case/config.json is not JSON", "line 1")
    refused(text "<html>", "case/config.json is not JSON")
    refused(text "3", "case/config.json: a JSON object is expected")
  end)

  it("of an unknown model lists those that exist", function()
    refused(broken.with_config { model_type = "mamba" }, "'mamba' has no family", "llama, qwen", "mamba.lua")
    refused(broken.with_config { model_type = "../x" }, "'../x' has no family")
    refused(broken.with_config { model_type = broken.ABSENT }, "'model_type' is missing")
    refused(text "[1, 2]", "'model_type' is missing")
  end)

  it("without a key that has no default names the key and the model", function()
    for _, key in ipairs { "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads" } do
      refused(broken.with_config { [key] = broken.ABSENT }, "'" .. key .. "' is missing", "qwen3")
      refused(broken.with_config { [key] = bs.json.null }, "'" .. key .. "' is missing", "qwen3")
    end
  end)

  it("with a number that is none is refused before it is used", function()
    for _, key in ipairs { "vocab_size", "hidden_size", "num_hidden_layers", "head_dim" } do
      for _, value in ipairs { 0, -1, 2.5, 1e300, "x", {} } do
        refused(broken.with_config { [key] = value }, "config.json: '" .. key .. "' is ", "expected")
      end
    end
    refused(broken.with_config { rms_norm_eps = "x" }, "'rms_norm_eps' is x")
    refused(broken.with_config { rms_norm_eps = -1 }, "'rms_norm_eps' is -1")
    refused(broken.with_config { tie_word_embeddings = "x" }, "'tie_word_embeddings' is x")
    refused(broken.with_config { hidden_act = "tanh" }, "'hidden_act' is tanh", "silu")
    refused(broken.with_config { head_dim = 60000 }, FILE, "config.json implies [240000, 32]")
    refused(broken.with_config { head_dim = 2000000000 }, "'head_dim' is 2000000000", "at most 65536")
  end)

  it("with rotary settings that are wrong names them", function()
    refused(broken.with_config { rope_theta = "x" }, "'rope_theta' is x")
    refused(broken.with_config { rope_theta = 0 }, "'rope_theta' is 0")
    refused(broken.with_config { rope_scaling = "linear" }, "'rope_scaling' is linear")
    refused(broken.with_config { rope_scaling = { rope_type = "spiral" } }, "'spiral' is not supported",
      "known: default")
    refused(broken.with_config { rope_scaling = { rope_type = "linear" } }, "'linear' needs the", "'factor'")
    refused(broken.with_config { rope_scaling = { rope_type = "llama3", factor = 8 } }, "'llama3' needs the",
      "'low_freq_factor'")
    refused(broken.with_config { partial_rotary_factor = 2 }, "partial_rotary_factor")
  end)
end)

describe("rows", function()
  local path = broken.root .. "/rows.jsonl"
  local good = '{"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4]}\n'

  local function recipe(code, texts, rows, ...)
    if rows then broken.write(path, rows) end
    local words = { "recipes/qwen8b_lora.lua", "model=" .. broken.good, "data=" .. path, "steps=1", "step_tokens=48",
                    "micro_tokens=24", "r=4", "home=disk", "out=" .. broken.root .. "/none", ... }
    broken.run_fails(code, texts, words)
    assert.is_false(bs.is_file(broken.root .. "/none/adapter_config.json"))
  end

  it("that are wrong are refused with file and line", function()
    recipe(4, { path .. ":2: input_ids[1] is 400; 0..399 is expected" }, good .. '{"input_ids": [1, 400]}\n')
    recipe(4, { path .. ":3: not JSON" }, good .. good .. "input_ids\n")
    recipe(4, { path .. ":2: no field 'input_ids'" }, good .. '{"text": "a"}\n')
    recipe(4, { path .. ":1: 'input_ids' is null" }, '{"input_ids": null}\n')
    recipe(4, { path .. ":1: input_ids[1] is null" }, '{"input_ids": [1, null]}\n')
    recipe(4, { path .. ":2: 3 input_ids and 2 labels" }, good .. '{"input_ids": [1, 2, 3], "labels": [1, 2]}\n')
    recipe(4, { path .. ":1: not a JSON object" }, '"row"\n')
    recipe(4, { path .. ":1: byte 2 of the line is not UTF-8" }, "\x00\xFF\x01")
    recipe(4, { path .. ":1: not JSON" }, "\x00\x01")
  end)

  it("that are all unusable are refused and counted", function()
    recipe(4, { "2 of 2 rows were dropped", "1 longer than micro_tokens=24 (" .. path .. ":2)",
                "1 without a trained token (" .. path .. ":1)", "max_refused=" },
      '{"input_ids": [1, 2], "labels": [-100, -100]}\n{"input_ids": [' .. ("1, "):rep(24) .. "1]}\n")
    recipe(4, { "no row in " .. path }, "\n\n")
    recipe(4, { "1 of 2 rows were dropped", "at most 5 %" }, good .. '{"input_ids": []}\n')
  end)

  it("that cannot be read say which file", function()
    os.remove(path)
    recipe(1, { "data=" .. path .. ": ", "No such file or directory" })
    os.execute("mkfifo '" .. path .. "'")
    recipe(1, { "data=" .. path .. ": ", "a regular file is needed" })
    os.remove(path)
    recipe(4, { "held-out.jsonl:1: not JSON" }, good, "valid=" .. broken.root .. "/held-out.jsonl",
      broken.write(broken.root .. "/held-out.jsonl", "x"))
  end)

  it("of a step given by hand leave the job as it was", function()
    local j <close> = job.new(broken.settings {})
    local want = j:step({ broken.micro() }, { apply = false }).loss
    local long = {}
    for t = 1, 25 do long[t] = t end
    local bad = {
      { "token 1 of micro-batch 0 is -1", { row_len = { 2 }, ids = { 1, -1 } } },
      { "id 400 is outside the table", { row_len = { 2 }, ids = { 1, 400 }, labels = { 1, 2 } } },
      { "label of token 1 of micro-batch 0 is -7", { row_len = { 2 }, ids = { 1, 2 }, labels = { 1, -7 } } },
      { "vocabulary has 400 entries", { row_len = { 2 }, ids = { 1, 2 }, labels = { 1, 400 } } },
      { "row 0 of micro-batch 0 has 25 tokens; it holds 1..24", { row_len = { 25 }, ids = long } },
      { "no trained token", { row_len = { 2 }, ids = { 1, 2 }, labels = { -100, -100 } } },
      { "'ids' has 2 entries, 3 expected", { row_len = { 3 }, ids = { 1, 2 } } },
    }
    for _, case in ipairs(bad) do
      local ok, err = pcall(j.step, j, { case[2] }, {})
      assert.is_false(ok)
      assert.is_truthy(tostring(err):find(case[1], 1, true), tostring(err))
      assert.equal(want, j:step({ broken.micro() }, { apply = false }).loss)
    end
    broken.fails(1, { "a step of 2 micro-batches", "planned for 1" }, j.step, j, { broken.micro(), broken.micro() })
  end)
end)
