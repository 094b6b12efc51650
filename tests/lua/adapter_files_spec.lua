-- SPDX-License-Identifier: Apache-2.0
--- Adapter folders as others write them: what is plain LoRA of this model is read by PEFT's rules, everything else is
-- refused by its name.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local adapter = require "bs.model.adapter"
local broken = require "broken"
local model = require "bs.model.model"
local name_pattern = require "bs.model.name_pattern"

local null <const> = bs.json.null
local SOURCE <const> = "tests/data/llama/adapter"
local CONFIG <const>, TENSORS <const> = "adapter-case/adapter_config.json", "adapter-case/adapter_model.safetensors"
local PREFIX <const> = "base_model.model."
local Q <const> = "model.layers.0.self_attn.q_proj"

-- The adapters that are read from a changed copy, by linear.
local function read(change, from, base)
  local saved <close> = adapter.open(model.open(base or "tests/data/llama"), broken.adapter(from or SOURCE, change))
  local by_name = {}
  for _, a in ipairs(saved.list) do by_name[a.full] = a end
  return by_name
end

local function refused(change, ...) return broken.fails(1, { ... }, read, change) end

local function with_tensors(fn)
  return function(dir) broken.change_tensors(dir .. "/adapter_model.safetensors", fn) end
end

-- A second pair for q_proj of layer 0, under other names.
local function with_pair(a_name, b_name)
  return with_tensors(function(t)
    if a_name then t[a_name] = t[PREFIX .. Q .. ".lora_A.weight"] end
    if b_name then t[b_name] = t[PREFIX .. Q .. ".lora_B.weight"] end
  end)
end

-- The same adapter, q_proj of layer 0 renamed.
local function renamed(from, to)
  return with_tensors(function(t)
    local old = {}
    for name, array in pairs(t) do old[name] = array end
    for name, array in pairs(old) do t[name], t[(name:gsub(from, to))] = nil, array end
  end)
end

