-- SPDX-License-Identifier: Apache-2.0
--- Does this program compute what the reference says? Runs everything that a reference file holds and
-- prints one line per check; exit status 0 only if all hold.
--
--   bslua recipes/parity.lua model=DIR reference=FILE.safetensors [adapter=DIR] [home=gpu|ram|disk]
--
-- The reference holds input_ids, labels, attention_mask [rows, T] and any of: hidden.<i>, logits, loss,
-- greedy, lora.loss, lora.logits, grad.<peft name>, train.losses, fullgrad.<parameter>. Learning rate and
-- the other numbers of the training losses come from reference.json beside it. In bf16, hidden states, logits
-- and losses may differ by 1.5 times what the logits of the reference's own bf16 run differ by (bf16_logits_rel_err
-- of reference.json: what its loss differs by is one number, which chance can make nothing); everything else is
-- reported and decides nothing. Entries vl.* (images) are counted as unchecked; any other entry that is not used fails,
-- and so does a run in which nothing was held against a bound. The gradient of fused experts is held against ours of
-- each expert, and the other way round.
local bs = require "bs"
local args = require "bs.args"
local job = require "bs.job"
local checkpoint = require "bs.model.checkpoint"
local fused_experts = require "bs.model.fused_experts"

local cfg = args.parse(arg, {
  model = { "", "folder of the checkpoint" },
  family = { "", "Lua file of a family, run in place of the one found by config.json's model_type" },
  reference = { "", "reference .safetensors file" },
  adapter = { "", "adapter folder; default: model folder's adapter/" },
  ignore = { {}, "patterns of tensors in the model's files to go on without where nothing reads them: *.bias" },
  device = { "cpu", "cpu or cuda (check:cpu, check:cuda for the checking device)" },
  dtype = { "f32", "what is computed in; bf16 where the device can", { "f32", "bf16" } },
  home = { "gpu", "where every block lives between visits", { "gpu", "ram", "disk" } },
  dev_slots = { 2, "device slots for streamed blocks", 1 },
  json = { "", "also write the result to this file" },
})

-- Bounds in f32: relative to the reference's norm over unmasked positions.
local F32 = { hidden = 5e-6, loss = 1e-6, grad = 2e-5, train = 1e-4, greedy = 0 }
local GRAD_FLOOR, TIE = 1e-6, 1e-4
local WIDEST <const> = 0.5 -- an error of bf16 that a reference may state; one of 1 is that of a model that gives zeros
local bound -- F32, or those of bf16, where a missing one means that the check is only reported

if cfg.model == "" or cfg.reference == "" then
  bs.fail("usage", "model=DIR and reference=FILE are required")
end
local ref, message = bs.safetensors.open(cfg.reference)
if not ref then bs.fail("error", "%s", message) end

local function finite(v) return v == v and math.abs(v) ~= math.huge end

local checks, all_ok, decided = {}, true, 0
local function report(name, err, limit, ok, array)
  ok = ok and finite(err)
  all_ok, decided = all_ok and ok, decided + (limit and 1 or 0)
  checks[#checks + 1] = {
    name = name, error = finite(err) and err or "not finite", bound = limit, ok = ok,
    hash = array and ("%016x"):format(array:hash()) or nil,
  }
  bs.say("%-64s %.3e  %s  %s", name, err, limit and ("bound %.1e"):format(limit) or "reported", ok and "ok" or "FAIL")
end

local function shape(dims) return "[" .. table.concat(dims, ", ") .. "]" end

local function norm_of(a)
  local zero <close> = bs.array.new("f32", a:dims())
  return bs.array.rel_err(a, zero)
end

-- Infinite where the shapes differ, or there is nothing in them. dims: of ours, where the array has others.
local function error_of(ours, theirs, dims)
  if theirs:count() == 0 or shape(dims or ours:dims()) ~= shape(theirs:dims()) then return math.huge end
  return bs.array.rel_err(ours, theirs)
end
-- limit: nil means reported only.
local function compare(name, ours, theirs, limit)
  local err = error_of(ours, theirs)
  report(name, err, limit, not limit or err <= limit, ours)
end

-- ---- entries of the reference: each is used, or told -----------------------------------------------------

local used = {}
local function has(name) return ref:find(name) ~= nil end
local function take(name)
  used[name] = true
  return ref:read(name)
