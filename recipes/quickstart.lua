-- SPDX-License-Identifier: Apache-2.0
--- The whole path in about a minute, with no download and no GPU: makes a small model and trains it, finetunes
-- it streamed from disk under budgets smaller than the model, and proves what it claims.
--
--   bslua recipes/quickstart.lua [key=value ...]
--   bslua recipes/quickstart.lua help
--
-- 1. A Qwen3-layout model with random weights learns the documents of this source tree, byte by byte: every
--    weight is trained (`trainable="base"`). It is saved as a Hugging Face folder.
-- 2. LoRA teaches it to answer questions with queries. Every block is streamed from that folder.
-- 3. The same steps with the model resident must give the same adapter, to the byte.
-- 4. The saved adapter, loaded again, must give the same held-out loss.
local bs = require "bs"
local args = require "bs.args"
local job = require "bs.job"
local model = require "bs.model"
local plan = require "bs.plan"

local cfg = args.parse(arg, {
  out = { "build/quickstart", "folder for the model and the adapter" },
  base_steps = { 150, "steps that train the model itself" },
  base_lr = { 2e-3, "their highest learning rate" },
  steps = { 40, "steps of LoRA" },
  lr = { 4e-3, "their highest learning rate" },
  r = { 4, "rank of the adapters" },
  vram = { 12 << 20, "device pool of the streamed run, bytes or a size such as 10MiB" },
  ram = { 8 << 20, "every other accounted byte of the streamed run" },
  seed = { 1, "of weights, data order and adapters" },
  threads = { 0, "compute threads; 0: all cores" },
}, "A model made, trained, finetuned from disk and checked, in about a minute. Settings:")

local function say(fmt, ...)
  io.stdout:write(fmt:format(...), "\n")
  io.stdout:flush()
end

local started = bs.now()
local random_dir, model_dir, adapter_dir = cfg.out .. "/random", cfg.out .. "/model", cfg.out .. "/adapter"
bs.check_folder(cfg.out)
math.randomseed(cfg.seed)

-- ---- the model and its text: tokens are bytes, 256 ends a text ---------------------------------------

local END, ROW, ROWS = 256, 128, 2 -- tokens of a row of text, rows of a step

local config = {
  architectures = { "Qwen3ForCausalLM" }, model_type = "qwen3", vocab_size = 257, hidden_size = 256,
  intermediate_size = 768, num_hidden_layers = 8, num_attention_heads = 4, num_key_value_heads = 2,
  head_dim = 64, rms_norm_eps = 1e-6, rope_theta = 10000.0, hidden_act = "silu",
  max_position_embeddings = 1024, tie_word_embeddings = true, bos_token_id = END, eos_token_id = END,
}

