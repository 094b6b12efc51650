-- SPDX-License-Identifier: Apache-2.0
--- Settings, adapters, references and target folders that are wrong: each ends in one message with the
-- right exit status, and files that were there stay whole.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local job = require "bs.job"

local function refused(code, over, ...) broken.fails(code, { ... }, broken.train, over) end

describe("settings of a job", function()
  after_each(broken.check_usable)

  it("that do not exist are told with the nearest names", function()
    refused(2, { micro_tokns = 24 }, "unknown setting 'micro_tokns'", "did you mean micro_tokens, ")
    refused(2, { lora = { rank = 4 } }, "lora: unknown setting 'rank'", "did you mean r, ")
    local j <close> = job.new(broken.settings {})
    broken.fails(2, { "step: unknown setting 'lrr'", "did you mean lr, " }, j.step, j, { broken.micro() }, { lrr = 1 })
    broken.fails(2, { "walk: unknown setting 'mod'", "mean mode, " }, j.walk, j, { broken.micro() }, { mod = 1 })
    broken.fails(2, { "walk: mode= is missing; loss, logits, last is expected" }, j.walk, j, { broken.micro() })
    broken.fails(2, { "walk: loss is given; a table of settings" }, j.walk, j, { broken.micro() }, "loss")
  end)

  it("with values that cannot be say what is expected", function()
    local cases = {
      { { micro_tokens = 0 }, "micro_tokens=0", "an integer 2.." }, { { micros = 1.5 }, "micros=1.5" },
      { { micro_tokens = "many" }, "micro_tokens=many" }, { { vram = "6GB" }, "vram=6GB", "an integer" },
      { { ram = 1.5 }, "ram=1.5", "a fraction above 0 and up to 1", "auto" }, { { vram = 0.0 }, "vram=0.0" },
      { { home = "ssd" }, "home=ssd", "auto, gpu, ram, disk" }, { { check = "half" }, "check=half", "sampled, full" },
      { { ignore = 3 }, "ignore=3", "a list" }, { { ignore = { "" } }, "ignore=", "names of tensors" },
      { { dev_slots = 0 }, "dev_slots=0", "or auto" },
      { { boundaries = "ssd" }, "boundaries=ssd" }, { { trainable = "all" }, "trainable=all", "lora, base, none" },
      { { rows = 100 }, "rows=100", "micro_tokens=24" }, { { threads = -1 }, "threads=-1" },
      { { lora = 3 }, "lora=3", "a table" }, { { model = 3 }, "model=3", "a string" },
      { { device = "gpu" }, "device=gpu", "there are 'cpu'" }, { { device = "meta" }, "device=meta", "dry runs" },
      { { device_options = { jitter = 1 } }, "unknown option 'jitter'", "jitter_us" },
    }
    for _, case in ipairs(cases) do refused(2, table.unpack(case)) end
  end)

  it("about adapters are checked before anything is built", function()
    local cases = {
      { { r = 0 }, "r=0", "an integer >= 1" }, { { r = 2.5 }, "r=2.5" }, { { alpha = 0 }, "alpha=0", "positive" },
      { { alpha = "x" }, "alpha=x" }, { { dropout = 1 }, "dropout=1", "[0, 1)" }, { { rslora = 1 }, "rslora=1" },
      { { targets = {} }, "targets", "empty" }, { { targets = { 3 } }, "targets=3" },
      { { top_fraction = 0 }, "top_fraction=0", "(0, 1]" },
      { { layers = { 5 } }, "layers: 5 is not a layer of this model (0..4)" }, { { layers = {} }, "layers", "empty" },
      { { layers = { -1 } }, "layers: -1 is not a layer" },
      { { rank_pattern = { q_proj = 0 } }, "rank_pattern.q_proj=0" },
    }
    for _, case in ipairs(cases) do refused(2, { lora = case[1] }, table.unpack(case, 2)) end
    refused(1, { lora = { targets = { "q_prj", "v_proj" } } }, "'q_prj' matches no linear", "nearest: q_proj, ")
  end)
end)

