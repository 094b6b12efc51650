-- SPDX-License-Identifier: Apache-2.0
--- LoRA finetuning as a program: settings from key=value words, data, job, training loop, report. The recipes
-- of the models are this with a model and defaults of their own.
local bs = require "bs"
local args = require "bs.settings.args"
local chat = require "bs.data.chat"
local data = require "bs.data.loader"
local files = require "bs.settings.files"
local job = require "bs.train.job"
local budget = require "bs.plan.budget"
local formats = require "bs.data.formats"
local rope = require "bs.nn.rope"
local schedule = require "bs.train.schedule"

local finetune = {}

-- name = {default, help, bounds}; a recipe may have other defaults.
local settings = {
  model = { "", "folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json)" },
  family = { "", "Lua file of a family, run in place of the one found by config.json's model_type" },
  data = { "", "training rows, JSON lines" },
  valid = { "", "held-out rows: evaluated before, during and after training" },
  adapter = { "", "folder of an adapter to start from; it brings r, alpha, targets; rows, warm-up, moments are new" },
  out = { "adapter", "folder for the PEFT adapter; empty: nothing is saved" },
  ignore = { {}, "patterns of tensors in the model's files to go on without where nothing reads them: *.bias" },
  check = { "sampled", "full: compare all rows of a head that is stored beside the embedding it is tied to",
    { "sampled", "full" } },
  device = { "cpu", "cpu or cuda, or check:cpu, check:cuda to find races" },
  dtype = { "auto", "what is computed in; auto: bf16 where device and checkpoint are", { "auto", "f32", "bf16" } },
  vram = { "auto", "bytes of the device pool: 6GB, 800MiB; 0.5 of what is free; auto" },
  ram = { "auto", "bytes of host memory for slots, homes, boundaries: 16GB; 0.5 of what is free; auto" },
  home = { "auto", "where blocks live between visits", { "auto", "gpu", "ram", "disk" } },
  rates = { "fixed", "what placements are scored with: fixed rates, or those of this machine, measured at the start",
    { "fixed", "measure" } },
  steps = { 60, "optimizer steps", 1 },
  step_tokens = { 2048, "tokens of an optimizer step", 2 },
  micro_tokens = { 512, "tokens of a micro-batch, and of a row, at most", 2, 1 << 20 },
  on_long = { "drop", "rows longer than micro_tokens: leave them out, or refuse the data", { "drop", "refuse" } },
  layout = { "auto", "of rows of messages; auto: as the model's own template has it",
    { "auto", table.unpack(chat.layouts) } },
  max_refused = { 0.05, "largest share of rows that may be unusable", 0, 1 },
  lr = { 2e-4, "learning rate", 0, 1e3 },
  schedule = { "cosine", "of the learning rate; cosine ends at lr/10, linear at 0", schedule.kinds },
  warmup = { 0.03, "share of the steps (at least 5 of them), or from 1 on their number; 0: none", 0 },
  weight_decay = { 0.0, "decoupled weight decay", 0, 1e3 },
  clip = { 1.0, "bound of the gradient's global norm; 0: off", 0 },
  r = { 16, "rank of the adapters", 1, 1 << 16 },
  alpha = { 0.0, "the adapters' scale is alpha/r; 0: 2r", 0 },
  rslora = { false, "scale alpha/sqrt(r) instead" },
  dropout = { 0.0, "dropout of the adapters' input", 0, 0.99 },
  targets = { { "all" }, "all but experts and router; names: q_proj,v_proj; or groups of the family: attention,mlp" },
  top_fraction = { 1.0, "adapters on this upper part of the layers only" },
  seed = { 1, "of initialisation, dropout and data order" },
  eval_every = { 0, "evaluate every so many steps; 0: before and after only", 0 },
  threads = { 0, "compute threads; 0: all cores", 0, 1024 },
}

