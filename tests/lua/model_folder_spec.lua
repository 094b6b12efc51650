-- SPDX-License-Identifier: Apache-2.0
--- Everything in a model folder is accounted for: what published folders hold passes; each file and each key of the
-- table in tests/support/model_folder.lua is read, refused, told or passed over as it says.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local create = require "bs.model.create"
local family = require "bs.model.find_family"
local folders = require "folders"
local key_rules = require "bs.model.key_rules"
local keys = require "bs.model.keys"
local models = require "family_models"
local nn = require "bs.nn"
local published = require "published"
local reads = require "bs.nn.reads"
local rows = require "model_folder"
local sources = require "sources"

local ABSENT, changed, checkpoint = folders.ABSENT, folders.changed, folders.checkpoint
local open, refuses = folders.open, folders.refuses

describe("config.json as it is published:", function()
  local names = {}
  for name in pairs(published) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    it(name, function()
      local dir, want = folders.folder(), published[name].told
      create(dir, published[name][1])
      assert.equal(want and dir .. ": config.json: not read: " .. want or "", open(dir))
    end)
  end
end)

describe("architectures", function()
  it("of language models, or of none, pass", function()
    for _, list in ipairs { ABSENT, bs.json.null, bs.json.array {}, { "LlamaForCausalLM" }, { "LlamaModel" },
                            { "LlavaForConditionalGeneration" }, { "GPT2LMHeadModel" }, "LlamaForCausalLM" } do
      open(checkpoint { architectures = list })
    end
  end)

  it("of anything else are refused", function()
    for _, name in ipairs { "LlamaForSequenceClassification", "LlamaForTokenClassification", "Qwen2ForRewardModel",
                            "LlamaForQuestionAnswering", "LlamaForCausalLMEagle", "Qwen2ForProcessRewardModel" } do
      refuses(checkpoint({ architectures = { name } }), nil, "'architectures' says " .. name)
    end
    refuses(checkpoint { architectures = { 3 } }, nil, "a list of names is expected")
    refuses(checkpoint { architectures = { name = "x" } }, nil, "a list of names is expected")
    refuses(checkpoint { architectures = 3 }, nil, "a list of names is expected")
  end)
end)

local function set(words)
  local out = {}
  for word in words:gmatch "%S+" do out[word] = true end
  return out
end