local function documents()
  local root, texts = arg[0]:match("^(.*)recipes/[^/]*$") or "", {}
  for _, name in ipairs { "README.md", "ARCHITECTURE.md", "LICENSE" } do
    local f <close> = assert(io.open(root .. name, "rb"))
    texts[#texts + 1] = f:read("a")
  end
  return table.concat(texts)
end

-- Rows of text beginning at the given offsets.
local function text_micro(text, offsets)
  local m = { row_len = {}, ids = {} }
  for r, at in ipairs(offsets) do
    m.row_len[r] = ROW
    table.move({ text:byte(at + 1, at + ROW) }, 1, ROW, #m.ids + 1, m.ids)
  end
  m.labels = m.ids
  return m
end

-- Warm-up over a tenth of the steps, then half a cosine down to a tenth of the highest rate.
local function rate(highest, step, steps)
  local warm = math.max(1, steps // 10)
  if step <= warm then return highest * step / warm end
  return highest * (0.55 + 0.45 * math.cos(math.pi * (step - warm) / math.max(1, steps - warm)))
end

local function train_model()
  local text, start = documents(), bs.now()
  model.create(random_dir, config, { seed = cfg.seed })
  local j <close> = job.new {
    model = random_dir, trainable = "base", home = "gpu", micro_tokens = ROW * ROWS, threads = cfg.threads,
  }
  local known, held = #text * 9 // 10, {}
  for at = known, #text - ROW, ROW do held[#held + 1] = at end
  local function held_out()
    local sum = 0
    for i = 1, #held, ROWS do
      local offsets = table.move(held, i, math.min(i + ROWS - 1, #held), 1, {})
      sum = sum + j:walk({ text_micro(text, offsets) }, "loss") * #offsets
    end
    return sum / #held
  end
  say("model    Qwen3 layout, %d layers of %d channels, %d weights, %s of f32", config.num_hidden_layers,
    config.hidden_size, j:weight_bytes() // 4, plan.mib(j:weight_bytes()))
  local before, last = held_out(), nil
  for step = 1, cfg.base_steps do
    local offsets = {}
    for r = 1, ROWS do offsets[r] = math.random(0, known - ROW) end
    last = j:step({ text_micro(text, offsets) }, {
      lr = rate(cfg.base_lr, step, cfg.base_steps), beta2 = 0.95, next = step < cfg.base_steps,
    })
    if step == 1 or step % 50 == 0 then
      say("  step %3d/%d  loss %.3f  %.1f s", step, cfg.base_steps, last.loss, bs.now() - start)
    end
  end
  local after, seconds = held_out(), bs.now() - start
  say("  trained on %d bytes of this tree's documents: held-out loss %.3f -> %.3f nats a byte (%.1f s)", #text,
    before, after, seconds)
  j:save_base(model_dir)
  return j:weight_bytes()
end

-- ---- questions and queries -----------------------------------------------------------------------------

local columns = { "name", "home", "layer", "size", "shard", "rank" }
local values = { "disk", "ram", "gpu", "3", "7", "12", "40", "95" }
local forms = {
  { "Which %s has %s %s?", "SELECT %s WHERE %s = %s" },
  { "How many %s have %s %s?", "SELECT COUNT(%s) WHERE %s = %s" },
  { "Largest %s with %s above %s?", "SELECT MAX(%s) WHERE %s > %s" },
  { "Smallest %s with %s below %s?", "SELECT MIN(%s) WHERE %s < %s" },
}

-- A row: the question is given, the query is trained.
local function question()
  local form, a, b = forms[math.random(#forms)], columns[math.random(#columns)], columns[math.random(#columns)]
  local v = values[math.random(#values)]
  local prompt, answer = ("Q: " .. form[1] .. "\nA: "):format(a, b, v), form[2]:format(a, b, v)
  local row = { prompt = prompt, answer = answer, ids = { prompt:byte(1, -1) }, labels = {} }
  for i = 1, #prompt do row.labels[i] = -100 end
  for _, list in ipairs { row.ids, row.labels } do
    table.move({ answer:byte(1, -1) }, 1, #answer, #list + 1, list)
    list[#list + 1] = END
  end
  return row
end

local MICRO, MICROS = 136, 2

-- Micro-batches filled with questions that `taken` does not hold.
local function question_step(taken)
  local step, rows = {}, {}
  for j = 1, MICROS do
    local m = { row_len = {}, ids = {}, labels = {} }
    while true do
      local row = question()
      if #m.ids + #row.ids > MICRO then break end
      if not (taken and taken[row.prompt]) then
        m.row_len[#m.row_len + 1] = #row.ids
        table.move(row.ids, 1, #row.ids, #m.ids + 1, m.ids)
        table.move(row.labels, 1, #row.labels, #m.labels + 1, m.labels)
        rows[#rows + 1] = row
      end
    end
    step[j] = m
  end
  return step, rows
end

-- The most likely bytes after a prompt, by forward walks over all of it.
local function greedy(j, prompt, most)
  local ids, first = { prompt:byte(1, -1) }, #prompt
  while #ids < first + most do
    local best = j:walk({ { row_len = { #ids }, ids = ids } }, "logits")[1]:slice_rows(#ids, #ids):argmax_rows()
    if best[1] - 1 == END then break end
    ids[#ids + 1] = best[1] - 1
  end
  local out = {}
  for i = first + 1, #ids do out[#out + 1] = string.char(ids[i]) end
  return (table.concat(out):gsub("[%c\x80-\xff]", " "))
end

local function digest(j)
  local names, hash, adapters = {}, 0, j:parameters()
  for name in pairs(adapters) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do hash = bs.hash(adapters[name]:bytes(), hash) end
  return hash
end

local function mean_loss(j, steps)
  local sum, n = 0, 0
  for _, step in ipairs(steps) do
    local loss, count = j:walk(step, "loss")
    sum, n = sum + loss * count, n + count
  end
  return sum / n
end

local function open(settings)
  settings.model, settings.micro_tokens, settings.micros = model_dir, MICRO, MICROS
  settings.seed, settings.threads = cfg.seed, cfg.threads
  settings.lora = not settings.adapter and { r = cfg.r, alpha = 2.0 * cfg.r } or nil
  return job.new(settings)
end

local function lora(j, steps, report)
  for s, micros in ipairs(steps) do
    local r = j:step(micros, { lr = rate(cfg.lr, s, #steps), next = s < #steps })
    if report then report(s, r) end
  end
end

-- ---- the run --------------------------------------------------------------------------------------------

local weights = train_model()
say("saved    %s: config.json, model.safetensors", model_dir)

local held, held_rows = {}, nil
held[1], held_rows = question_step()
local taken = {}
for _, row in ipairs(held_rows) do taken[row.prompt] = true end
local steps = {}
for s = 1, cfg.steps do steps[s] = question_step(taken) end
local example = held_rows[1]

local streamed, before, after, answers = nil, nil, nil, {}
do
  local start = bs.now()
  local j <close> = open { home = "disk", vram = cfg.vram, ram = cfg.ram, logits = true }
  say("streamed vram=%s ram=%s for %s of weights; %d adapters of rank %d", plan.mib(cfg.vram), plan.mib(cfg.ram),
    plan.mib(weights), #j.adapters, cfg.r)
  say("  plan: %s", plan.describe(j, j.choice))
  before = mean_loss(j, held)
  answers[1] = greedy(j, example.prompt, 24)
  local read, walked = nil, j.stream:stats().disk_read
  lora(j, steps, function(s, r)
    local now = j.stream:stats().disk_read
    read, walked = now - walked, now
    if s == 1 or s % 10 == 0 then
      say("  step %3d/%d  loss %.3f  read %.1f MB from disk  %.1f s", s, cfg.steps, r.loss, read / 1e6,
        bs.now() - start)
    end
  end)
  after, streamed = mean_loss(j, held), digest(j)
  answers[2] = greedy(j, example.prompt, 40)
  j:save(adapter_dir)
  local e = j.engine:stats()
  say("  held-out loss %.3f -> %.3f; device pool %s, high-water mark %s; adapter %016x (%.1f s)", before, after,
    plan.mib(e.pool_bytes), plan.mib(e.peak_bytes), streamed, bs.now() - start)
end
say("  question  %s", example.prompt:match("^Q: (.-)\n"))
say("  before    %s", answers[1])
say("  after     %s", answers[2])
say("  right     %s", example.answer)

local failed = {}
local function check(ok, what)
  if not ok then failed[#failed + 1] = what end
  return ok and "equal" or "DIFFERENT"
end
do
  local start = bs.now()
  local j <close> = open { home = "gpu" }
  lora(j, steps)
  local resident = digest(j)
  say("resident the same %d steps with every block in memory: adapter %016x, %s (%.1f s)", cfg.steps, resident,
    check(resident == streamed, "the adapter of the streamed run is not that of the resident run"),
    bs.now() - start)
end
do
  local j <close> = open { home = "disk", vram = cfg.vram, ram = cfg.ram, adapter = adapter_dir }
  local again = mean_loss(j, held)
  say("reloaded %s: held-out loss %.6f, %s", adapter_dir, again,
    check(again == after, "the saved adapter does not give the loss of the live one"))
end
check(after < before, "the held-out loss did not fall")
if #failed > 0 then bs.fail(1, "quickstart: %s", table.concat(failed, "; ")) end
local _, peak = bs.rss()
say("done in %.1f s; largest resident set %s", bs.now() - started, plan.mib(peak))