describe("calls of a job", function()
  after_each(broken.check_usable)
  local function nothing() end

  -- Calls that a job made with `over` refuses: {text, method, its arguments ...}.
  local function refuses(over, calls)
    local j <close> = job.new(broken.settings(over))
    for _, call in ipairs(calls) do
      broken.fails(2, { call[1] }, j[call[2]], j, table.unpack(call, 3, 5))
    end
  end

  it("for training are refused where nothing is trained, those for saving where there is no adapter", function()
    local nothing_trained = { "trains nothing", "step", { broken.micro() } }
    refuses({ trainable = "none" }, {
      nothing_trained, { "trains nothing", "forward_backward", { broken.micro() } }, { "trains nothing", "gradients" },
      { "trains nothing", "run", {} }, { "has no adapter to save", "save", broken.root .. "/none" },
    })
    local adapter = broken.root .. "/frozen"
    do
      local j <close> = job.new(broken.settings {})
      j:save(adapter)
    end
    refuses({ trainable = "none", adapter = adapter }, { nothing_trained, { "trains nothing", "gradients" } })
    refuses({ trainable = "base" }, {
      { "save_base(dir) writes its weights", "save", broken.root .. "/none" },
      { "run: out=x: a job with", "run", { data = {}, steps = 1, out = "x" } },
    })
    refuses({ trainable = "lora" }, { { "save(dir) writes the adapter", "save_base", broken.root .. "/none" } })
  end)

  it("without what they need say what is expected", function()
    refuses({}, {
      { "a list of micro-batches", "step" }, { "a list of micro-batches", "step", broken.micro() },
      { "a list of micro-batches", "step", {} }, { "a list of micro-batches", "walk", {}, { mode = "last" } },
      { "a list of micro-batches", "forward_backward", {} }, { "made without cache=", "decode", { broken.micro() } },
      { 'mode="logits": the job was made without logits=true', "walk", { broken.micro() }, { mode = "logits" } },
      { "run: data= is missing", "run", { steps = 1 } }, { "run: steps= is missing", "run", { data = {} } },
      { "run: unknown setting 'step'", "run", { data = {}, steps = 1, step = 2 } }, { "save: nil is given", "save" },
      { "generate: the job was made without cache=", "generate", { { 1 } }, { max_new = 1, choose = nothing } },
      { "save: '' is given", "save", "" }, { "save_base: nil is given", "save_base" },
    })
    refuses({ cache = { rows = 1, tokens = 4 } }, {
      { "generate: choose= is missing", "generate", { { 1 } }, { max_new = 1 } },
      { "generate: max_new=0", "generate", { { 1 } }, { max_new = 0, choose = nothing } },
      { "generate: no prompts", "generate", nil, { max_new = 1, choose = nothing } },
      { "generate: 2 prompts; a list of up to 1", "generate", { { 1 }, { 2 } }, { max_new = 1, choose = nothing } },
    })
  end)

  it("after it is closed say so", function()
    local j = job.new(broken.settings {})
    j:close()
    for _, name in ipairs { "step", "walk", "decode", "forward_backward", "run", "generate", "gradients", "parameters",
                            "save", "save_base" } do
      broken.fails(2, { name .. ": the job is closed" }, j[name], j, { broken.micro() }, {})
    end
    j:close()
  end)
end)

describe("settings of a recipe", function()
  local function recipe(code, texts, ...)
    broken.run_fails(code, texts, { "recipes/qwen8b_lora.lua", "model=" .. broken.good,
                                    "data=tests/data/rows.jsonl", ... })
  end

  it("that do not exist or cannot be are usage errors", function()
    recipe(2, { "unknown setting 'mirco_tokens'", "did you mean micro_tokens, " }, "mirco_tokens=24")
    recipe(2, { "'steps' is not of the form key=value" }, "steps")
    recipe(2, { "setting 'seed' is given twice" }, "seed=1", "seed=2")
    for word, expected in pairs {
      ["steps=0"] = "at least 1", ["steps=ten"] = "an integer or a size such as 64MB or 1.5GiB",
      ["micro_tokens=0"] = "2 to 1.04858e+06",
      ["lr=-1"] = "0 to 1000", ["lr=1e999"] = "0 to 1000", ["dropout=1"] = "0 to 0.99", ["r=0"] = "1 to 65536",
      ["home=ssd"] = "one of auto, gpu, ram, disk", ["check=half"] = "one of sampled, full",
      ["max_refused=2"] = "0 to 1", ["threads=-1"] = "0 to 1024",
    } do
      recipe(2, { "setting '" .. word:match("^[^=]+") .. "': " .. expected .. " expected" }, word)
    end
    recipe(2, { "vram=lots: a size such as 800MiB" }, "vram=lots", "out=" .. broken.root .. "/none")
    recipe(2, { "device=gpu", "there are 'cpu'" }, "device=gpu", "out=" .. broken.root .. "/none")
    broken.run_fails(2, { "data=FILE.jsonl is required" }, { "recipes/qwen8b_lora.lua" })
  end)

  it("that name a folder which cannot be written end the run before it starts", function()
    broken.write(broken.root .. "/file", "")
    for _, out in ipairs { broken.root .. "/file", broken.root .. "/file/below", "/proc/none/adapter" } do
      recipe(1, { "out=" .. out }, "out=" .. out)
    end
  end)
end)

describe("a folder that is checked", function()
  it("is there afterwards if it was before, and not else", function()
    local dir = broken.root .. "/checked"
    bs.check_folder(dir)
    assert.is_nil((bs.list_folder(dir)))
    bs.mkdir(dir)
    bs.check_folder(dir)
    assert.same({}, bs.list_folder(dir))
  end)
end)

