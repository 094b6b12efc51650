-- SPDX-License-Identifier: Apache-2.0
--- Writes on from prompts. All prompts go through the model together: the weights are read once a token.
--
--   bslua recipes/generate.lua model=DIR [adapter=DIR] prompt="Once upon a time" [key=value ...]
--   bslua recipes/generate.lua model=DIR prompts=FILE        a prompt a line; FILE.jsonl: {"prompt": T} a line
--   bslua recipes/generate.lua model=DIR ids=1,2,3           token ids, for a model without a tokenizer
--
-- One prompt is answered as it is written; several give a JSON object a line: {"prompt", "text", "reason"}.
-- A text begins as in training (BOS where the tokenizer puts it, once). An answer ends at the ids that
-- generation_config.json, config.json and the tokenizer name, and at the end of a turn in the model's chat layout.
local bs = require "bs"
local args = require "bs.args"
local checkpoint = require "bs.model.checkpoint"
local generate = require "bs.decode.generate"
local job = require "bs.job"
local budget = require "bs.plan.budget"
local sample = require "bs.decode.sample"
local chat = require "bs.chat"
local texts = require "bs.data.texts"

local cfg = args.parse(arg, {
  model = { "", "folder of a Hugging Face checkpoint" },
  family = { "", "Lua file of a family, run in place of the one found by config.json's model_type" },
  adapter = { "", "folder of a PEFT adapter; empty: the model alone" },
  prompt = { "", "text to write on from" },
  prompts = { "", "file of prompts: one a line, or JSON lines with \"prompt\"" },
  ids = { "", "a prompt as token ids: 1,2,3; the answer is ids too" },
  layout = { "auto", "layout of chats whose end of a turn ends an answer; auto: as the model's template has it",
    { "auto", table.unpack(chat.layouts) } },
  max_new = { 64, "tokens to write at most", 1, 1 << 20 },
  temperature = { 0.0, "0: the most probable token; 1: as the model says; above: more even", 0, 100 },
  top_k = { 0, "draw among the so many most probable only; 0: all", 0 },
  top_p = { 1.0, "draw among the most probable that have this share together", 0, 1 },
  min_p = { 0.0, "draw among those with this share of the highest probability at least", 0, 1 },
  seed = { 1, "of the draws" },
  ignore = { {}, "patterns of tensors in the model's files to go on without where nothing reads them: *.bias" },
  check = { "sampled", "full: compare all rows of a head that is stored beside the embedding it is tied to",
    { "sampled", "full" } },
  device = { "cpu", "cpu or cuda, or check:cpu, check:cuda to find races" },
  dtype = { "auto", "what is computed in; auto: bf16 where device and checkpoint are", { "auto", "f32", "bf16" } },
  vram = { "auto", "bytes of the device pool: 6GB, 800MiB; 0.5 of what is free; auto" },
  ram = { "auto", "bytes of host memory for slots and homes: 16GB; 0.5 of what is free; auto" },
  home = { "auto", "where blocks live between visits", { "auto", "gpu", "ram", "disk" } },
  micro_tokens = { 512, "tokens of a prompt that are computed together", 2, 1 << 20 },
  threads = { 0, "compute threads; 0: all cores", 0, 1024 },
}, "Writes on from prompts.\n")

local MICROS <const> = 16 -- micro-batches of a walk at most; longer prompts take more walks

local note <const> = bs.note

local layout = cfg.layout ~= "auto" and cfg.layout or nil

local function open_texts()
  local t, message = texts.open(cfg.model, layout)
  if not t then bs.fail("error", "%s; without a tokenizer give ids=", message) end
  return t
end

-- ---- prompts -----------------------------------------------------------------------------------------

local function check(text, fmt, ...)
  local bad = texts.bad_byte(text)
  if bad then bs.fail("error", "%s: byte %d is not UTF-8", fmt:format(...), bad) end
  return text
end

-- The prompt of a line of JSON.
local function decode(line, path, number)
  local ok, row = pcall(bs.json.decode, line)
  if not ok or type(row) ~= "table" or type(row.prompt) ~= "string" then
    bs.fail("error", "%s:%d: a JSON object with a text 'prompt' is expected", path, number)
  end
  return row.prompt
end