end
local function names_with(prefix)
  local names = {}
  for _, t in ipairs(ref:tensors()) do
    if t.name:sub(1, #prefix) == prefix then names[#names + 1] = t.name end
  end
  table.sort(names)
  return names
end

-- ---- rows: trimmed to the mask's prefix and laid end to end ------------------------------------------

-- A tensor whose first dimensions are those of input_ids.
local function read_like(name, rows, width, n_dims)
  if not has(name) then bs.fail("error", "%s: tensor '%s' is missing; it is no reference file", cfg.reference, name) end
  local a = take(name)
  local d = a:dims()
  if #d ~= n_dims or rows and (d[1] ~= rows or d[2] ~= width) then
    bs.fail("error", "%s: tensor '%s' is %s; [%s, %s%s] is expected", cfg.reference, name, shape(d), rows or "rows",
      width or "T", n_dims == 3 and ", C" or "")
  end
  return a
end

local function read_rows()
  local ids = read_like("input_ids", nil, nil, 2)
  local rows, width = ids:dims()[1], ids:dims()[2]
  if ids:count() == 0 then
    bs.fail("error", "%s: tensor 'input_ids' is %s; it has no token", cfg.reference, shape(ids:dims()))
  end
  local mask = read_like("attention_mask", rows, width, 2)
  local labels = has("labels") and read_like("labels", rows, width, 2):table() or nil
  local m, i = mask:table(), ids:table()
  local out = { row_len = {}, ids = {}, labels = labels and {} }
  for r = 0, rows - 1 do
    local n = 0 -- tokens of the row
    while n < width and m[r * width + n + 1] == 1 do n = n + 1 end
    for t = n + 1, width do
      if m[r * width + t] ~= 0 then
        bs.fail("error", "attention_mask row %d is not a prefix of ones followed by zeros", r + 1)
      end
    end
    if n == 0 then bs.fail("error", "attention_mask row %d masks every token", r + 1) end
    out.row_len[r + 1] = n
    for t = 1, n do
      out.ids[#out.ids + 1] = i[r * width + t]
      if labels then out.labels[#out.labels + 1] = labels[r * width + t] end
    end
  end
  return out
end

local rows = read_rows()
local total = #rows.ids

-- Unmasked positions of a reference tensor [rows, T, C] as [tokens, C] f32.
local function unmasked(name)
  local like = ref:find("input_ids").dims
  local a = read_like(name, like[1], like[2], 3):cast("f32")
  local dims, bytes, parts = a:dims(), a:bytes(), {}
  local row = dims[3] * 4
  for r, n in ipairs(rows.row_len) do
    local offset = (r - 1) * dims[2] * row
    parts[r] = bytes:sub(offset + 1, offset + n * row)
  end
  return bs.array.new("f32", { total, dims[3] }, table.concat(parts))
end

local function scalar(v) return bs.array.new("f32", { 1 }, { v }) end

local function reference_json(reason)
  local path = cfg.reference:gsub("[^/]*$", "") .. "reference.json"
  if not bs.is_file(path) then bs.fail("usage", "%s, so %s is needed", reason, path) end
  return checkpoint.read_json(path), path
end

local function bf16_bounds()
  local own, path = reference_json "dtype=bf16 is held against the reference's own bf16 run"
  local err = own.bf16_logits_rel_err
  if type(err) ~= "number" or not (err > 0 and err < WIDEST) then
    bs.fail("usage", "%s: the number 'bf16_logits_rel_err', above 0 and below %g, is needed for bf16; it is %s", path,
      WIDEST, type(err) == "number" and err or "none")
  end
  return { hidden = 1.5 * err, loss = 1.5 * err, own_loss = own.bf16_loss_abs_err }
end

local function compare_loss(name, ours)
  local theirs = take(name)
  local dims = theirs:dims()
  if #dims == 0 then theirs = scalar(theirs:get(1)) end
  compare(name, scalar(ours), theirs, bound.loss)
  if (bound.own_loss or 0) > 0 then -- decides nothing
    report(name .. " over the reference's", math.abs(ours - theirs:get(1)) / bound.own_loss, nil, true, scalar(ours))
  end
end

-- ---- runs ----------------------------------------------------------------------------------------------

local GREEDY = has "greedy" and ref:find("greedy").dims or {}
local n_greedy = GREEDY[#GREEDY] or 0
local stats = {}

local function open(extra)
  local settings = {
    model = cfg.model, family = cfg.family ~= "" and cfg.family or nil, ignore = cfg.ignore, check = "full",
    device = cfg.device, dtype = cfg.dtype, home = cfg.home,
    dev_slots = cfg.dev_slots, knobs = {},
    micro_tokens = math.max(total, rows.row_len[1] + n_greedy), logits = true,
  }
  for key, value in pairs(extra) do settings[key] = value end
  bound = bound or (cfg.dtype == "bf16" and bf16_bounds() or F32)
  local j = job.new(settings) -- refuses a dtype that the device lacks
  for _, id in ipairs(rows.ids) do
    if id < 0 or id >= j.model.config.vocab then
      bs.fail("error", "%s: 'input_ids' holds %s, and this model has %d tokens; is the reference of another model?",
        cfg.reference, id, j.model.config.vocab)
    end
  end
  return j
end

-- A tie is no error, and tells nothing: one token at least has to be ours alone.
local function greedy(j)
  local theirs, ids = take "greedy", {}
  local want = theirs:table()
  if #want == 0 or #want ~= n_greedy then
    return report("greedy, one row is expected", math.huge, bound.greedy, false)
  end
  for t = 1, rows.row_len[1] do ids[t] = rows.ids[t] end
  local wrong, ties = 0, 0
  for i, token in ipairs(want) do
    local logits = j:walk({ { row_len = { #ids }, ids = ids } }, { mode = "logits" })[1]
    local last = logits:slice_rows(#ids, #ids)
    local best = last:argmax_rows()[1]
    if best - 1 ~= token then
      local there = token >= 0 and token < last:count()
      if there and last:get(best) - last:get(token + 1) <= TIE then ties = ties + 1 else wrong = wrong + 1 end
      if not there then break end
    end
    ids[#ids + 1] = want[i]
  end
  if ties == #want then wrong = math.huge end
  report(("greedy, %d tokens, %d ties"):format(#want, ties), wrong, bound.greedy,
    not bound.greedy or wrong <= bound.greedy)
end

local function base_run()
  if not (has "logits" or has "loss" or names_with("hidden.")[1] or has "greedy") then return end
  local j <close> = open { trainable = "none" }
  local function observe(_, i, _, array)
    if has("hidden." .. i) then compare("hidden." .. i, array, unmasked("hidden." .. i), bound.hidden) end
  end
  local logits = j:walk({ rows }, { mode = "logits", observe = observe })[1]
  if has "logits" then compare("logits", logits, unmasked "logits", bound.hidden) end
  if has "loss" then compare_loss("loss", (j:walk({ rows }, { mode = "loss" }))) end
  if has "greedy" then greedy(j) end
  stats.base = j.instance.stream:stats()
end

-- What a gradient of the reference is held against: ours by that name, or made of what ours are; with its dims.
local function our_gradient(j, ours, name)
  local function dims(n)
    local t = j.model.checkpoint.tensors[n]
    return t and t.dims
  end
  if ours[name] then return ours[name], dims(name) end
  return fused_experts.find(ours, name, dims)
end

-- A gradient that is zero in the reference has no relative error: ours has to be next to the largest one as nothing.
local function check_gradients(j, prefix)
  local ours, largest, names = j:gradients(), 0, names_with(prefix)
  for _, name in ipairs(names) do
    local norm = norm_of(ref:read(name):cast("f32"))
    if finite(norm) then largest = math.max(largest, norm) end
  end
  for _, name in ipairs(names) do
    local b = take(name):cast("f32")
    local a, dims = our_gradient(j, ours, name:sub(#prefix + 1))
    local norm = norm_of(b)
    if not a then
      report(name .. " (not trained here)", math.huge, bound.grad, false)
    elseif norm == 0 then
      local err = error_of(a, b, dims) / largest
      report(name, err, bound.grad and GRAD_FLOOR, not bound.grad or err <= GRAD_FLOOR, a)
    else
      local err = error_of(a, b, dims)
      report(name, err, bound.grad,
        not bound.grad or err <= bound.grad or err * norm <= GRAD_FLOOR * largest, a)
    end
  end
end

local function optimizer_numbers()
  local reference, path = reference_json "the reference holds lora.* or train.*"
  local o = reference.optimizer
  local betas = type(o) == "table" and o.betas or nil
  local numbers = type(betas) == "table" and { o.lr, betas[1], betas[2], o.eps, o.weight_decay } or {}
  for i = 1, 5 do
    if type(numbers[i]) ~= "number" then
      bs.fail("usage", "%s: 'optimizer' must hold the numbers lr, betas (two), eps and weight_decay", path)
    end
  end
  if o.lr <= 0 or not finite(o.lr) or math.min(betas[1], betas[2]) < 0 or math.max(betas[1], betas[2]) >= 1 then
    bs.fail("usage", "%s: 'optimizer' has lr %s and betas %s, %s; a number above 0, and two in [0, 1), are expected",
      path, o.lr, betas[1], betas[2])
  end
  return o
end

local function adapter_run()
  local gradients = names_with("grad.")[1]
  if not (has "lora.loss" or has "lora.logits" or gradients or has "train.losses") then return end
  local o = optimizer_numbers()
  local dir = cfg.adapter ~= "" and cfg.adapter or cfg.model:gsub("/+$", "") .. "/adapter"
  if not bs.is_file(dir .. "/adapter_config.json") then
    bs.fail("usage", "the reference holds lora.* or train.*, so an adapter is needed; there is none in %s "
      .. "(adapter=DIR)", dir)
  end
  local j <close> = open { adapter = dir }
  if has "lora.logits" then
    compare("lora.logits", j:walk({ rows }, { mode = "logits" })[1], unmasked "lora.logits", bound.hidden)
  end
  if has "lora.loss" or gradients then
    local r = j:step({ rows }, { apply = false })
    if has "lora.loss" then compare_loss("lora.loss", r.loss) end
    check_gradients(j, "grad.")
  end
  if has "train.losses" then
    local want, losses = take "train.losses", {}
    for i = 1, want:count() do
      losses[i] = j:step({ rows }, {
        lr = o.lr, beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps, weight_decay = o.weight_decay,
        clip = 0, next = i < want:count(),
      }).loss
    end
    compare("train.losses", bs.array.new("f32", { #losses }, losses), want, bound.train)
    local names, hash = {}, 0
    local values = j:parameters()
    for name in pairs(values) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do hash = bs.hash(values[name]:bytes(), hash) end
    checks[#checks + 1] = {
      name = "adapter after training", error = 0, bound = 0, ok = true, hash = ("%016x"):format(hash),
    }
  end
  stats.adapter = j.instance.stream:stats()
end

local function full_gradient_run()
  if not names_with("fullgrad.")[1] then return end
  local j <close> = open { trainable = "base" }
  j:step({ rows }, { apply = false })
  check_gradients(j, "fullgrad.")
  stats.base_gradient = j.instance.stream:stats()
end

-- Entries that only a model with images can answer are unchecked; any other that no run has used is unknown.
local function count_entries()
  local n = { held = 0, used = 0, unchecked = 0, unknown = 0 }
  for _, t in ipairs(ref:tensors()) do
    local kind = used[t.name] and "used" or t.name:sub(1, 3) == "vl." and "unchecked" or "unknown"
    n.held, n[kind] = n.held + 1, n[kind] + 1
    if kind == "unknown" then report(t.name .. " (unknown entry)", math.huge, nil, false) end
  end
  if n.unchecked > 0 then
    bs.say("note: %d entries vl.* need images, which are not supported; not checked", n.unchecked)
  end
  bs.say("%d entries in the reference: %d used, %d unchecked, %d unknown", n.held, n.used, n.unchecked, n.unknown)
  return n
end

base_run()
adapter_run()
full_gradient_run()
local entries = count_entries()
if #checks == 0 then bs.fail("error", "%s holds nothing to check", cfg.reference) end
if all_ok and decided == 0 then
  bs.fail("error", "%s holds nothing that has a bound in %s; nothing was decided", cfg.reference, cfg.dtype)
end
bs.say("%d checks, %s", #checks, all_ok and "all ok" or "FAILED")
if cfg.json ~= "" then
  local result = { ok = all_ok, checks = checks, entries = entries, stats = stats }
  bs.write_file(cfg.json, bs.json.encode(result, { pretty = true }))
end
if not all_ok then os.exit(1, true) end