describe("an adapter", function()
  after_each(broken.check_usable)
  local good = broken.root .. "/adapter"
  local UP <const> = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"

  setup(function()
    local j <close> = job.new(broken.settings {})
    j:save(good)
  end)

  local function with(change) return broken.adapter(good, change) end

  local function with_tensors(fn)
    return with(function(dir) broken.change_tensors(dir .. "/adapter_model.safetensors", fn) end)
  end

  it("that is right is read", function() broken.train { adapter = with {} } end)

  it("with options that are not supported names them", function()
    local CONFIG <const> = "adapter-case/adapter_config.json"
    for key, value in pairs {
      use_dora = true, bias = "all", modules_to_save = { "lm_head" }, fan_in_fan_out = true,
      layer_replication = { { 0, 1 } }, lora_bias = true, trainable_token_indices = { 1 },
    } do
      refused(1, { adapter = with { [key] = value } }, CONFIG, "'" .. key .. "' = ", "is not supported")
    end
    refused(1, { adapter = with { peft_type = "IA3" } }, CONFIG, "'IA3'", "only LORA")
    refused(1, { adapter = with { r = bs.json.null } }, CONFIG, "'r' is missing")
    refused(1, { adapter = with { r = 2.5 } }, CONFIG, "r=2.5")
    refused(1, { adapter = with { lora_alpha = "x" } }, CONFIG, "alpha=x")
    refused(1, { adapter = with { lora_dropout = 1.5 } }, CONFIG, "dropout=1.5")
    refused(1, { adapter = with { use_rslora = "yes" } }, CONFIG, "rslora=yes")
    refused(1, { adapter = with { rank_pattern = { q_proj = 0 } } }, CONFIG, "rank_pattern.q_proj=0")
  end)

  it("of another model or shape is refused", function()
    local FILE <const> = "adapter-case/adapter_model.safetensors"
    refused(1, { adapter = "tests/data/llama/adapter" }, "llama/adapter/adapter_model.safetensors",
      "'model.layers.0.self_attn.q_proj' has A [8, 64]", "need A [8, 32]")
    refused(1, { adapter = with_tensors(function(a) a["h.0.attn.lora_A.weight"] = a[UP] end) }, FILE,
      "'h.0.attn.lora_A.weight' belongs to no linear", "another model")
    refused(1, { adapter = with { r = 8 } }, FILE, "r=8 need A [8, 32]")
    refused(1, { adapter = with_tensors(function(a) a[UP] = bs.array.new("f32", { 4, 31 }) end) }, FILE,
      "up_proj' has A [4, 31]")
    refused(1, { adapter = with_tensors(function(a) a[UP] = nil end) }, FILE, "only one of lora_A and lora_B")
    refused(1, { adapter = with_tensors(function(a) a[UP] = bs.array.new("i32", { 4, 32 }) end) }, FILE,
      "stored as i32")
    refused(1, { adapter = with_tensors(function(a)
      for name in pairs(a) do a[name] = nil end
    end) }, FILE, "no adapter for this model")
  end)

  it("whose files are missing or damaged is refused", function()
    refused(1, { adapter = broken.root .. "/nowhere" }, "nowhere/adapter_config.json", "No such file")
    refused(1, { adapter = with(function(dir) os.remove(dir .. "/adapter_model.safetensors") end) },
      "adapter_model.safetensors", "No such file")
    refused(1, { adapter = with(function(dir)
      local path = dir .. "/adapter_model.safetensors"
      broken.write(path, broken.read(path):sub(1, -9))
    end) }, "adapter_model.safetensors", "truncated")
    refused(1, { adapter = with(function(dir) broken.write(dir .. "/adapter_config.json", "<html>") end) },
      "adapter_config.json is not JSON")
  end)

  -- RLIMIT_FSIZE stands for a full disk: the same writes fail, at a byte that can be chosen.
  it("that cannot be saved leaves the old one whole", function()
    local out = broken.root .. "/saved"
    local words = { "recipes/qwen8b_lora.lua", "model=" .. broken.good, "data=tests/data/rows.jsonl", "steps=1",
                    "step_tokens=48", "micro_tokens=40", "r=4", "home=disk", "lr=1e-2", "out=" .. out }
    assert.equal(0, (broken.run(words)))
    local config, weights = out .. "/adapter_config.json", out .. "/adapter_model.safetensors"
    local before = { broken.read(config), broken.read(weights) }
    words[#words + 1] = "seed=2"
    for _, blocks in ipairs { 0, 1, 16, 40 } do
      broken.run_fails(1, { "saved/adapter_", "cannot be written", "File too large" }, words,
        "ulimit -f " .. blocks .. ";")
      assert.same(before, { broken.read(config), broken.read(weights) })
      local left <close> = assert(io.popen("ls '" .. out .. "' | wc -l"))
      assert.equal(2, left:read("n"))
    end
    assert.equal(0, (broken.run(words)))
    assert.is_true(before[2] ~= broken.read(weights))
  end)
end)

describe("parity", function()
  local dir = broken.root .. "/parity"
  local words

  before_each(function()
    os.execute(("rm -rf '%s' && cp -r tests/data/llama '%s'"):format(dir, dir))
    words = { "recipes/parity.lua", "model=" .. dir, "reference=" .. dir .. "/reference.safetensors", "home=disk" }
  end)

  -- The reference with fn(arrays) applied.
  local function change(fn) broken.change_tensors(dir .. "/reference.safetensors", fn) end

  it("refuses what it cannot compute with as a usage error", function()
    broken.run_fails(2, { "model=DIR and reference=FILE are required" }, { "recipes/parity.lua" })
    words[5] = "dtype=bf16"
    broken.run_fails(2, { "dtype=bf16", "cpu computes in f32" }, words)
    for _, err in ipairs { "null", "0", "-0.01", "0.5", "1e999" } do
      broken.write(dir .. "/reference.json", ('{"bf16_logits_rel_err": %s}'):format(err))
      broken.run_fails(2, { "parity/reference.json", "'bf16_logits_rel_err', above 0 and below 0.5" }, words)
    end
    os.execute(("cp tests/data/llama/reference.json '%s'"):format(dir))
    words[5] = "home=ssd"
    broken.run_fails(2, { "'home'" }, words)
    words[5] = "adapter=" .. broken.root .. "/nowhere"
    broken.run_fails(2, { "an adapter is needed", "nowhere (adapter=DIR)" }, words)
    words[5] = nil
    os.remove(dir .. "/reference.json")
    broken.run_fails(2, { "parity/reference.json is needed" }, words)
    broken.write(dir .. "/reference.json", '{"optimizer": {"lr": 1}}')
    broken.run_fails(2, { "parity/reference.json", "numbers lr, betas" }, words)
    for _, numbers in ipairs { '"lr": 0, "betas": [0.9, 0.99]', '"lr": 1e-3, "betas": [0.9, 1]' } do
      broken.write(dir .. "/reference.json", ('{"optimizer": {%s, "eps": 1e-8, "weight_decay": 0}}'):format(numbers))
      broken.run_fails(2, { "parity/reference.json", "'optimizer' has lr", "are expected" }, words)
    end
  end)

  it("names the check that a corrupted reference fails", function()
    for _, name in ipairs { "hidden.2", "loss", "train.losses" } do
      change(function(a) a[name]:set(1, a[name]:get(1) + 0.01) end)
      local code, out = broken.run(words)
      assert.equal(1, code)
      assert.matches("%f[%w]" .. name:gsub("%.", "%%.") .. " [^\n]* FAIL\n", out)
      assert.matches("checks, FAILED\n$", out)
      os.execute(("cp tests/data/llama/reference.safetensors '%s'"):format(dir))
    end
  end)

  it("fails checks of another shape instead of comparing them", function()
    change(function(a) a["grad.base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = a.loss end)
    local code, out, err = broken.run(words)
    assert.same({ 1, "" }, { code, err })
    assert.matches("up_proj.lora_A.weight +inf [^\n]* FAIL\n", out)
  end)

  it("refuses a reference that holds no rows, or a mask that is no prefix", function()
    change(function(a) a.attention_mask:set(2, 0) end)
    broken.run_fails(1, { "attention_mask row 1 is not a prefix of ones" }, words)
    change(function(a)
      for t = 1, a.attention_mask:dims()[2] do a.attention_mask:set(t, 0) end
    end)
    broken.run_fails(1, { "attention_mask row 1 masks every token" }, words)
    for _, id in ipairs { -1, 320 } do
      change(function(a)
        for t = 1, a.attention_mask:dims()[2] do a.attention_mask:set(t, 1) end
        a.input_ids:set(2, id)
      end)
      broken.run_fails(1, { "'input_ids' holds " .. id, "320 tokens", "another model" }, words)
    end
    change(function(a) a.attention_mask = a.loss end)
    broken.run_fails(1, { "parity/reference.safetensors", "'attention_mask' is [1]" }, words)
    change(function(a) a.input_ids, a.attention_mask = bs.array.new("i64", { 2, 0 }), bs.array.new("i64", { 2, 0 }) end)
    broken.run_fails(1, { "'input_ids' is [2, 0]; it has no token" }, words)
    change(function(a) a.input_ids = nil end)
    broken.run_fails(1, { "parity/reference.safetensors", "'input_ids' is missing" }, words)
    words[3] = "reference=" .. dir .. "/none.safetensors"
    broken.run_fails(1, { "none.safetensors", "No such file" }, words)
  end)
end)