local function sorted(t)
  local out = {}
  for key in pairs(t) do out[#out + 1] = key end
  table.sort(out)
  return out
end

-- What a small model of a family reads of config.json, or of its text_config.
local function read_by(kind)
  local hf = models.small[kind]
  family.find(hf).config(reads.over(hf))
  return reads.noted(hf.text_config or hf)
end

describe("of the keys of config.json", function()
  it("each is read by the families that the table says", function()
    for _, kind in ipairs(sorted(models.small)) do
      local want = {}
      for key, kinds in pairs(rows.read) do want[key] = set(kinds)[kind] end
      assert.same(sorted(want), sorted(read_by(kind)), kind)
    end
  end)

  it("each that is read elsewhere has its name there", function()
    for key, path in pairs(rows.read_elsewhere) do assert(sources.read(path):find(key, 1, true), key) end
  end)

  it("of rotary parameters each is read by the types that the table says", function()
    local some = {
      factor = 2.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 64,
      short_factor = { 1, 1, 1, 1 }, long_factor = { 2, 2, 2, 2 },
    }
    for _, kind in ipairs { "default", "linear", "llama3", "yarn", "longrope" } do
      local p, want = changed(some, { rope_type = kind }), {}
      nn.rope_config({ rope_scaling = p }, 8)
      for key, kinds in pairs(rows.rope) do want[key] = set(kinds)[kind] end
      local noted = reads.noted(p)
      noted.type, want.type = nil, nil -- read where it is not contradicted
      assert.same(sorted(want), sorted(noted), kind)
    end
  end)

  -- A llama model, or one of another family, with keys in its config.json: the message, or nil, and what is told.
  local function account(kind, over)
    local m = { dir = "d", family = family.find(models.small[kind]), checkpoint = { config = over } }
    m.config = m.family.config(reads.over(over))
    local ok, err
    local text = folders.told(function() ok, err = pcall(keys.check, m) end)
    return not ok and tostring(err) or nil, text
  end
  local plain = folders.config { max_position_embeddings = 4096 }
  local function llama(key, value) return account("llama", changed(plain, { [key] = value })) end

  it("those that some family computes with are refused where they are not read", function()
    for key in pairs(key_rules.computed) do
      for _, kind in ipairs(sorted(models.small)) do
        local hf = models.small[kind]
        local text = changed(hf.text_config or hf, { [key] = "other" })
        if not rows.values[key] and not read_by(kind)[key] and not set(rows.no_effect[key] or "")[kind] then
          local err = account(kind, hf.text_config and changed(hf, { text_config = text }) or text)
          assert(err and err:find(key .. "' (other)", 1, true), kind .. " takes " .. key .. ": " .. tostring(err))
        end
      end
      for _, value in ipairs { bs.json.null, false, "", {} } do
        local rule = key_rules.computed[key]
        if not (type(rule) == "table" and rule.strict or read_by("llama")[key]) then
          assert.is_nil((llama(key, value)), key)
        end
      end
    end
  end)

  it("a value that does nothing passes, any other is refused", function()
    for key, values in pairs(rows.values) do
      if not read_by("llama")[key] then
        for _, value in ipairs(values[1]) do assert.is_nil((llama(key, value)), key) end
        for _, value in ipairs(values[2]) do
          local err = llama(key, value)
          assert(err and err:find("does not compute with '" .. key, 1, true), key .. ": " .. tostring(err))
        end
      end
    end
  end)

  it("those whose names are alike are refused, too", function()
    for _, key in ipairs { "some_multiplier", "mup_anything", "rope_flavour", "score_softcap", "new_alibi" } do
      assert(llama(key, 2):find(key, 1, true))
      assert.is_nil((llama(key, 1)))
    end
  end)

  it("a flag of tensors that a family always has says nothing new", function()
    assert.is_nil((account("qwen2", changed(models.small.qwen2, { qkv_bias = true }))))
    assert.is_truthy((account("qwen2", changed(models.small.qwen2, { mlp_bias = true }))))
    assert.is_nil((account("qwen3", changed(models.small.qwen3, { use_qk_norm = true }))))
    assert.is_truthy((llama("use_qk_norm", true)))
  end)

  it("inside rotary parameters they are held to the same", function()
    local function rope(p) return llama("rope_scaling", p) end
    assert(rope { rope_type = "default", factor = 8.0 }:find("'rope_scaling.factor' (8.0)", 1, true))
    assert.is_nil((rope { rope_type = "default", factor = 1.0, original_max_position_embeddings = 4 }))
    assert(rope { rope_type = "linear", factor = 2.0, mscale = 0.7 }:find("rope_scaling.mscale", 1, true))
    assert(rope { type = "linear", factor = 2.0, mrope_section = { 1, 1, 2 } }:find("mrope_section", 1, true))
    local err, text = rope { type = "yarn", factor = 4.0, original_max_position_embeddings = 64, finetuned = true }
    assert.is_nil(err)
    assert.equal("d: config.json: not read: rope_scaling.finetuned", text)
  end)

  it("quiet ones pass without a word, all others are told", function()
    for key in pairs(key_rules.quiet) do
      if not read_by("llama")[key] then
        local err, text = llama(key, "x")
        assert.is_nil(err)
        assert.equal("", text)
      end
    end
    local _, text = llama("attention_dropout", 0.1)
    assert.equal("d: config.json: not read: attention_dropout", text)
    assert.equal("", select(2, llama("attention_dropout", 0.0)))
    assert.equal("", select(2, llama("anything", false)))
  end)
end)

describe("config.json that says a thing twice", function()
  it("must say it alike", function()
    local plain = { rope_scaling = ABSENT, rope_parameters = ABSENT }
    local function twice(over) return checkpoint(over, nil, plain) end
    refuses(twice { rope_theta = 1e4, rope_scaling = { rope_type = "default", rope_theta = 1e6 } }, nil,
      "'rope_theta' is 1000000 in rope_scaling and 10000 in config.json itself")
    refuses(twice {
      rope_scaling = { rope_type = "linear", factor = 2.0 }, rope_parameters = { rope_type = "linear", factor = 4.0 },
    }, nil, "'factor' is 2 in rope_scaling and 4 in rope_parameters")
    open(checkpoint { rope_theta = 1e6, rope_scaling = bs.json.null, rope_parameters = { rope_theta = 1000000 } })
  end)
end)

describe("of the files", function()
  it("each is read where the table says, and nowhere else", function()
    local read = {}
    for _, path in ipairs(sources.find("lua src recipes", "lua c")) do
      for name in sources.read(path):gmatch '"/?([%w_.]+%.%l+)"' do
        local kind = name:match "[^.]*$"
        local names = kind == "json" or kind == "jinja" or name == "model.safetensors"
        -- side_files.lua copies them by name and looks into none.
        if names and not name:find "^bs%." and not path:find "side_files%.lua$" then
          local where = path:match "^(.*)/"
          assert(rows.elsewhere[name] or set(rows.files[name] or "")[where], path .. " reads " .. name)
          read[name] = true
        end
      end
    end
    for name in pairs(rows.files) do assert(read[name], "nothing reads " .. name) end
    for name, where in pairs(rows.file_keys) do
      for key, path in pairs(where) do
        assert(not path or sources.read(path):find(key, 1, true), name .. ": " .. key)
      end
    end
  end)

  it("each that looks like weights is told, and no other", function()
    local dir, names = checkpoint(), {}
    for _, row in ipairs(rows.weights) do
      if row[2] == "told" then
        bs.write_file(dir .. "/" .. row[1], "x")
        names[#names + 1] = row[1]
      end
    end
    for _, name in ipairs(rows.passed_over) do bs.write_file(dir .. "/" .. name, "x") end
    table.sort(names)
    assert.equal(("%s: weights that are not read: '%s', '%s', '%s' and %d more"):format(dir, names[1], names[2],
      names[3], #names - 3), open(dir))
  end)
end)