describe("the config of an adapter", function()
  after_each(broken.check_usable)

  it("may say how it was made, as long as that leaves the base model alone", function()
    local want = read {}
    for _, change in ipairs {
      { init_lora_weights = false }, { init_lora_weights = null }, { init_lora_weights = "gaussian" },
      { init_lora_weights = "orthogonal" }, { init_lora_weights = "mica" },
      { init_lora_weights = "eva", eva_config = { rho = 2.0, tau = 0.99, whiten = false } },
      -- as PEFT leaves them when it has converted the adapter
      { corda_config = { corda_method = "kpm", verbose = true } },
      { lora_ga_config = { direction = "ArB2r", stable_gamma = 16 } },
      { task_type = null }, { task_type = "FEATURE_EXTRACTION" }, { peft_version = "0.99.0.dev0@ab12" },
      { auto_mapping = { base_model_class = "LlamaForCausalLM", unsloth_fixed = true } }, { revision = "main" },
      { base_model_name_or_path = "someone/some-model" }, { inference_mode = false }, { layers_pattern = "layers" },
      { layers_pattern = { "layers", "h" } }, { runtime_config = { ephemeral_gpu_offload = false } },
      { merge_weights = false, enable_lora = null }, { lora_dtype = "bfloat16", lorap_emb_lr = 1e-6 },
      { target_modules = "all-linear" }, { target_modules = ".*\\.(q|v)_proj" }, { target_modules = null },
      { target_modules = { "q_proj", "query_key_value", "c_attn" } }, -- a list for many kinds of models
      { target_modules = { "q_proj", "down_proj" }, exclude_modules = { "lm_head" } },
      { some_key_of_the_future = null, another = false, a_list = bs.json.decode "[]", an_object = {}, text = "" },
      { use_dora = null, arrow_config = null, modules_to_save = bs.json.decode "[]", loftq_config = {} },
      { bias = null, lora_bias = null, target_parameters = bs.json.decode "[]" },
    } do
      assert.same(want, read(change), bs.json.encode(change))
    end
  end)

  it("is refused where the initialisation changed the base model", function()
    for init, name in pairs {
      pissa = "PiSSA", pissa_niter_16 = "PiSSA", olora = "OLoRA", OLoRA = "OLoRA", corda = "CorDA", loftq = "LoftQ",
      lora_ga = "LoRA-GA",
    } do
      refused({ init_lora_weights = init }, CONFIG, "'init_lora_weights' = \"" .. init .. '"', name,
        "path_initial_model_for_weight_conversion")
    end
    refused({ init_lora_weights = "milora" }, CONFIG, '"milora" is unknown here')
    refused({ init_lora_weights = 1 }, CONFIG, "'init_lora_weights' = 1 is unknown here")
  end)

  it("is refused where it is another method than plain LoRA", function()
    local bd = { target_modules_bd_a = null, nblocks = 2, match_strict = false }
    for key, value in pairs {
      use_dora = true, use_qalora = true, use_bdlora = bd, arrow_config = { top_k = 3, use_gks = false },
      alora_invocation_tokens = { 1, 2 }, trainable_token_indices = { 5 }, modules_to_save = { "lm_head" },
      layer_replication = { { 0, 1 } }, target_parameters = { "mlp.experts.gate_up_proj" }, lora_bias = true,
      bias = "lora_only", fan_in_fan_out = true, megatron_config = { a = 3 }, loftq_config = { loftq_bits = 4 },
      kasa_config = { beta = 1e-4 }, monteclora_config = { num_samples = 8 }, velora_config = { num_groups = 64 },
      ensure_weight_tying = true, enable_lora = { true, false, true },
    } do
      local message = refused({ [key] = value }, CONFIG, "'" .. key .. "' = ", "is not supported", "merge_and_unload")
      assert.is_nil(message:find("\n", 1, true))
    end
    refused({ peft_type = "ADALORA" }, CONFIG, "peft_type 'ADALORA'; only LORA")
    for _, task in ipairs { "SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS" } do
      refused({ task_type = task }, CONFIG, "'task_type' = \"" .. task .. '"', "classifier")
    end
    refused({ task_type = "CAUSAL" }, CONFIG, "no task of PEFT")
  end)

  it("is refused where it holds a key that nobody here knows", function()
    for _, value in ipairs { true, 0, 1, "on", { 1 }, { a = false } } do
      refused({ use_newlora = value }, CONFIG, "'use_newlora' = ", "is unknown here", "set it to null")
    end
    refused({ use_newlora = ("x"):rep(5000) }, "...")
    refused(function(dir)
      broken.write(dir .. "/adapter_config.json", '{"r": 8, "lora_alpha": 8, "use_newlora": 1e999}')
    end, CONFIG, "'use_newlora' = a value that cannot be shown is unknown here")
  end)

  it("that is of another format or says nothing about targets is refused", function()
    refused({ target_modules = 3 }, CONFIG, "'target_modules' = 3")
    refused({ target_modules = { "q_proj", 3 } }, CONFIG, "'target_modules' = ")
    refused(function(dir)
      broken.write(dir .. "/adapter_config.json", '{"fine_tune_type": "lora", "lora_parameters": {"rank": 8}}')
    end, CONFIG, "'fine_tune_type' = \"lora\" is unknown here")
  end)
end)

