-- SPDX-License-Identifier: Apache-2.0
--- adapter_config.json by PEFT's rules: which keys there are, which of them change what an adapter computes, and the
-- specification that the others make. What would compute something else than plain LoRA on the checkpoint's own weights
-- is refused by name, and so is a key that nobody here knows: it may be such a thing.
local bs = require "bs"
local files = require "bs.settings.files"
local lora = require "bs.model.lora"
local name_pattern = require "bs.model.name_pattern"
local options = require "bs.settings.options"

local adapter_config = {}

local function set(...)
  local names = {}
  for _, name in ipairs { ... } do names[name] = true end
  return names
end

-- Keys that are read, here and in adapter.lua.
local read = set("peft_type", "task_type", "init_lora_weights", "bias", "r", "lora_alpha", "lora_dropout", "use_rslora",
  "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform",
  "base_model_name_or_path")

-- Keys of PEFT and of trainers that wrote its files which say nothing about what a saved adapter computes: where it
-- comes from, and how it was initialised and trained. The settings of an initialisation (eva, corda, lora_ga) stay in
-- the file when PEFT has converted the adapter to the weights before it; init_lora_weights tells. The tensors' names
-- say which layers have adapters, so the pattern that chose them does not.
local neutral = set("auto_mapping", "revision", "inference_mode", "peft_version", "layers_pattern", "megatron_core",
  "qalora_group_size", "runtime_config", "eva_config", "corda_config", "lora_ga_config", "merge_weights", "lora_dtype",
  "lorap_lr_ratio", "lorap_emb_lr")

-- Keys that make an adapter something else than plain LoRA of linears, and what they make it.
local variants = {
  alora_invocation_tokens = "it works from these tokens on only (aLoRA)",
  arrow_config = "it chooses between adapters (Arrow)",
  enable_lora = "it is for parts of a linear's rows only",
  ensure_weight_tying = "it ties the adapters of tied layers",
  fan_in_fan_out = "its weights are stored transposed",
  kasa_config = "it changes the base model's weights (KaSA)",
  layer_replication = "it repeats layers of the model",
  loftq_config = "it is for a base model that LoftQ has quantised",
  lora_bias = "its matrices B have biases",
  megatron_config = "its linears are Megatron's",
  modules_to_save = "whole modules were trained beside it",
  monteclora_config = "it draws its weights anew (MonteCLoRA)",
  target_parameters = "it is for parameters instead of linears, as fused experts are",
  trainable_token_indices = "rows of the embedding were trained beside it",
  use_bdlora = "its matrices are block-diagonal (BD-LoRA)",
  use_dora = "its rows have trained lengths (DoRA)",
  use_qalora = "its inputs are pooled in groups (QA-LoRA)",
  velora_config = "its activations are compressed in training (VeLoRA)",
}

-- init_lora_weights: those that leave the base model as it is, and those that do not.
local keeps_base = set("gaussian", "orthogonal", "eva", "mica")
local changes_base = {
  { "^pissa", "PiSSA" }, { "^olora$", "OLoRA" }, { "^corda", "CorDA" }, { "^lora_ga$", "LoRA-GA" },
  { "^loftq$", "LoftQ" },
}

