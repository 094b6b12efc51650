-- SPDX-License-Identifier: Apache-2.0
--- LoRA finetuning of a model that need not fit: its checkpoint is opened in place and streamed block by block.
--
--   bslua recipes/qwen8b_lora.lua model=DIR data=FILE.jsonl [valid=FILE.jsonl] [key=value ...]
--   bslua recipes/qwen8b_lora.lua help
--
-- A data row is {"input_ids": [...], "labels": [...]}; a label of -100 is not trained.
local bs = require "bs"
local args = require "bs.args"
local data = require "bs.data"
local job = require "bs.job"
local plan = require "bs.plan"
local run = require "bs.run"

local cfg, given = args.parse(arg, {
  model = { "", "folder of a Hugging Face checkpoint (config.json, *.safetensors)" },
  data = { "", "training rows, JSON lines" },
  valid = { "", "held-out rows: evaluated before, during and after training" },
  out = { "adapter", "folder for the PEFT adapter; empty: nothing is saved" },
  adapter = { "", "train on from this saved adapter: its rank, scale, dropout and targets, a fresh optimizer" },
  device = { "cpu", "cpu or cuda, or check:cpu, check:cuda to find races" },
  dtype = { "auto", "what is computed in; auto: bf16 where device and checkpoint are", { "auto", "f32", "bf16" } },
  vram = { "auto", "bytes of the device pool: 6GB, 800MiB, auto" },
  ram = { "auto", "bytes of host memory for staging, homes and boundaries: 16GB, auto" },
  home = { "auto", "where blocks live between visits", { "auto", "gpu", "ram", "disk" } },
  steps = { 60, "optimizer steps", 1 },
  step_tokens = { 2048, "tokens of an optimizer step", 2 },
  micro_tokens = { 512, "tokens of a micro-batch at most; longer rows are dropped and counted", 2, 1 << 20 },
  lr = { 2e-4, "learning rate", 0, 1e3 },
  weight_decay = { 0.0, "decoupled weight decay", 0, 1e3 },
  clip = { 1.0, "bound of the gradient's global norm; 0: off", 0 },
  r = { 16, "rank of the adapters", 1 },
  alpha = { 32.0, "the adapters' scale is alpha/r" },
  rslora = { false, "scale alpha/sqrt(r) instead" },
  dropout = { 0.0, "dropout of the adapters' input", 0, 0.99 },
  targets = { { "all" }, "all, or names: q_proj,v_proj; or groups of the family: attention,mlp" },
  top_fraction = { 1.0, "adapters on this upper part of the layers only" },
  seed = { 1, "of initialisation, dropout and data order" },
  eval_every = { 0, "evaluate every so many steps; 0: before and after only", 0 },
  max_refused = { 0.05, "largest share of rows that may be unusable", 0, 1 },
  threads = { 0, "compute threads; 0: all cores", 0, 1024 },
})

local function say(fmt, ...)
  io.stdout:write(fmt:format(...), "\n")
  io.stdout:flush()
end

if cfg.model == "" or cfg.data == "" then bs.fail(2, "model=DIR and data=FILE.jsonl are required (try: help)") end
if cfg.out ~= "" then
  local ok, message = pcall(bs.check_folder, cfg.out)
  if not ok then bs.fail(1, "out=%s: %s", cfg.out, message) end
end
for _, name in ipairs { "r", "alpha", "rslora", "dropout", "targets", "top_fraction" } do
  if cfg.adapter ~= "" and given[name] then
    bs.fail(2, "%s= is given with adapter=%s, which has its own; one of them is expected", name, cfg.adapter)
  end
end
for _, name in ipairs { "data", "valid" } do
  -- Rows are read again when a step needs them, so a pipe will not do.
  if cfg[name] ~= "" and not bs.is_file(cfg[name]) then
    bs.fail(1, "%s=%s: there is no such file", name, cfg[name])
  end
end

-- A budget: a size, or a share of the free memory when it is left to us.
local function budget(name, share)
  if cfg[name] == "auto" then return math.floor(bs.memory_available() * share) end
  local bytes = args.size(cfg[name])
  if not bytes or bytes < 0 then bs.fail(2, "%s=%s: a size such as 800MiB, or auto, is expected", name, cfg[name]) end
  return bytes
end

local process = bs.rss()
local micros = math.max(1, math.ceil(cfg.step_tokens / cfg.micro_tokens))
local j <close> = job.new {
  model = cfg.model, device = cfg.device, dtype = cfg.dtype, home = cfg.home,
  micro_tokens = cfg.micro_tokens, micros = micros,
  vram = budget("vram", 0.5), ram = budget("ram", 0.25),
  seed = cfg.seed, threads = cfg.threads, adapter = cfg.adapter ~= "" and cfg.adapter or nil,
  lora = cfg.adapter == "" and {
    r = cfg.r, alpha = cfg.alpha, rslora = cfg.rslora, dropout = cfg.dropout, targets = cfg.targets,
    top_fraction = cfg.top_fraction,
  } or nil,
}
local m = j.model

local function open_rows(path)
  local d, message, code = data.open(path, {
    decode = bs.json.decode, vocab = m.config.vocab, micro_tokens = cfg.micro_tokens,
    step_tokens = cfg.step_tokens, micros = micros, rows = j.cfg.rows, seed = cfg.seed,
    max_refused = cfg.max_refused,
  })
  if not d then bs.fail(code, "%s", message) end
  say("%s: %s", path, d:describe())
  return d
end

local trained = 0
for _, a in ipairs(j.adapters) do trained = trained + a.r * (a.inn + a.out) end
say("%s: %d layers of %d channels, %s of weights; %d adapters, %.2f M trained parameters; computes in %s",
  cfg.model, m.config.layers, m.config.channels, plan.mib(j:weight_bytes()), #j.adapters, trained / 1e6,
  m.compute)
say("plan: %s", plan.describe(j, j.choice))
local rows = open_rows(cfg.data)
local valid = cfg.valid ~= "" and open_rows(cfg.valid) or nil
say("process: %s at the start (code, interpreter, BLAS), apart from vram= and ram=", plan.mib(process))

local result = run.train(j, {
  data = rows, valid = valid, steps = cfg.steps, lr = cfg.lr, weight_decay = cfg.weight_decay, clip = cfg.clip,
  eval_every = cfg.eval_every, out = cfg.out, say = say,
})
local _, peak = bs.rss()
say("done in %.1f s; peak resident set %s; device pool %s of vram=%s", result.seconds, plan.mib(peak),
  plan.mib(j.choice.peak), cfg.vram)
if valid then say("held-out loss %.4f -> %.4f", result.first_eval, result.last_eval) end
