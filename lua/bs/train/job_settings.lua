-- SPDX-License-Identifier: Apache-2.0
--- The settings of a job, checked.
local bs = require "bs"
local options = require "bs.settings.options"
local rates = require "bs.plan.rates"

local settings = {}

local MANY <const>, UNBOUNDED <const>, auto <const> = 1 << 20, 1 << 60, { "auto" }

--- name -> rule (see bs.settings.options).
--   model          folder of a checkpoint; family: a family's table or the path of its file, in place of the one found
--                  by its model_type
--   ignore         tensors of the checkpoint that nothing reads are refused, but those that match one of these patterns
--                  (* any text, ? a character)
--   check          "sampled", or "full": all rows of a head that is stored beside the embedding that it is tied to are
--                  compared
--   trainable      "lora"; "none"; or "base", the model's own weights: gradients anywhere, updates where home="gpu" and
--                  every tensor is stored as f32 (AdamW decays all of them alike, norms too)
--   lora           {r, alpha, targets, top_fraction or layers, rslora, dropout, rank_pattern, alpha_pattern}
--   adapter        folder of an adapter to start from; with trainable="none": used and not trained
--   vram, ram      the device pool and every accounted host byte: bytes, a share (a float) of what is free, or "auto"
--   dtype          what is computed in; auto: bf16 where the device can and the checkpoint is bf16
--   home, boundaries, dev_slots, host_slots, keep    what the plan is to keep to, or "auto"; keep: upper layers whose
--                  activations stay on the device between forward and backward instead of being computed again
--   micro_tokens, rows, micros    tokens and rows of a micro-batch (rows 0: as many as fit, up to 1024), micro-batches
--                  of a step, at most
--   knobs          the caller's settings of which less needs less memory, in words: told where budgets are refused
--   rates          what plans are scored with (see bs.plan.rates)
--   cache          {rows, tokens}: keys and values of so many rows of so many tokens are held, for decode
--   logits         walks may be asked for the logits of every token
--   stack          the layers alone, without the head (measurements): steps have no loss
--   group          experts of a block (tests)
--   dry            the device may be meta, which counts memory and computes nothing
--   device_options, threads, io    of the device and of the reader; log: fn(line), takes what a job has to say
settings.rules = {
  model = { type = "string" },
  ignore = { type = "list" }, check = { words = { "sampled", "full" }, default = "sampled" },
  family = { type = "list", also = "a family's table or the path of its file" },
  lora = { type = "table" }, adapter = { type = "string" },
  trainable = { words = { "lora", "base", "none" }, default = "lora" },
  device = { type = "string", default = "cpu" }, device_options = { type = "table" },
  threads = { type = "integer", least = 0, most = 1024, default = 0 },
  dtype = { words = { "f32", "bf16", "auto" }, default = "f32" },
  vram = { type = "integer", least = 0, most = UNBOUNDED, share = true, words = auto, default = UNBOUNDED },
  ram = { type = "integer", least = 0, most = UNBOUNDED, share = true, words = auto, default = UNBOUNDED },
  home = { words = { "auto", "gpu", "ram", "disk" }, default = "auto" },
  boundaries = { words = { "auto", "device", "host" }, default = "auto" },
  dev_slots = { type = "integer", least = 1, most = MANY, words = auto, default = "auto" },
  host_slots = { type = "integer", least = 1, most = MANY, words = auto, default = "auto" },
  keep = { type = "integer", least = 0, most = MANY, words = auto, default = "auto" },
  micro_tokens = { type = "integer", least = 2, most = MANY, default = 512 },
  micros = { type = "integer", least = 1, most = MANY, default = 1 },
  rows = { type = "integer", least = 0, most = MANY, default = 0 },
  seed = { type = "integer", least = math.mininteger, most = math.maxinteger, default = 1 },
  group = { type = "integer", least = 1, most = MANY },
  knobs = { type = "table", default = { "micro_tokens=", "micros=" } },
  cache = { type = "table" }, io = { type = "table" }, rates = { type = "any" }, log = { type = "function" },
  logits = { type = "boolean" }, stack = { type = "boolean" }, dry = { type = "boolean" },
}

local cache_rules = {
  rows = { type = "integer", least = 1, most = MANY, required = true },
  tokens = { type = "integer", least = 1, most = MANY, required = true },
}

--- A checked copy, defaults filled in. What cannot be ends the script with status 2.
function settings.read(given)
  local cfg = options.read("job: ", given, settings.rules)
  rates.check(cfg.rates)
  if not cfg.model then bs.fail("usage", "model= must name a checkpoint folder") end
  if cfg.cache then cfg.cache = options.read("cache: ", cfg.cache, cache_rules) end
  if cfg.stack and (cfg.trainable == "base" or cfg.cache) then
    bs.fail("usage", "stack=true: the layers alone have no loss to train the whole model with and no logits to "
      .. "generate from; lora or none without cache= is expected")
  end
  if cfg.rows == 0 then cfg.rows = math.min(cfg.micro_tokens, 1024) end
  if cfg.rows > cfg.micro_tokens then
    bs.fail("usage", "rows=%d; as many as micro_tokens=%d at most are expected", cfg.rows, cfg.micro_tokens)
  end
  return cfg
end

return settings