-- Tasks whose models have a head of their own, which is not this one.
local other_heads = set("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
local tasks = set("CAUSAL_LM", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")

local PLAIN <const> = "plain LoRA on the checkpoint's own weights is; merge it into its base with PEFT "
  .. "(merge_and_unload) and train from that"

-- Nothing is said by null, false, an empty list or text.
local function empty(v)
  return v == nil or v == bs.json.null or v == false or v == "" or type(v) == "table" and not next(v)
end

local function given(v, default)
  if v == nil or v == bs.json.null then return default end
  return v
end

-- A value as JSON, or nil: 1e999 and bytes that are no UTF-8 can be read, not written.
local function encoded(v)
  local fine, text = pcall(bs.json.encode, v)
  return fine and text or nil
end

local function shown(v)
  local text = encoded(v)
  if not text then return "a value that cannot be shown" end
  return #text <= 60 and text or text:sub(1, 57) .. "..."
end

local function check_init(path, init)
  if init == true or empty(init) then return end
  local kind = type(init) == "string" and init:lower() or ""
  if keeps_base[kind] then return end
  for _, known in ipairs(changes_base) do
    if kind:find(known[1]) then
      bs.fail("error", "%s: 'init_lora_weights' = %s is not supported: %s changes the weights of the base model, and "
        .. "the adapter is for the changed ones; convert it with PEFT (save_pretrained with "
        .. "path_initial_model_for_weight_conversion), or merge it into its base (merge_and_unload)", path, shown(init),
        known[2])
    end
  end
  bs.fail("error", "%s: 'init_lora_weights' = %s is unknown here and may change the weights of the base model; true, "
    .. "false, gaussian, orthogonal, eva, mica are expected", path, shown(init))
end

local function check_kind(path, config)
  if config.peft_type ~= nil and config.peft_type ~= "LORA" then
    bs.fail("error", "%s: peft_type %s; only LORA adapters are supported", path,
      type(config.peft_type) == "string" and "'" .. config.peft_type .. "'" or shown(config.peft_type))
  end
  local task = config.task_type
  if empty(task) or tasks[task] then return end
  bs.fail("error", "%s: 'task_type' = %s %s; CAUSAL_LM is expected", path, shown(task), other_heads[task]
    and "is not supported: it is an adapter of a classifier, whose head is not the language model's"
    or "is no task of PEFT")
end

local function check_target_modules(path, targets)
  local fine = empty(targets) or type(targets) == "string" or type(targets) == "table"
  for i, name in pairs(type(targets) == "table" and targets or {}) do
    fine = fine and type(i) == "number" and type(name) == "string"
  end
  if not fine then
    bs.fail("error", "%s: 'target_modules' = %s; a list of names, or an expression as a text, is expected", path,
      shown(targets))
  end
end

-- Keys in the order of their names, so that it is always the same one that is told.
local function check_keys(path, config)
  local keys = {}
  for key in pairs(config) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(keys) do
    local v = config[key]
    if variants[key] and not empty(v) then
      bs.fail("error", "%s: '%s' = %s is not supported: %s; %s", path, key, shown(v), variants[key], PLAIN)
    end
    if not (read[key] or neutral[key] or variants[key] or empty(v)) then
      bs.fail("error", "%s: '%s' = %s is unknown here and may change what the adapter computes; where it does not, set "
        .. "it to null", path, key, shown(v))
    end
  end
  if given(config.bias, "none") ~= "none" then
    bs.fail("error", "%s: 'bias' = %s is not supported: biases were trained beside it; %s", path, shown(config.bias),
      PLAIN)
  end
end

-- The keys of an object in the order of the file, which decides between several that match. bs.json.decode has no
-- order, so it is that of the keys' texts; where one is written in another spelling than ours there is none.
local function in_order(text, name, object)
  local from = select(2, text:find('"' .. name .. '"%s*:%s*{')) or #text
  local order, at = {}, {}
  for key in pairs(object) do
    local written = encoded(key)
    order[#order + 1], at[key] = key, written and text:find(written, from, true)
  end
  local known = true
  for _, key in ipairs(order) do known = known and at[key] ~= nil end
  table.sort(order, function(a, b)
    if known then return at[a] < at[b] end
    return a < b
  end)
  return order, known
end

-- The rules of rank_pattern or alpha_pattern in order: {key, value, matches = fn(full)}.
local function rules_of(path, text, name, object)
  if type(object) ~= "table" then bs.fail("error", "%s: '%s' must be an object", path, name) end
  for key in pairs(object) do
    if type(key) ~= "string" then bs.fail("error", "%s: '%s' must be an object", path, name) end
  end
  local order, known = in_order(text, name, object)
  local rules = { ordered = known }
  for i, key in ipairs(order) do
    local fine, message = pcall(options.value, "", name .. "." .. key, object[key], lora.pattern_rules[name])
    if not fine then bs.fail("error", "%s: %s", path, tostring(message)) end
    local matches, why = name_pattern.new(key)
    if not matches then
      bs.fail("error", "%s: %s has the key '%s', an expression with %s, which is not supported; names of linears can "
        .. "stand there", path, name, key, why)
    end
    rules[i] = { key = key, value = object[key], matches = matches }
  end
  return rules
end

-- PEFT takes the value of the first key that matches.
local function by_rules(path, rules, full, default)
  local found
  for _, rule in ipairs(rules) do
    if rule.matches(full) then
      if rules.ordered then return rule.value end
      if found and found.value ~= rule.value then
        bs.fail("error", "%s: '%s' matches two patterns with different values, '%s' and '%s'; one is expected", path,
          full, found.key, rule.key)
      end
      found = found or rule
    end
  end
  return found and found.value or default
end

-- The specification that a config describes; its numbers are checked.
local function spec_of(path, config)
  for _, key in ipairs { "r", "lora_alpha" } do
    if given(config[key]) == nil then bs.fail("error", "%s: '%s' is missing", path, key) end
  end
  local ok, spec = pcall(lora.spec, {
    rslora = given(config.use_rslora, false), r = config.r, alpha = config.lora_alpha,
    dropout = given(config.lora_dropout, 0),
  })
  if not ok then bs.fail("error", "%s: %s", path, tostring(spec)) end
  return spec
end

--- Read a file. Returns its table, the specification (of lora.spec) that it makes, and fn(linear) -> rank, alpha.
function adapter_config.read(path)
  local config, text = files.json(path)
  check_kind(path, config)
  check_keys(path, config)
  check_init(path, config.init_lora_weights)
  check_target_modules(path, config.target_modules)
  local spec = spec_of(path, config)
  local ranks = rules_of(path, text, "rank_pattern", given(config.rank_pattern, {}))
  local alphas = rules_of(path, text, "alpha_pattern", given(config.alpha_pattern, {}))
  return config, spec, function(l)
    return by_rules(path, ranks, l.full, spec.r), by_rules(path, alphas, l.full, spec.alpha)
  end
end

--- Does the config say by names alone which linears have adapters? Then fn(linear) -> boolean, else nil: an expression,
-- exclusions, and layers that are not a list are left to the tensors.
function adapter_config.wraps(config)
  local targets, layers = config.target_modules, given(config.layers_to_transform)
  if type(targets) ~= "table" or targets == bs.json.null or not empty(config.exclude_modules) then return nil end
  if math.type(layers) == "integer" then layers = { layers } end
  if layers and type(layers) ~= "table" then return nil end
  if layers and not next(layers) then layers = nil end
  local chosen = set(table.unpack(layers or {}))
  return function(l)
    if layers and not chosen[l.layer] then return false end
    for _, name in ipairs(targets) do
      if lora.ends_with(l.full, name) then return true end
    end
    return false
  end
end

return adapter_config
