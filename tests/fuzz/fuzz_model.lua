-- SPDX-License-Identifier: Apache-2.0
--- Any bytes as a config.json, an adapter, or rows. Each input is taken, or ends in one line of bs.fail or of a status
-- that is not the program's fault: never a Lua error with a position, a crash, a hang, or memory beyond a bound. Run by
-- the program, best of the preset asan:
--   build/asan/bslua tests/fuzz/fuzz_model.lua target=config runs=100000 seed=1
--   build/asan/bslua tests/fuzz/fuzz_model.lua target=adapter runs=100000 seed=1
--   build/asan/bslua tests/fuzz/fuzz_model.lua target=rows runs=100000 seed=1
-- A fault ends it with the number of its input; the input is left in dir=. runs=1 first=N repeats input N.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local adapter = require "bs.model.adapter"
local args = require "bs.args"
local data = require "bs.data"
local family = require "bs.model.find_family"
local formats = require "bs.data.formats"
local lora = require "bs.model.lora"
local model = require "bs.model.model"
local models = require "family_models"
local tiny = require "tiny"

local cfg = args.parse(arg, {
  target = { "config", "what is fuzzed", { "config", "adapter", "rows" } },
  runs = { 1000, "inputs", 1 },
  first = { 1, "number of the first one", 1 },
  seed = { 1, "of the inputs" },
  dir = { "build/fuzz", "where inputs are written; a folder in memory is faster" },
  mib = { 1024, "most resident memory", 1 },
  seconds = { 20, "most processor time of an input", 1 },
}, "Any bytes as a model's files.\n")

-- ---- random choices ------------------------------------------------------------------------------------