describe("rank_pattern and alpha_pattern", function()
  local base, folder = broken.good, broken.root .. "/ranks"

  setup(function()
    local j <close> = require("bs.job").new(broken.settings { lora = { r = 4, alpha = 8, layers = { 1 } } })
    j:save(folder)
  end)

  local function alpha_of(pattern)
    return function(dir)
      local path = dir .. "/adapter_config.json"
      broken.write(path, (broken.read(path):gsub('"alpha_pattern": *{}', function()
        return '"alpha_pattern": ' .. pattern
      end)))
    end
  end

  it("take their keys as regular expressions, and the first one that matches", function()
    for pattern, want in pairs {
      ['{"q_proj": 3}'] = { 3, 8 }, ['{"^model.layers.1.self_attn.q_proj": 3}'] = { 3, 8 },
      ['{"layers\\\\.[01]\\\\..*": 3}'] = { 3, 3 }, ['{".*(q|k)_proj": 3, "v_proj": 2}'] = { 3, 8 },
      ['{"^q_proj": 3}'] = { 8, 8 }, ['{"_proj": 3}'] = { 8, 8 }, ['{"q_proj|up_proj": 3}'] = { 3, 3 },
      ['{"self_attn.q_proj": 3, "q_proj": 4}'] = { 3, 8 }, ['{"q_proj": 4, "self_attn.q_proj": 3}'] = { 4, 8 },
    } do
      local list = read(alpha_of(pattern), folder, base)
      local got = { list["model.layers.1.self_attn.q_proj"].alpha, list["model.layers.1.mlp.up_proj"].alpha }
      assert.same(want, got, pattern)
      assert.equal(want[1] / 4, list["model.layers.1.self_attn.q_proj"].scale)
    end
  end)

  it("whose order cannot be told must not disagree", function()
    local function spelled(a, b) return alpha_of(('{"self_attn.q\\u005fproj": %d, "q_proj": %d}'):format(a, b)) end
    assert.equal(3, read(spelled(3, 3), folder, base)["model.layers.1.self_attn.q_proj"].alpha)
    assert.equal(8, read(alpha_of '{"v_\xF0roj": 4}', folder, base)["model.layers.1.self_attn.q_proj"].alpha)
    broken.fails(1, { CONFIG, "matches two patterns", "one is expected" }, read, spelled(3, 4), folder, base)
  end)

  it("are refused where a key is not understood, or a value cannot be", function()
    for key, why in pairs { ["(q"] = "a bracket", ["(?!q).*"] = "'(?'", ["(a.*)+"] = "a group that is repeated",
                            ["a.*b.*c.*d.*e.*"] = "so many quantifiers", ["q_proj$x"] = "amid a name" } do
      refused({ alpha_pattern = { [key] = 3 } }, CONFIG, "alpha_pattern has the key '" .. key .. "'", why)
    end
    refused({ alpha_pattern = { q_proj = 0 } }, CONFIG, "alpha_pattern.q_proj=0")
    refused({ rank_pattern = { 3 } }, CONFIG, "'rank_pattern' must be an object")
  end)

  it("mean what Python's expressions mean", function()
    local name = "model.layers.11.self_attn.q_proj"
    for key, want in pairs {
      ["q_proj"] = true, ["proj"] = false, ["layers.11.self_attn.q_proj"] = true, ["1.self_attn.q_proj"] = false,
      ["layers\\.1\\..*"] = false, ["layers\\.1\\d\\..*"] = true, ["layers\\.\\d{2}\\.self_attn\\.[qk]_proj"] = true,
      ["layers\\.\\d{3,}\\..*"] = false, ["(?:layers\\.(10|11)\\.)?self_attn.\\w+"] = true, ["^model.*"] = true,
      ["^layers.*"] = false, ["[^m].*_proj$"] = true, ["v_proj|.*q_.?.?.?.?.?"] = true, ["[a-p]_proj"] = false,
      ["q%w"] = false, [".+?_proj"] = true, [""] = false,
    } do
      assert.equal(want, assert(name_pattern.new(key))(name), key)
    end
  end)
end)

