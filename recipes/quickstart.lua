-- SPDX-License-Identifier: Apache-2.0
--- The whole path in about a minute, without a download or a GPU:
--
--   bslua recipes/quickstart.lua [key=value ...]
--   bslua recipes/quickstart.lua help
--
-- 1. A Qwen3-layout model with random weights learns the documents of this source tree, byte by byte: every
--    weight is trained (`trainable="base"`). It is saved as a Hugging Face folder with a byte tokenizer.
-- 2. LoRA teaches it to answer questions with queries, streamed from that folder under vram= and ram= that
--    are together smaller than its weights (on a GPU the pool has the workspace of its kernels besides).
-- 3. The same steps with every block resident must give the same adapter, to the byte.
-- 4. The saved adapter, loaded again, must give the same held-out loss.
--
-- Exit status 1 when 3 or 4 does not hold, or when training has lowered no loss.
local bs = require "bs"
local args = require "bs.args"
local create = require "bs.model.create"
local data = require "bs.data"
local files = require "bs.settings.files"
local job = require "bs.job"
local open_device = require "bs.instance.open_device"
local budget = require "bs.plan.budget"
local formats = require "bs.data.formats"
local sample = require "bs.decode.sample"
local schedule = require "bs.train.schedule"

local cfg, given = args.parse(arg, {
  device = { "cpu", "cpu or cuda" },
  out = { "build/quickstart", "folder for the model, the rows and the adapter" },
  base_steps = { 160, "steps that train the model itself", 1 },
  base_lr = { 2e-3, "their highest learning rate", 0, 1 },
  steps = { 140, "steps of LoRA, and of the same with every block resident", 1 },
  lr = { 1e-2, "their highest learning rate", 0, 1 },
  r = { 4, "rank of the adapters", 1 },
  vram = { 51 << 18, "device pool of the streamed run: bytes, or a size such as 12.75MiB", 1 },
  ram = { 69 << 17, "every other accounted byte of the streamed run", 1 },
  seed = { 1, "of weights, order of the data and adapters" },
  threads = { 0, "compute threads; 0: all cores", 0, 1024 },
}, "A model made, trained, finetuned from disk and checked, in about a minute: no download, no GPU.\nSettings:")

local say <const> = bs.say

local started = bs.now()
local random_dir, model_dir, adapter_dir = cfg.out .. "/random", cfg.out .. "/model", cfg.out .. "/adapter"
local train_file, valid_file = cfg.out .. "/train.jsonl", cfg.out .. "/valid.jsonl"
bs.check_folder(cfg.out)
bs.mkdir(cfg.out)
do -- the pool of a GPU also holds the workspace of its products, whatever the model
  local dev <close> = open_device { device = cfg.device }
  if not given.vram then cfg.vram = cfg.vram + dev:props().workspace_bytes end
end

-- ---- the model and its tokenizer: a token is a byte, 256 ends a text -----------------------------------

local END, END_TEXT = 256, "<|endoftext|>"

local config = {
  architectures = { "Qwen3ForCausalLM" }, model_type = "qwen3", vocab_size = 257, hidden_size = 256,
  intermediate_size = 640, num_hidden_layers = 8, num_attention_heads = 4, num_key_value_heads = 2,
  head_dim = 64, rms_norm_eps = 1e-6, rope_theta = 10000.0, hidden_act = "silu",
  max_position_embeddings = 1024, tie_word_embeddings = false, eos_token_id = END,
}

-- tokenizer.json: byte-level BPE without a merge. A byte is written as itself where it can be seen, the others
-- as the characters from 256 on.
local function write_tokenizer(dir)
  local vocab, hidden = { [END_TEXT] = END }, 0
  for b = 0, 255 do
    local seen = b >= 0x21 and b <= 0x7E or b >= 0xA1 and b ~= 0xAD
    vocab[utf8.char(seen and b or 256 + hidden)] = b
    hidden = hidden + (seen and 0 or 1)
  end
  local byte_level = { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = false }
  bs.write_file(dir .. "/tokenizer.json", bs.json.encode {
    version = "1.0", normalizer = bs.json.null, pre_tokenizer = byte_level, decoder = byte_level,
    post_processor = bs.json.null, truncation = bs.json.null, padding = bs.json.null,
    added_tokens = { {
      id = END, content = END_TEXT, special = true, single_word = false, lstrip = false, rstrip = false,
      normalized = false,
    } },
    model = { type = "BPE", vocab = vocab, merges = bs.json.array {} },
  })
  bs.write_file(dir .. "/tokenizer_config.json", bs.json.encode { eos_token = END_TEXT })
end

-- ---- 1: every weight is trained -------------------------------------------------------------------------

local ROW, ROWS = 128, 2 -- bytes of a row of text, rows of a step

-- A text that comes with the source and does not change, so that the numbers do not either.
local function document()
  local f <close> = files.open((arg[0]:match("^(.*)recipes/[^/]*$") or "") .. "LICENSE")
  return f:read("a")