local function read_prompts(path)
  local list, json, number = {}, path:match("%.jsonl?$"), 0
  local all = checkpoint.read_file(path):gsub("^\xEF\xBB\xBF", "") -- a byte order mark is no text
  for line in all:gmatch("([^\n]*)\n?") do
    number = number + 1
    if line:find("%S") then
      line = check(line, "%s:%d", path, number):gsub("\r$", "")
      list[#list + 1] = json and decode(line, path, number) or line
    end
  end
  if #list == 0 then bs.fail("error", "prompts=%s holds no prompt", path) end
  return list
end

local function read_ids(text)
  local list = {}
  for word in text:gmatch("[^,%s]+") do
    local id = math.tointeger(tonumber(word))
    if not id or id < 0 then bs.fail("usage", "ids=%s: '%s' is no token id", text, word) end
    list[#list + 1] = id
  end
  return list
end

-- Prompts (or nil), lists of ids, texts of the model (or nil).
local function prompts()
  local given = (cfg.prompt ~= "" and 1 or 0) + (cfg.prompts ~= "" and 1 or 0) + (cfg.ids ~= "" and 1 or 0)
  if given ~= 1 then bs.fail("usage", "one of prompt=, prompts= and ids= is expected (try: help)") end
  if cfg.ids ~= "" then return nil, { read_ids(cfg.ids) }, (texts.open(cfg.model, layout)) end
  local list = cfg.prompt ~= "" and { check(cfg.prompt, "prompt=") } or read_prompts(cfg.prompts)
  local ids, t = {}, open_texts()
  for i, text in ipairs(list) do
    ids[i] = t:start(text)
    if #ids[i] == 0 then bs.fail("error", "prompt %d has no token", i) end
  end
  return list, ids, t
end

-- The ids that end an answer, as a set; told. t: texts of the model; nil: what its configuration says.
local function stops(t, family_chat)
  local set, list, known = {}, {}, true
  if t then
    set, list, known = t:stops(family_chat)
  else
    for _, id in ipairs(texts.config_stops(cfg.model)) do set[id], list[#list + 1] = true, id end
  end
  for i, id in ipairs(list) do
    local piece = t and t.tokenizer:piece(id)
    list[i] = piece and ("'%s' (%d)"):format(piece, id) or tostring(id)
  end
  note("an answer ends at %s%s", #list > 0 and table.concat(list, ", ") or "max_new= tokens only: no file names an end",
    known and "" or "; no end of a chat's turn is known: layout= names one")
  return set
end

-- ---- output ------------------------------------------------------------------------------------------

-- on_token for a single prompt: text as it becomes whole characters, or ids.
local function stream_text(tokenizer)
  local stream = tokenizer and tokenizer:stream { skip_special = true }
  local first = true
  return function(_, id, reason)
    if stream then
      if reason ~= "stop" then bs.result(stream:push(id)) end
      if reason then bs.result(stream:finish() .. "\n") end
    else
      bs.result((first and "" or ",") .. tostring(id) .. (reason and "\n" or ""))
      first = false
    end
  end
end

local function text_of(tokenizer, result)
  local n = #result.ids - (result.reason == "stop" and 1 or 0)
  return tokenizer:decode(table.move(result.ids, 1, n, 1, {}), { skip_special = true })
end

-- ---- run ---------------------------------------------------------------------------------------------

if cfg.model == "" then bs.fail("usage", "model=DIR is required (try: help)") end
local asked, ids, model_texts = prompts()
local tokenizer = cfg.ids == "" and model_texts.tokenizer or nil
local total = 0
for _, list in ipairs(ids) do total = total + #list end
local micro_tokens = math.max(2, math.min(cfg.micro_tokens, math.max(total, #ids)))
local j <close> = job.new {
  model = cfg.model, family = cfg.family ~= "" and cfg.family or nil, ignore = cfg.ignore, check = cfg.check,
  trainable = "none", device = cfg.device, adapter = cfg.adapter ~= "" and cfg.adapter or nil,
  dtype = cfg.dtype, home = cfg.home, threads = cfg.threads, micro_tokens = micro_tokens,
  micros = math.min(MICROS, math.max(1, math.ceil(total / micro_tokens))), rows = math.min(#ids, micro_tokens),
  vram = budget.read(cfg, "vram"), ram = budget.read(cfg, "ram"), seed = cfg.seed,
  cache = { rows = #ids, tokens = generate.capacity(ids, cfg.max_new) },
  knobs = { "max_new=", "micro_tokens=", #ids > 1 and "number of prompts" or nil },
}
for i, list in ipairs(ids) do
  for _, id in ipairs(list) do
    local vocab = j.model.config.vocab
    if id >= vocab then bs.fail("error", "prompt %d has id %d; the model has ids 0..%d", i, id, vocab - 1) end
  end
end
note("plan: %s", j:describe())
local start = bs.now()
local results, counts = j:generate(ids, {
  max_new = cfg.max_new, stops = stops(model_texts, j.model.family.chat),
  on_token = #ids == 1 and stream_text(tokenizer) or nil,
  choose = sample.new {
    temperature = cfg.temperature, top_k = cfg.top_k, top_p = cfg.top_p, min_p = cfg.min_p, seed = cfg.seed,
  },
})
local new = 0
for i, result in ipairs(results) do
  new = new + #result.ids
  if #ids > 1 then
    bs.result(bs.json.encode { prompt = asked[i], text = text_of(tokenizer, result), reason = result.reason } .. "\n")
  end
end
local seconds = bs.now() - start
note("%d prompts of %d tokens, %d new tokens in %d walks, %.1f s (%.1f tokens/s)", #ids, total, new, counts.walks,
  seconds, new / seconds)