local about = [[
usage: bslua %s data=FILE.jsonl [key=value ...]

LoRA finetuning of %s, or of any model with a family (model=DIR), in less memory than its
weights take: the checkpoint is opened in place and streamed block by block.

A row of data is a JSON object, all rows of a file are of one kind:
  {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
                                       every answer and the end of its turn are trained
  {"prompt": "2+2=", "completion": "4"}                    the completion is trained
  {"text": "Once upon a time"}                             all of it is trained
  {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}         -100 is not trained

  bslua %s data=train.jsonl valid=valid.jsonl out=my-adapter
  bslua %s data=train.jsonl vram=6GB ram=16GB steps=300 r=8 targets=attention

Without model= it is looked for as %s
in $BSLUA_MODELS, then in models/. The adapter is a PEFT folder. Ctrl-C ends the run after the step and saves;
twice ends it at once. SIGTERM, a closed terminal (unless under nohup) and a closed pipe do as Ctrl-C. When a step
fails, the adapter of the steps before it is saved. Exit status: 0 done, 1 error, 2 usage, 3 the budgets are too
small (it says what would do), 4 the data is refused, 5 a loss that is not finite, 6 the saved adapter failed its
test, 130 interrupted (129 by a closed terminal, 141 by a closed pipe, 143 by SIGTERM).

Settings and their defaults:]]

local say <const> = bs.say

local function read_settings(words, recipe)
  local own = {}
  for name, s in pairs(settings) do own[name] = table.move(s, 1, #s, 1, {}) end
  for name, value in pairs(recipe.defaults or {}) do own[name][1] = value end
  local file, name = recipe.file, recipe.model
  return args.parse(words, own, about:format(file, name, file, file, name))
end

-- The folder of the recipe's model where none is given.
local function find_model(recipe)
  local places = { "models/" .. recipe.model }
  local root = os.getenv "BSLUA_MODELS"
  if root and root ~= "" then table.insert(places, 1, root .. "/" .. recipe.model) end
  for _, dir in ipairs(places) do
    if bs.is_file(dir .. "/config.json") then return dir end
  end
  bs.fail("usage", "there is no %s; give model=DIR, or download %s there (try: help)", table.concat(places, " and no "),
    recipe.hub)
end

local function check_files(cfg)
  if cfg.data == "" then bs.fail("usage", "data=FILE.jsonl is required (try: help)") end
  if cfg.out ~= "" then
    local ok, message = pcall(bs.check_folder, cfg.out)
    if not ok then bs.fail("error", "out=%s: %s", cfg.out, message) end
  end
  for _, name in ipairs { "data", "valid" } do
    -- Rows are read again when a step needs them, so a pipe will not do.
    if cfg[name] ~= "" then files.check(name .. "=", cfg[name]) end
  end
end

-- What is trained: new adapters, or those of a folder.
local function what_is_trained(cfg, given)
  if cfg.adapter == "" then
    return nil, {
      r = cfg.r, alpha = cfg.alpha > 0 and cfg.alpha or nil, rslora = cfg.rslora, dropout = cfg.dropout,
      targets = cfg.targets, top_fraction = cfg.top_fraction,
    }
  end
  for _, name in ipairs { "r", "alpha", "rslora", "dropout", "targets", "top_fraction" } do
    if given[name] then bs.fail("usage", "%s= is what the adapter in %s says; leave it out", name, cfg.adapter) end
  end
  return cfg.adapter
end

local function open_job(cfg, given)
  local adapter, lora = what_is_trained(cfg, given)
  return job.new {
    model = cfg.model, family = cfg.family ~= "" and cfg.family or nil, ignore = cfg.ignore, check = cfg.check,
    adapter = adapter, lora = lora,
    device = cfg.device, dtype = cfg.dtype, home = cfg.home,
    micro_tokens = cfg.micro_tokens, micros = math.max(1, math.ceil(cfg.step_tokens / cfg.micro_tokens)),
    vram = budget.read(cfg, "vram"), ram = budget.read(cfg, "ram"), seed = cfg.seed, threads = cfg.threads,
    rates = cfg.rates == "measure" and "measure" or nil,
    knobs = { "micro_tokens=", "step_tokens=", lora and "r=" or nil },
  }
end

local function open_rows(cfg, j, text, path)
  local lengths = rope.lengths(j.model.config)
  local d, message, status = data.open(path, {
    vocab = j.model.config.vocab, text = text, micro_tokens = cfg.micro_tokens,
    step_tokens = cfg.step_tokens, micros = j.cfg.micros, rows = j.cfg.rows, seed = cfg.seed,
    max_refused = cfg.max_refused, on_long = cfg.on_long, switch = lengths.switch, positions = lengths.positions,
  })
  if not d then bs.fail(status, "%s", message) end
  say("%s: %s", path, d:describe())
  return d
end

local function tell_job(cfg, j)
  local m, trained = j.model, 0
  for _, a in ipairs(j.spec.adapters) do trained = trained + a.r * (a.inn + a.out) end
  say("%s: %d layers of %d channels, %s of weights; %d adapters, %.2f M trained parameters", cfg.model,
    m.config.layers, m.config.channels, budget.mib(j:weight_bytes()), #j.spec.adapters, trained / 1e6)
  say("plan: %s", j:describe())
  if cfg.adapter ~= "" then
    say("adapter=%s: training starts from its values, and does not resume the run that made it: rows from the first on "
      .. "in the order of seed=%d, a new warm-up, fresh moments", cfg.adapter, cfg.seed)
  end
end

local function tell_end(cfg, j, result)
  local _, peak = bs.rss()
  local share = result.step_seconds > 0 and 100 * result.data_seconds / result.step_seconds or 0
  say("done in %.1f s, %.2f %% of the steps' time for rows; peak resident set %s; device pool %s of vram=%s",
    result.seconds, share, budget.mib(peak), budget.mib(j.plan.peak), cfg.vram)
  if result.first_eval and result.last_eval then
    say("held-out loss %.4f -> %.4f", result.first_eval, result.last_eval)
  end
  if result.interrupted and result.saved then say("to train on from here: adapter=%s", cfg.out) end
end

-- The process before the job. What a device loads (BLAS, a driver) is part of it. A device that is not there is told
-- by the job.
local function process_bytes(cfg)
  local ok, device = pcall(bs.device.open, cfg.device, { threads = cfg.threads })
  if ok then device:close() end
  return (bs.rss())
end

--- Run a recipe: {file, model = name of its folder, hub = where it comes from, defaults = {name = value}}.
-- Returns what the training loop (bs.train.loop) does.
function finetune.main(words, recipe)
  local cfg, given = read_settings(words, recipe)
  check_files(cfg)
  if cfg.model == "" then cfg.model = find_model(recipe) end
  local process = process_bytes(cfg)
  local j <close> = open_job(cfg, given)
  tell_job(cfg, j)
  local text = formats.text(cfg.model, j.model.family.chat, cfg.layout)
  local train_rows = open_rows(cfg, j, text, cfg.data)
  local valid_rows = cfg.valid ~= "" and open_rows(cfg, j, text, cfg.valid) or nil
  local preview, trained, tokens = train_rows:preview()
  say("row 1: %s", preview)
  say("  [..] is trained, %d of %d tokens", trained, tokens)
  say("lr %.3g, %s, warm-up of %d steps", cfg.lr, cfg.schedule, schedule.warmup(cfg.warmup, cfg.steps))
  say("process: %s at the start (code, interpreter, BLAS), apart from vram= and ram=", budget.mib(process))
  local result = j:run {
    data = train_rows, valid = valid_rows, steps = cfg.steps, lr = cfg.lr, schedule = cfg.schedule,
    warmup = cfg.warmup, weight_decay = cfg.weight_decay, clip = cfg.clip, eval_every = cfg.eval_every,
    out = cfg.out, say = say,
  }
  tell_end(cfg, j, result)
  return result
end

return finetune