-- Input i depends on seed and i alone.
local function begin(i) math.randomseed(cfg.seed, i) end
local function below(n) return math.random(0, n - 1) end
local function one_of(list) return list[math.random(#list)] end

local WORDS <const> = {
  "model_type", "rope_scaling", "rope_parameters", "rope_theta", "rope_type", "type", "factor", "short_factor",
  "long_factor", "original_max_position_embeddings", "max_position_embeddings", "partial_rotary_factor", "head_dim",
  "layer_types", "sliding_window", "max_window_layers", "use_sliding_window", "quantization_config", "quant_method",
  "tie_word_embeddings", "text_config", "vision_config", "architectures", "dtype", "torch_dtype", "attention_bias",
  "mlp_bias", "hidden_act", "hidden_activation", "num_experts", "eos_token_id", "beta_fast", "beta_slow", "mscale",
  "mscale_all_dim", "attention_factor", "truncate", "low_freq_factor", "high_freq_factor", "attn_logit_softcapping",
  "query_pre_attn_scalar", "num_key_value_heads", "r", "lora_alpha", "target_modules", "rank_pattern",
  "alpha_pattern", "modules_to_save", "use_rslora", "use_dora", "init_lora_weights", "layers_to_transform", "bias",
  "peft_type", "task_type", "lora_dropout", "fan_in_fan_out", "exclude_modules", "input_ids", "labels",
  "attention_mask", "messages", "role", "content", "prompt", "completion", "text", "tools", "default", "linear", "yarn",
  "llama3", "longrope", "dynamic", "all-linear", "q_proj", "user", "assistant", "system", "full_attention",
  "sliding_attention", "LORA", "\27[2J", "\u{202E}", "\n", "", "../x", "string", "bs", ".*", "%s",
}
local NUMBERS <const> = {
  0, -1, 1, 2, 3, 7, 16, 64, 0.5, -0.0, 1e-9, 1e9, 1e18, 1e300, 1e-300, 2 ^ 31, 2 ^ 32, 2 ^ 53, 2 ^ 62, 2 ^ 63, 1.5,
  255, 256, 257, 65536, 1000000007,
}

local value

local function object(depth)
  local out = {}
  for _ = 1, below(4) do out[one_of(WORDS)] = value(depth - 1) end
  return out
end

local function list(depth)
  local out, same = bs.json.array {}, below(2) == 0 and value(depth - 1) or nil
  for i = 1, below(6) do out[i] = same or value(depth - 1) end
  return out
end

function value(depth)
  local kind = below(depth > 0 and 9 or 6)
  if kind < 2 then return one_of(NUMBERS) end
  if kind == 2 then return one_of(WORDS) end
  if kind == 3 then return below(2) == 0 end
  if kind == 4 then return bs.json.null end
  if kind == 5 then return below(300) end
  return kind < 7 and object(depth) or list(depth)
end

local function keys_of(t)
  local names = {}
  for key in pairs(t) do names[#names + 1] = key end
  table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
  return names
end

-- A copy of a JSON value with something changed in it.
local function changed(v, depth)
  local out, names = setmetatable(table.move(v, 1, #v, 1, {}), getmetatable(v)), keys_of(v)
  for key, inner in pairs(v) do out[key] = inner end
  for _ = 1, 1 + below(3) do
    local key, how = #names > 0 and one_of(names) or nil, below(6)
    if how == 0 and key and #out == 0 then
      out[key] = nil
    elseif how < 3 and key and type(out[key]) == "table" and depth > 0 then
      out[key] = changed(out[key], depth - 1)
    elseif how == 3 and #out == 0 and not getmetatable(v) then
      out[one_of(WORDS)] = value(2)
    elseif key then
      out[key] = value(2)
    end
  end
  return out
end

-- Some bytes of a text changed, removed, doubled or cut off.
local function mangled(text)
  for _ = 1, 1 + below(4) do
    local at, n, how = 1 + below(#text + 1), 1 + below(8), below(6)
    local head, tail = text:sub(1, at - 1), text:sub(at)
    if how == 0 then text = head .. tail:sub(n + 1)
    elseif how == 1 then text = head .. string.char(below(256)) .. tail:sub(2)
    elseif how == 2 then text = head .. tail:sub(1, n):rep(1 + below(3)) .. tail
    elseif how == 3 then text = head .. bs.json.encode(value(1)) .. tail
    elseif how == 4 then text = head .. one_of(WORDS) .. tail
    else text = below(4) == 0 and head or text end
  end
  return text
end

local function json_text(v)
  local text = bs.json.encode(below(3) > 0 and changed(v, 3) or v)
  return below(3) == 0 and mangled(text) or text
end

-- ---- targets ---------------------------------------------------------------------------------------------

local root = cfg.dir
local targets = {}

local function read(path)
  local f <close> = assert(io.open(path, "rb"))
  return f:read "a"
end

local function write(path, text)
  local f <close> = assert(io.open(path, "wb"))
  assert(f:write(text))
end

local function small_model(kind)
  local config, dir = models.small[kind], ("%s/%s"):format(root, kind)
  tiny.checkpoint(dir, family.find(config), config, "f32")
  return dir, config
end

-- Returns a function that makes input i and tries it.
function targets.config()
  local seeds = {}
  for i, kind in ipairs(keys_of(models.small)) do
    local dir, config = small_model(kind)
    seeds[i] = { dir = dir, config = config }
  end
  return function()
    local s = one_of(seeds)
    write(s.dir .. "/config.json", json_text(s.config))
    return model.open, s.dir
  end
end

function targets.adapter()
  local dir = small_model "llama"
  local m = model.open(dir)
  local at = root .. "/adapter"
  local spec = lora.spec { r = 2 }
  local arrays, settings = {}, {
    peft_type = "LORA", r = 2, lora_alpha = 4, target_modules = { "q_proj", "v_proj" }, bias = "none",
    task_type = "CAUSAL_LM", use_rslora = false, rank_pattern = {}, alpha_pattern = {}, lora_dropout = 0.0,
  }
  for _, a in ipairs(lora.select(m, spec)) do
    if a.full:match "[qv]_proj$" then
      arrays["base_model.model." .. a.full .. ".lora_A.weight"] = tiny.tensor(a.full .. "A", { 2, a.inn }, "f32")
      arrays["base_model.model." .. a.full .. ".lora_B.weight"] = tiny.tensor(a.full .. "B", { a.out, 2 }, "f32")
    end
  end
  bs.mkdir(at)
  bs.safetensors.write(at .. "/adapter_model.safetensors", arrays, { format = "pt" })
  local weights = read(at .. "/adapter_model.safetensors")
  local n <const> = string.unpack("<i8", weights)
  local header = bs.json.decode(weights:sub(9, 8 + n))
  local function weights_text()
    local how = below(4)
    if how == 0 then return mangled(weights) end
    if how > 1 then return weights end
    local text = json_text(header)
    return string.pack("<i8", #text) .. text .. weights:sub(9 + n)
  end
  local function try()
    local saved <close> = adapter.open(m, at)
    for _, a in ipairs(saved.list) do saved:read(a.full) end
  end
  return function()
    write(at .. "/adapter_config.json", below(3) == 0 and bs.json.encode(settings) or json_text(settings))
    write(at .. "/adapter_model.safetensors", weights_text())
    return try
  end
end

function targets.rows()
  local dir, path = small_model "qwen3", root .. "/rows.jsonl"
  local special = { "<|endoftext|>", "<|im_start|>", "<|im_end|>" }
  tiny.tokenizer(dir, { special = special, eos = "<|endoftext|>" })
  local chat = require("bs.family.qwen3").chat
  local seeds = {
    { text = "Hello w\u{F6}rld \u{1F600}" }, { prompt = "2+2=", completion = "4" }, { input_ids = { 1, 2, 3, 4 } },
    { input_ids = { 1, 2, 3 }, labels = { -100, 2, 3 }, attention_mask = { 1, 1, 1 } },
    { messages = { { role = "user", content = "Hi" }, { role = "assistant", content = "Hello" } } },
    { messages = { { role = "system", content = "" }, { role = "user", content = "a" },
      { role = "assistant", content = "<|im_end|>" } } },
  }
  local function try()
    local rows <close> = data.open(path, {
      vocab = 300, micro_tokens = 32, max_refused = 1, text = formats.text(dir, chat),
    })
    if not rows then return end
    rows:describe()
    rows:step(1)
    rows:preview()
  end
  return function()
    local lines, seed = {}, one_of(seeds)
    for i = 1, 1 + below(4) do
      lines[i] = below(3) == 0 and bs.json.encode(seed) or json_text(below(4) == 0 and one_of(seeds) or seed)
    end
    write(path, table.concat(lines, one_of { "\n", "\n", "\r\n", "\n\n" }) .. (below(2) == 0 and "\n" or ""))
    return try
  end
end

-- ---- run -------------------------------------------------------------------------------------------------

-- Statuses that say that the program is right and the input wrong, or the machine too small.
local told = { format = true, io = true, unsupported = true, nomem = true }

-- What is wrong with the end of an input, or nil.
local function fault(err)
  if type(err) == "table" and err.bs_exit then err = err.message elseif not told[bs.code(err)] then
    return "not told by bs.fail"
  end
  if err:find "%.lua:%d+:" or err:find "%[C%]" then return "a position in our code" end
  if #err > 20000 then return "a message without an end" end
end

local function handler(err)
  return type(err) == "table" and err or { text = err, trace = debug.traceback(tostring(err), 2) }
end

bs.mkdir(root)
bs.log_to(function() end)
local make, taken = targets[cfg.target](), 0
for i = cfg.first, cfg.first + cfg.runs - 1 do
  begin(i)
  local try, a = make()
  local start = os.clock()
  local ok, err = xpcall(try, handler, a)
  local trace = not ok and err.trace
  local why = not ok and fault(err.trace and err.text or err)
  if os.clock() - start > cfg.seconds then why = ("%.1f s of processor time"):format(os.clock() - start) end
  local now = bs.rss()
  if now > cfg.mib << 20 then why = ("%d MiB are resident"):format(now >> 20) end
  if why then bs.fail("error", "input %d of seed %d: %s: %s", i, cfg.seed, why, trace or tostring(err)) end
  taken = taken + (ok and 1 or 0)
end
bs.say("%s: %d inputs, %d taken, the others refused in one line", cfg.target, cfg.runs, taken)