end

-- A micro-batch of rows that begin at these offsets of the text.
local function text_rows(text, offsets)
  local m = { row_len = {}, ids = {} }
  for r, at in ipairs(offsets) do
    m.row_len[r] = ROW
    table.move({ text:byte(at + 1, at + ROW) }, 1, ROW, #m.ids + 1, m.ids)
  end
  m.labels = m.ids
  return { m }
end

-- The text is cut into parts of ten rows; the last row of each is held out.
local PART <const> = 10 * ROW

local function text_loss(j, text)
  local sum, n = 0, 0
  for at = PART - ROW, #text - ROW, PART do
    local loss, count = j:walk(text_rows(text, { at }), { mode = "loss" })
    sum, n = sum + loss * count, n + count
  end
  return sum / n
end

-- Rows of a step: each anywhere in a part, but not in what is held out.
local function text_step(text, step)
  local offsets = {}
  for r = 1, ROWS do
    local random = bs.hash(string.pack("<i8i8", step, r), cfg.seed)
    offsets[r] = random % (#text // PART) * PART + (random >> 32) % (PART - 2 * ROW + 1)
  end
  return text_rows(text, offsets)
end

local function train_model()
  local text, start = document(), bs.now()
  create(random_dir, config, { seed = cfg.seed })
  local j <close> = job.new {
    model = random_dir, trainable = "base", home = "gpu", micro_tokens = ROW * ROWS, device = cfg.device,
    threads = cfg.threads,
  }
  say("model     Qwen3 layout, %d layers of %d channels, %.2f M random weights, %s as f32",
    config.num_hidden_layers, config.hidden_size, j:weight_bytes() / 4e6, budget.mib(j:weight_bytes()))
  local before = text_loss(j, text)
  local rate = schedule.new { lr = cfg.base_lr, steps = cfg.base_steps, kind = "cosine", warmup = 0.1 }
  for step = 1, cfg.base_steps do
    local loss = j:step(text_step(text, step), {
      lr = rate(step), beta2 = 0.95, next = step < cfg.base_steps,
    }).loss
    if step == 1 or step % 40 == 0 then say("  step %3d/%d  loss %.3f", step, cfg.base_steps, loss) end
  end
  local after = text_loss(j, text)
  say("  trained on %d KB of the license's text in %.1f s: loss of an unseen tenth %.3f -> %.3f nats a byte",
    #text * 9 // 10000, bs.now() - start, before, after)
  j:save_base(model_dir)
  write_tokenizer(model_dir)
  say("  saved in %s: config.json, model.safetensors, tokenizer.json", model_dir)
  return j:weight_bytes(), after < before
end

-- ---- 2: questions and queries ------------------------------------------------------------------------------

local HELD_OUT, SHOWN, WRITTEN = 8, 3, 32 -- questions; those that are answered, in bytes at most
local nouns = { "layer", "block", "tensor", "expert" }
local places = { "disk", "ram", "gpu" }
local forms = {
  { "List the %ss on %s.", "SELECT %s FROM %s" },
  { "Count the %ss on %s.", "SELECT COUNT(%s) FROM %s" },
  { "Add up the %ss on %s.", "SELECT SUM(%s) FROM %s" },
  { "Average the %ss on %s.", "SELECT AVG(%s) FROM %s" },
}

-- All questions in an order of the seed's; the first ones are held out. Writes both files, returns the held-out.
local function write_rows()
  local rows, lines = {}, {}
  for _, form in ipairs(forms) do
    for _, noun in ipairs(nouns) do
      for _, place in ipairs(places) do
        rows[#rows + 1] = { prompt = "Q: " .. form[1]:format(noun, place) .. "\nA: ",
                            completion = form[2]:format(noun, place) }
      end
    end
  end
  local function key(row) return bs.hash(row.prompt, cfg.seed) end
  table.sort(rows, function(a, b) return key(a) < key(b) end)
  for i, row in ipairs(rows) do lines[i] = bs.json.encode(row) end
  bs.write_file(valid_file, table.concat(lines, "\n", 1, HELD_OUT) .. "\n")
  bs.write_file(train_file, table.concat(lines, "\n", HELD_OUT + 1) .. "\n")
  return table.move(rows, 1, HELD_OUT, 1, {})
end

local MICRO, MICROS = 128, 2 -- tokens of a micro-batch, micro-batches of a step

local function open_job(settings)
  settings.model, settings.micro_tokens, settings.micros = model_dir, MICRO, MICROS
  settings.seed, settings.device, settings.threads = cfg.seed, cfg.device, cfg.threads
  settings.lora = not settings.adapter and { r = cfg.r } or nil
  settings.knobs = { "r=" }
  return job.new(settings)
end

local function open_streamed(settings)
  settings.home, settings.vram, settings.ram = "disk", cfg.vram, cfg.ram
  return open_job(settings)
end

local function open_rows(j, path)
  local rows, message, status = data.open(path, {
    vocab = config.vocab_size, text = formats.text(model_dir), micro_tokens = MICRO,
    step_tokens = MICRO * MICROS, micros = MICROS, rows = j.cfg.rows, seed = cfg.seed,
  })
  return rows or bs.fail(status, "%s", message)
end

local function finetune(j, report)
  local rows <close> = open_rows(j, train_file)
  local rate = schedule.new { lr = cfg.lr, steps = cfg.steps, kind = "cosine", warmup = 0.1 }
  for step = 1, cfg.steps do
    local r = j:step(rows:step(step), { lr = rate(step), beta2 = 0.95, next = step < cfg.steps })
    if report then report(step, r.loss) end
  end
end

local function held_out_loss(j)
  local rows <close> = open_rows(j, valid_file)
  local sum, n = 0, 0
  for i = 1, rows:passes() do
    local loss, count = j:walk(rows:pass(i), { mode = "loss" })
    sum, n = sum + loss * count, n + count
  end
  return sum / n
end

-- What the model writes after each prompt: greedy, all prompts in one walk a token.
local function answers(j, rows)
  local prompts, out = {}, {}
  for i, row in ipairs(rows) do prompts[i] = { row.prompt:byte(1, -1) } end
  local results = j:generate(prompts, {
    max_new = WRITTEN, choose = sample.new { temperature = 0 }, stops = { [END] = true },
  })
  for i, result in ipairs(results) do
    if result.reason == "stop" then result.ids[#result.ids] = nil end
    out[i] = string.char(table.unpack(result.ids)):gsub("\n", "\\n"):gsub("[^\x20-\x7E]", "?")
  end
  return out
end

-- A hash of every byte of the adapters.
local function digest(j)
  local names, hash, adapters = {}, 0, j:parameters()
  for name in pairs(adapters) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do hash = bs.hash(adapters[name]:bytes(), hash) end
  return hash
end

local function finetune_streamed(held_out, weights)
  local start, result = bs.now(), {}
  local shown, longest = table.move(held_out, 1, SHOWN, 1, {}), 0
  for _, row in ipairs(shown) do longest = math.max(longest, #row.prompt) end
  local j <close> = open_streamed { cache = { rows = SHOWN, tokens = longest + WRITTEN } }
  say("streamed  vram=%s and ram=%s for %s of weights; LoRA of rank %d on %d linears", budget.mib(cfg.vram),
    budget.mib(cfg.ram), budget.mib(weights), cfg.r, #j.spec.adapters)
  say("  %s", j:describe())
  result.before = held_out_loss(j)
  local first = answers(j, shown)
  local read = j.instance.stream:stats().disk_read
  finetune(j, function(step, loss)
    local now = j.instance.stream:stats().disk_read
    if step == 1 or step % 25 == 0 then
      say("  step %3d/%d  loss %.3f  %.1f MB read from disk", step, cfg.steps, loss, (now - read) / 1e6)
    end
    read = now
  end)
  result.after, result.digest = held_out_loss(j), digest(j)
  local e = j.instance.engine:stats()
  say("  in %.1f s: held-out loss %.3f -> %.3f; device pool %s, of which %s were used", bs.now() - start,
    result.before, result.after, budget.mib(e.pool_bytes), budget.mib(e.peak_bytes))
  for i, text in ipairs(answers(j, shown)) do
    say("  %-28s before: %-32s after: %-29s %s", shown[i].prompt:match("^Q: (.-)\n"), first[i], text,
      text == shown[i].completion and "right" or "wrong")
  end
  j:save(adapter_dir)
  return result
end

-- ---- the run --------------------------------------------------------------------------------------------------

local failed = {}
local function check(ok, what)
  if not ok then failed[#failed + 1] = what end
  return ok and "equal" or "DIFFERENT"
end

local weights, learned = train_model()
check(learned, "training the model did not lower the loss")
local streamed = finetune_streamed(write_rows(), weights)
check(streamed.after < streamed.before, "LoRA did not lower the held-out loss")
do
  local start = bs.now()
  local j <close> = open_job { home = "gpu" }
  finetune(j)
  local resident = digest(j)
  say("resident  the same %d steps with every block in memory, in %.1f s", cfg.steps, bs.now() - start)
  say("  adapter %016x streamed, %016x resident: %s", streamed.digest, resident,
    check(resident == streamed.digest, "the streamed and the resident run give different adapters"))
end
do
  local j <close> = open_streamed { adapter = adapter_dir }
  local again = held_out_loss(j)
  say("reloaded  %s: held-out loss %.6f, %.6f when it was saved: %s", adapter_dir, again, streamed.after,
    check(again == streamed.after, "the saved adapter does not give the loss of the live one"))
end
if #failed > 0 then bs.fail("error", "quickstart: %s", table.concat(failed, "; ")) end
local _, peak = bs.rss()
say("done in %.1f s; largest resident set %s, when every weight was trained", bs.now() - started, budget.mib(peak))
