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
-- reported and decides nothing. Entries vl.* (images) are not checked; a note says so.
local bs = require "bs"
local args = require "bs.args"
local job = require "bs.job"
local checkpoint = require "bs.model.checkpoint"

local cfg = args.parse(arg, {
  model = { "", "folder of the checkpoint" },
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
local bound -- F32, or those of bf16, where a missing one means that the check is only reported

if cfg.model == "" or cfg.reference == "" then
  bs.fail("usage", "model=DIR and reference=FILE are required")
end
local ref, message = bs.safetensors.open(cfg.reference)
if not ref then bs.fail("error", "%s", message) end

local function finite(v) return v == v and v ~= math.huge end

local checks, all_ok = {}, true
local function report(name, err, limit, ok, array)
  ok = ok and finite(err)
  all_ok = all_ok and ok
  checks[#checks + 1] = {
    name = name, error = finite(err) and err or "not finite", bound = limit, ok = ok,
    hash = array and ("%016x"):format(array:hash()) or nil,
  }
  print(("%-64s %.3e  %s  %s"):format(name, err, limit and ("bound %.1e"):format(limit) or "reported",
    ok and "ok" or "FAIL"))
end
local function error_of(ours, theirs) -- infinite where the sizes differ
  return ours:count() == theirs:count() and bs.array.rel_err(ours, theirs) or math.huge
end
-- limit: nil means reported only.
local function compare(name, ours, theirs, limit)
  local err = error_of(ours, theirs)
  report(name, err, limit, not limit or err <= limit, ours)
end
local function has(name) return ref:find(name) ~= nil end
local function first_with(prefix)
  for _, t in ipairs(ref:tensors()) do
    if t.name:sub(1, #prefix) == prefix then return t.name end
  end
end

-- ---- rows: trimmed to the mask's prefix and laid end to end ------------------------------------------

local function shape(dims) return "[" .. table.concat(dims, ", ") .. "]" end

-- A tensor whose first dimensions are those of input_ids.
local function read_like(name, rows, width, n_dims)
  if not has(name) then bs.fail("error", "%s: tensor '%s' is missing; it is no reference file", cfg.reference, name) end
  local a = ref:read(name)
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
  if type(err) ~= "number" then bs.fail("usage", "%s: the number 'bf16_logits_rel_err' is needed for bf16", path) end
  return { hidden = 1.5 * err, loss = 1.5 * err, own_loss = own.bf16_loss_abs_err }
end

local function compare_loss(name, ours)
  local theirs = ref:read(name)
  compare(name, scalar(ours), theirs, bound.loss)
  if (bound.own_loss or 0) > 0 then -- decides nothing
    report(name .. " over the reference's", math.abs(ours - theirs:get(1)) / bound.own_loss, nil, true, scalar(ours))
  end
end

-- ---- runs ----------------------------------------------------------------------------------------------

local GREEDY = has("greedy") and ref:read("greedy"):count() or 0
local stats = {}

local function open(extra)
  local settings = {
    model = cfg.model, ignore = cfg.ignore, check = "full", device = cfg.device, dtype = cfg.dtype, home = cfg.home,
    dev_slots = cfg.dev_slots,
    micro_tokens = math.max(total, rows.row_len[1] + GREEDY), logits = true,
  }
  for key, value in pairs(extra) do settings[key] = value end
  local j = job.new(settings) -- refuses a dtype that the device lacks
  bound = bound or (cfg.dtype == "bf16" and bf16_bounds() or F32)
  return j
end

local function greedy(j)
  local want, ids = ref:read("greedy"):table(), {}
  for t = 1, rows.row_len[1] do ids[t] = rows.ids[t] end
  local wrong, ties = 0, 0
  for i, token in ipairs(want) do
    local logits = j:walk({ { row_len = { #ids }, ids = ids } }, { mode = "logits" })[1]
    local best, gap = logits:slice_rows(#ids, #ids):argmax_rows()
    if best[1] - 1 ~= token then
      if gap[1] <= TIE then ties = ties + 1 else wrong = wrong + 1 end
    end
    ids[#ids + 1] = want[i]
  end
  report(("greedy, %d tokens, %d ties"):format(#want, ties), wrong, bound.greedy,
    not bound.greedy or wrong <= bound.greedy)
end

local function base_run()
  if not (has "logits" or has "loss" or first_with "hidden." or has "greedy") then return end
  local j <close> = open { trainable = "none" }
  local function observe(_, i, _, array)
    if has("hidden." .. i) then compare("hidden." .. i, array, unmasked("hidden." .. i), bound.hidden) end
  end
  local logits = j:walk({ rows }, { mode = "logits", observe = observe })[1]
  if has "logits" then compare("logits", logits, unmasked "logits", bound.hidden) end
  if has "loss" then compare_loss("loss", (j:walk({ rows }, { mode = "loss" }))) end
  if GREEDY > 0 then greedy(j) end
  stats.base = j.instance.stream:stats()
end

local function check_gradients(j, prefix)
  local ours, largest, names = j:gradients(), 0, {}
  for _, t in ipairs(ref:tensors()) do
    if t.name:sub(1, #prefix) == prefix then
      names[#names + 1] = t.name
      local zero = bs.array.new("f32", t.dims)
      largest = math.max(largest, bs.array.rel_err(ref:read(t.name):cast("f32"), zero))
    end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local a, b = ours[name:sub(#prefix + 1)], ref:read(name):cast("f32")
    if not a then
      report(name .. " (not trained here)", math.huge, bound.grad, false)
    else
      local zero = bs.array.new("f32", b:dims())
      local err, norm = error_of(a, b), bs.array.rel_err(b, zero)
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
  return o
end

local function adapter_run()
  if not (has "lora.loss" or has "lora.logits" or first_with "grad." or has "train.losses") then return end
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
  if has "lora.loss" or first_with "grad." then
    local r = j:step({ rows }, { apply = false })
    if has "lora.loss" then compare_loss("lora.loss", r.loss) end
    check_gradients(j, "grad.")
  end
  if has "train.losses" then
    local want, losses = ref:read "train.losses", {}
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
  if not first_with "fullgrad." then return end
  local j <close> = open { trainable = "base" }
  j:step({ rows }, { apply = false })
  check_gradients(j, "fullgrad.")
  stats.base_gradient = j.instance.stream:stats()
end

-- Entries that only a model with images can answer.
local function images_note()
  local n = 0
  for _, t in ipairs(ref:tensors()) do
    if t.name:sub(1, 3) == "vl." then n = n + 1 end
  end
  if n > 0 then print(("note: %d entries vl.* need images, which are not supported; not checked"):format(n)) end
end

images_note()
base_run()
adapter_run()
full_gradient_run()
if #checks == 0 then bs.fail("error", "%s holds nothing to check", cfg.reference) end
print(("%d checks, %s"):format(#checks, all_ok and "all ok" or "FAILED"))
if cfg.json ~= "" then
  bs.write_file(cfg.json, bs.json.encode({ ok = all_ok, checks = checks, stats = stats }, { pretty = true }))
end
if not all_ok then os.exit(1, true) end
