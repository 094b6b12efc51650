-- SPDX-License-Identifier: Apache-2.0
--- Loss and perplexity of a model on a file of rows, with or without an adapter.
--
--   bslua recipes/eval.lua model=DIR data=FILE.jsonl [adapter=DIR] [key=value ...]
--
-- Rows are those of training (see bslua recipes/qwen8b_lora.lua help); what would be trained is what counts.
local bs = require "bs"
local args = require "bs.args"
local chat = require "bs.chat"
local data = require "bs.data"
local files = require "bs.settings.files"
local job = require "bs.job"
local nn = require "bs.nn"
local budget = require "bs.plan.budget"
local formats = require "bs.data.formats"
local loop = require "bs.train.loop"

local cfg = args.parse(arg, {
  model = { "", "folder of a Hugging Face checkpoint" },
  family = { "", "Lua file of a family, run in place of the one found by config.json's model_type" },
  data = { "", "rows, JSON lines" },
  adapter = { "", "folder of a PEFT adapter; empty: the model alone" },
  ignore = { {}, "patterns of tensors in the model's files to go on without where nothing reads them: *.bias" },
  check = { "sampled", "full: compare all rows of a head that is stored beside the embedding it is tied to",
    { "sampled", "full" } },
  device = { "cpu", "cpu or cuda, or check:cpu, check:cuda to find races" },
  dtype = { "auto", "what is computed in; auto: bf16 where device and checkpoint are", { "auto", "f32", "bf16" } },
  vram = { "auto", "bytes of the device pool: 6GB, 800MiB; 0.5 of what is free; auto" },
  ram = { "auto", "bytes of host memory for slots and homes: 16GB; 0.5 of what is free; auto" },
  home = { "auto", "where blocks live between visits", { "auto", "gpu", "ram", "disk" } },
  micro_tokens = { 512, "tokens of a micro-batch, and of a row, at most", 2, 1 << 20 },
  pass_tokens = { 8192, "tokens that are evaluated for one reading of the weights", 2, 1 << 20 },
  on_long = { "drop", "rows longer than micro_tokens: leave them out, or refuse the data", { "drop", "refuse" } },
  layout = { "auto", "of rows of messages; auto: as the model's own template has it",
    { "auto", table.unpack(chat.layouts) } },
  max_refused = { 0.05, "largest share of rows that may be unusable", 0, 1 },
  threads = { 0, "compute threads; 0: all cores", 0, 1024 },
}, "Loss and perplexity of a file.\n")
if cfg.model == "" or cfg.data == "" then bs.fail("usage", "model=DIR and data=FILE.jsonl are required (try: help)") end
files.check("data=", cfg.data)

local say <const> = bs.say

local j <close> = job.new {
  model = cfg.model, family = cfg.family ~= "" and cfg.family or nil, ignore = cfg.ignore, check = cfg.check,
  trainable = "none", device = cfg.device, adapter = cfg.adapter ~= "" and cfg.adapter or nil,
  dtype = cfg.dtype, home = cfg.home, micro_tokens = cfg.micro_tokens, threads = cfg.threads,
  micros = math.max(1, math.ceil(cfg.pass_tokens / cfg.micro_tokens)),
  vram = budget.read(cfg, "vram"), ram = budget.read(cfg, "ram"), knobs = { "pass_tokens=", "micro_tokens=" },
}
say("plan: %s", j:describe())
local lengths = nn.rope_lengths(j.model.config)
local rows, message, status = data.open(cfg.data, {
  vocab = j.model.config.vocab, text = formats.text(cfg.model, j.model.family.chat, cfg.layout),
  micro_tokens = cfg.micro_tokens, step_tokens = cfg.pass_tokens, micros = j.cfg.micros, rows = j.cfg.rows,
  max_refused = cfg.max_refused, on_long = cfg.on_long, switch = lengths.switch, positions = lengths.positions,
})
if not rows then bs.fail(status, "%s", message) end
say("%s: %s", cfg.data, rows:describe())
local start = bs.now()
local loss = loop.evaluate(j, rows)
bs.result(("loss %.4f, perplexity %.2f, in %.1f s\n"):format(loss, math.exp(loss), bs.now() - start))