describe("the tensors of an adapter", function()
  after_each(broken.check_usable)

  it("that belong to no linear are refused as what they are", function()
    local pre = PREFIX .. Q
    for name, what in pairs {
      [PREFIX .. "model.embed_tokens.lora_embedding_A"] = "it is of the embedding",
      [PREFIX .. "lm_head.lora_A.weight"] = "it is of the head", [PREFIX .. "lm_head.weight"] = "it is of the head",
      [PREFIX .. "score.weight"] = "modules_to_save", [PREFIX .. "model.norm.weight"] = "modules_to_save",
      [PREFIX .. "model.layers.0.self_attn.q_proj.base_layer.bias"] = "a bias that was trained",
      [pre .. ".lora_magnitude_vector"] = "DoRA", [pre .. ".lora_B.bias"] = "lora_bias",
      [pre .. ".lora_embedding_A"] = "an embedding", [pre .. ".bias"] = "a bias that was trained",
      [pre .. ".lora_E"] = "nothing that plain LoRA has", [pre .. ".base_layer.weight"] = "a weight of the base model",
      [pre .. ".lora_A.default.weight"] = "an adapter's own name", [pre .. ".lora_A.weight.weight"] = "is expected",
      [PREFIX .. "model.layers.0.mlp.experts.lora_A.weight"] = "fused experts",
      [PREFIX .. "model.layers.0.mlp.experts.base_layer.lora_A.weight"] = "fused experts",
      [PREFIX .. "model.visual.blocks.0.attn.qkv.lora_A.weight"] = "vision tower",
      [PREFIX .. "model.layers.7.self_attn.q_proj.lora_A.weight"] = "another model",
      [PREFIX .. "model.layers.0.self_attn.r_proj.lora_A.weight"] = "another model",
      [Q .. ".lora_A.weight"] = "'" .. pre .. ".lora_A.weight' is expected",
    } do
      refused(with_pair(name), TENSORS, "tensor '" .. name .. "' belongs to no linear", what)
    end
  end)

  it("that were saved from a wrapped model say which name is expected", function()
    for _, change in ipairs {
      { "^base_model%.model%.", "base_model.model.base_model.model." }, { "q_proj", "q_proj.inner" },
      { "^base_model%.model%.model", "base_model.model._orig_mod.model" }, { "layers%.0", "layers.0._orig_mod" },
      { "^base_model%.model%.model%.", "base_model.model.model.language_model." }, { "^base", "module.base" },
      { "^base_model%.model%.model%.", "base_model.model." },
    } do
      refused(renamed(change[1], change[2]), TENSORS, "belongs to no linear by this name", "' is expected", "wrapped")
    end
  end)

  it("that the config names and that are not there make the file incomplete", function()
    refused(with_tensors(function(t)
      for name in pairs(t) do
        if name:find("layers.1.mlp.up_proj", 1, true) then t[name] = nil end
      end
    end), TENSORS, "incomplete", "names 'model.layers.1.mlp.up_proj', which is not in it")
    refused({ target_modules = { "q_proj", "lm_head" } }, TENSORS, "incomplete", "'lm_head'")
  end)

  it("may be of some layers or linears, as the config says", function()
    local only = with_tensors(function(t)
      for name in pairs(t) do
        if not name:find("layers.1.self_attn.q_proj", 1, true) then t[name] = nil end
      end
    end)
    local function and_config(change)
      return function(dir)
        only(dir)
        local path = dir .. "/adapter_config.json"
        local config = bs.json.decode(broken.read(path))
        for key, value in pairs(change) do config[key] = value end
        broken.write(path, bs.json.encode(config))
      end
    end
    for _, change in ipairs {
      { target_modules = { "q_proj" }, layers_to_transform = { 1 } },
      { target_modules = { "q_proj" }, layers_to_transform = 1, layers_pattern = "layers" },
      { target_modules = { "model.layers.1.self_attn.q_proj" } }, { target_modules = ".*1\\.self_attn\\.q_proj" },
      { target_modules = { "q_proj", "k_proj" }, exclude_modules = { "k_proj", "layers.0.self_attn.q_proj" } },
    } do
      local list = read(and_config(change))
      assert.is_truthy(list["model.layers.1.self_attn.q_proj"])
      assert.is_nil(next(list, next(list)))
    end
    refused(and_config { target_modules = { "q_proj" } }, "'model.layers.0.self_attn.q_proj', which is not in it")
  end)
end)

describe("the folder of an adapter", function()
  it("that holds another kind of file says so", function()
    local function only(...)
      local names = { ... }
      return function(dir)
        os.execute(("rm -rf '%s' && mkdir '%s'"):format(dir, dir))
        for _, name in ipairs(names) do
          if name:find("/") then bs.mkdir(dir .. "/" .. name:match("^[^/]*")) end
          local path = dir .. "/" .. name
          broken.write(path, name:find("config") and broken.read(SOURCE .. "/adapter_config.json") or "x")
        end
      end
    end
    refused(only("adapter_config.json", "adapter_model.bin"), "there is no adapter_model.safetensors",
      "adapter_model.bin is not read", "safe_serialization=True")
    refused(only("adapter_config.json", "adapters.safetensors"), "adapters.safetensors is not read")
    refused(only("adapters.safetensors"), "another format than PEFT's")
    refused(only("config.json", "model.safetensors"), "it is a model (model=), not an adapter")
    refused(only("default/adapter_config.json", "other/adapter_config.json"), "an adapter is in each", "default, other")
  end)
end)
