-- SPDX-License-Identifier: Apache-2.0
--- Steps of a streamed model against what the machine allows: link and disk rates, a product's rate and the step
-- of the same model with all weights on the device are measured in the same run.
--
--   bslua bench/stream.lua shape=qwen3-8b device=cuda dtype=bf16 dir=FOLDER tokens=128,2048 [key=value ...]
--   bslua bench/stream.lua help
--
-- The floor of a case is the largest of: the resident step, and for each edge its bytes over its rate. The overlap
-- score is 1 - (step - resident step) / (time of its copies alone). mode=empty walks over layers that do nothing, so
-- that a visit costs what the runtime does for it.
package.path = (arg[0]:match("^(.*)/") or ".") .. "/?.lua;" .. package.path
local bs = require "bs"
local args = require "bs.args"
local budget = require "bs.plan.budget"
local family = require "bs.model.find_family"
local job = require "bs.job"
local machine = require "machine"
local memory = require("bs.plan.measure").memory
local model = require "bs.model.model"
local pass = require "bs.instance.pass"
local random_checkpoint = require "random_checkpoint"
local costs = require "bs.plan.costs"

local cfg = args.parse(arg, {
  shape = { "tiny", "shape of the model", random_checkpoint.names() },
  layers = { 0, "layers of it; 0: the shape's own", 0 },
  dir = { "build/bench", "where checkpoints are made (once) and read" },
  json = { "", "file for all numbers and raw samples" },
  device = { "cpu", "cpu or cuda" },
  dtype = { "auto", "what is computed in", { "auto", "f32", "bf16" } },
  tokens = { { 128 }, "tokens of a row, one case each" },
  rows = { 1, "rows of a micro-batch", 1 },
  micros = { { 1 }, "micro-batches of a step, one case each" },
  micro_tokens = { 0, "capacity of a micro-batch; 0: its tokens", 0 },
  home = { { "ram" }, "where blocks live: ram, disk, auto; gpu is the resident step" },
  mode = { { "train" }, "train, infer, empty" },
  vram = { "all", "device pool of streamed cases: 8GB, 0.5 of what is free, auto; all: no bound" },
  ram = { "all", "host memory of streamed cases: 16GB, 0.5 of what is free, auto; all: no bound" },
  ram_blocks = { -1, "instead of ram=: what the plan needs at the least, and room for so many blocks; -1: ram= holds" },
  dev_slots = { 0, "device slots; 0: the plan's choice", 0 },
  host_slots = { 0, "host slots; 0: the plan's choice for disk, else 1", 0 },
  boundaries = { "auto", "where layer inputs are kept", { "auto", "device", "host" } },
  keep = { 0, "upper layers whose activations are kept; the same in the resident step", 0 },
  steps = { 5, "measured steps of a case, after two that are not", 1 },
  head = { false, "with the final norm and the head's loss; without: the layers alone" },
  vocab = { -1, "rows of the vocabulary; 0: the shape's own, -1: the shape's own with head, else 4096", -1 },
  r = { 8, "rank of the adapters", 1 },
  top_fraction = { 0.5, "adapters on this upper part of the layers", 0, 1 },
  direct = { true, "reads pass by the page cache" },
  resident = { true, "measure the resident step" },
  profile = { false, "two more steps of a case, whose launches are timed: shares of the step" },
  limit = { 290, "seconds after which no case is begun", 1 },
}, "bslua bench/stream.lua key=value ...")

local start = bs.now()
local say <const> = bs.say
local function elapsed() return bs.now() - start end
local function gb(n) return ("%.3f GB"):format(n / 1e9) end
local function gib(n) return ("%.3f GiB"):format(n / 2 ^ 30) end

local function given_budget(name)
  if cfg[name] ~= "all" then return budget.read(cfg, name) end
end

-- ---- jobs ----------------------------------------------------------------------------------------------

local function open_job(folder, c)
  local o = {
    model = folder, device = cfg.device, dtype = cfg.dtype, stack = not cfg.head, home = c.home,
    micro_tokens = math.max(c.tokens * cfg.rows, cfg.micro_tokens), rows = cfg.rows, micros = c.micros,
    boundaries = cfg.boundaries, keep = c.mode == "train" and cfg.keep or nil, io = { no_direct = not cfg.direct },
    lora = { r = cfg.r, targets = { "q_proj", "k_proj", "v_proj", "o_proj" }, top_fraction = cfg.top_fraction },
  }
  if c.mode ~= "train" then o.trainable, o.lora = "none", nil end
  if c.mode == "empty" then
    local fam = family.find(random_checkpoint.shapes[cfg.shape])
    o.family = setmetatable({ layer = function(_, _, x) return x end }, { __index = fam })
  end
  o.vram, o.ram = given_budget("vram"), c.ram or given_budget("ram")
  if cfg.dev_slots > 0 then o.dev_slots = cfg.dev_slots end
  if cfg.host_slots > 0 then o.host_slots = cfg.host_slots elseif c.home == "ram" then o.host_slots = 1 end
  for key, value in pairs(c.over or {}) do o[key] = value end
  return job.new(o)
end

local function batch_of(j, tokens, micros)
  local list, vocab = {}, j.model.config.vocab
  for m = 1, micros do
    local micro = { row_len = {}, ids = {}, labels = {} }
    for r = 1, cfg.rows do
      micro.row_len[r] = tokens
      for _ = 1, tokens do
        local id = (#micro.ids * 7919 + m * 104729) % vocab
        table.insert(micro.ids, id)
        table.insert(micro.labels, id)
      end
    end
    list[m] = micro
  end
  return list
end

-- Wall time of the segments: the visits and ops as the host issues them, without the wait for their end.
local issue = { seconds = 0, visits = 0 }
local visit_all = pass.visit_all
function pass.visit_all(inst, list, p)
  local t0 = bs.now()
  visit_all(inst, list, p)
  issue.seconds, issue.visits = issue.seconds + bs.now() - t0, issue.visits + #list
end

local function one_step(j, mode, micros)
  if mode == "train" then j:step(micros, { next = true, lr = 1e-5 }) return end
  j:walk(micros, { mode = "loss", next = true })
end

local function median(list)
  local v = table.move(list, 1, #list, 1, {})
  table.sort(v)
  return #v % 2 == 1 and v[#v // 2 + 1] or (v[#v // 2] + v[#v // 2 + 1]) / 2
end

-- Cumulative counters of a job.
local function counters(j)
  local s, b, r = j.instance.stream:stats(), j.instance.store:stats(), j.instance.embedding:stats()
  return {
    link = s.link_bytes, disk = s.disk_read, rows = r.read, out = b.out_bytes, back = b.back_bytes,
    launches = j.instance.engine:stats().launches, issue = issue.seconds, visits = issue.visits,
    stall_disk = s.stall_disk_s, stall_pinned = s.stall_pinned_s, stall_copy = s.stall_copy_s,
    stall_compute = s.stall_compute_s,
  }
end

-- Times of steps that are alike: two go before, of which the first fills the homes.
local function measure(j, c, micros)
  micros = batch_of(j, c.tokens, micros or c.micros)
  local samples, begun = {}, bs.now()
  local t0 = bs.now()
  one_step(j, c.mode, micros)
  local first = bs.now() - t0
  one_step(j, c.mode, micros)
  local before = counters(j)
  for i = 1, cfg.steps do
    t0 = bs.now()
    one_step(j, c.mode, micros)
    samples[i] = bs.now() - t0
    if bs.now() - begun > cfg.limit / 4 or elapsed() > cfg.limit then break end
  end
  local after, per = counters(j), {}
  for key, value in pairs(after) do per[key] = (value - before[key]) / #samples end
  return { first = first, samples = samples, median = median(samples), per_step = per }
end

-- Where the step's time goes: the launches of two steps timed one by one. Timing them takes the place of some
-- overlap, so shares are of the step that was timed; what is left is waiting (for copies, the disk, the host).
local function shares(j, c)
  local micros, n = batch_of(j, c.tokens, c.micros), 2
  j.instance.engine:wait()
  j.device:profile(true)
  local t0 = bs.now()
  for _ = 1, n do one_step(j, c.mode, micros) end
  j.instance.engine:wait()
  local step = (bs.now() - t0) / n
  local rows, sum = j.device:profile(), { GEMM = 0, attention = 0, elementwise = 0 }
  j.device:profile(false)
  for _, row in ipairs(rows) do
    local class = row.op:match("^gemm") and "GEMM" or row.op:match("^attention") or "elementwise"
    row.seconds, row.calls = row.seconds / n, row.calls / n
    sum[class] = sum[class] + row.seconds
  end
  sum.waiting = math.max(0, step - sum.GEMM - sum.attention - sum.elementwise)
  say("  timed step %.1f ms: GEMM %.1f %%, attention %.1f %%, elementwise %.1f %%, waiting %.1f %%", step * 1e3,
    sum.GEMM / step * 100, sum.attention / step * 100, sum.elementwise / step * 100, sum.waiting / step * 100)
  for _, row in ipairs(rows) do
    if row.seconds > step * 2e-3 then
      say("    %-18s %-22s %8.2f ms, %6.0f calls, %7.1f us", row.op, row.label, row.seconds * 1e3, row.calls,
        row.seconds / row.calls * 1e6)
    end
  end
  return { step = step, shares = sum, rows = rows }
end

-- ---- resident step, host overhead ----------------------------------------------------------------------

local function key_of(c, micros) return ("%s/%d/%d"):format(c.mode, c.tokens, micros) end

local function largest(list) return math.max(table.unpack(list)) end

-- Steps with every block on the device, by key_of, into `found`; none when the model does not fit.
local function resident_steps(folder, cases, found)
  local ok, err = pcall(function()
    local opened = bs.now()
    local device <close> = bs.device.open(cfg.device, {})
    local free = device:props().total_bytes
    device:close()
    -- The budgets are those of the streamed cases.
    local over = { boundaries = "device", vram = free > 0 and free - (1 << 30) or 1 << 60, ram = 1 << 60 }
    local j <close> = open_job(folder, {
      home = "gpu", tokens = largest(cfg.tokens), micros = largest(cfg.micros), mode = "train", over = over,
    })
    local function once(c, micros)
      local key = key_of(c, micros)
      if found[key] or c.mode == "empty" or elapsed() > cfg.limit then return end
      local m = measure(j, c, micros)
      found[key] = m
      local _, flops = costs.flops(j.spec, c.mode == "infer" and j.spec.walk_program or j.spec.program,
        c.mode == "infer" and 0 or cfg.keep, c.tokens * cfg.rows * micros)
      m.flops = flops / m.median
      if cfg.profile then m.profile = shares(j, c) end
      say("resident %s T=%d x%d: %.2f ms, %.0f tok/s; %.0f launches, issued in %.0f us a visit", c.mode, c.tokens,
        cfg.rows * micros, m.median * 1e3, c.tokens * cfg.rows * micros / m.median, m.per_step.launches,
        m.per_step.issue / m.per_step.visits * 1e6)
    end
    for _, c in ipairs(cases) do
      once(c, c.micros)
      once(c, 1)
    end
    say("resident: pool peak %s; %.1f s in all", gib(j.instance.engine:stats().peak_bytes), bs.now() - opened)
  end)
  if not ok then say("resident: not measured: %s", (tostring(err):match("^[^\n]*"))) end
end

-- What Lua and C cost by themselves: the same program on a device that executes nothing.
local function host_overhead(folder)
  local ok, value = pcall(function()
    local j <close> = open_job(folder, {
      home = "gpu", tokens = cfg.tokens[1], micros = 1, mode = "train",
      over = { device = "meta", dry = true, vram = 1 << 50, ram = 1 << 50 },
    })
    local micros, times = batch_of(j, cfg.tokens[1], 1), {}
    j:forward_backward(micros, { next = true })
    local launches = j.instance.engine:stats().launches
    for i = 1, 9 do
      local before = issue.seconds
      j:forward_backward(micros, { next = true })
      times[i] = issue.seconds - before
    end
    launches = (j.instance.engine:stats().launches - launches) / 9
    local t = median(times)
    say("host alone: %.1f us a visit, %.2f us a launch (%d visits, %.0f launches a step)", t / #j.spec.program * 1e6,
      t / launches * 1e6, #j.spec.program, launches)
    return { seconds = t, visits = #j.spec.program, launches = launches, samples = times }
  end)
  if ok then return value end
  say("host alone: not measured: %s", (tostring(value):match("^[^\n]*")))
end

-- ---- a case ----------------------------------------------------------------------------------------------

-- The least time of a step by edge, and the largest of them.
local function floor_of(per, planned, rates, resident)
  local edges = {}
  if rates.h2d then edges.link = (planned.link + per.back) / rates.h2d end
  if rates.d2h then edges.out = per.out / rates.d2h end
  if rates.disk then edges.disk = (planned.disk_read + per.rows) / rates.disk end
  edges.resident = resident
  local name
  for edge, t in pairs(edges) do
    if not name or t > edges[name] then name = edge end
  end
  return edges, name
end

local function report(c, r)
  local per, step = r.per_step, r.median
  local ms = {}
  for i, t in ipairs(r.samples) do ms[i] = ("%.1f"):format(t * 1e3) end
  say("%s %s T=%d x%d: median %.2f ms (%s), %.0f tok/s; floor %.2f ms (%s), ratio %.3f, overlap %s", c.home, c.mode,
    c.tokens, cfg.rows * c.micros, step * 1e3, table.concat(ms, " "), r.tokens / step, r.floor * 1e3,
    r.floor_edge or "none", r.ratio, r.overlap and ("%.3f"):format(r.overlap) or "-")
  if c.mode == "empty" then
    say("  an empty visit: %.1f us, of which the host %.1f", step / per.visits * 1e6, per.issue / per.visits * 1e6)
  end
  say("  link %s moved, %s planned; disk %s, %s planned; rows %s; boundaries out %s, back %s", gb(per.link),
    gb(r.planned.link), gb(per.disk), gb(r.planned.disk_read), gb(per.rows), gb(per.out), gb(per.back))
  say("  simulated %.2f ms: link %.2f, disk %.2f, compute %.2f; at %.3f of it", r.simulated * 1e3,
    r.simulated_busy.link * 1e3, r.simulated_busy.disk * 1e3, r.simulated_busy.compute * 1e3, step / r.simulated)
  if r.gpu_memory then
    say("  GPU holds %s (by %s); pool %s + context %s: %.4f of it", gib(r.gpu_memory.held), r.gpu_memory.by,
      gib(r.gpu_memory.pool), gib(r.gpu_memory.context), 1 / r.gpu_memory.ratio)
  end
  say("  pool peak %s, planned %s; %.0f launches; issued in %.0f us a visit (%.0f visits)", gib(r.peak),
    gib(r.planned_peak), per.launches, per.issue / per.visits * 1e6, per.visits)
  if c.micros > 1 and r.resident_micro then
    say("  %d x the resident step of one micro-batch: %.2f ms", c.micros, c.micros * r.resident_micro * 1e3)
  end
  say("  waited for disk %.1f ms, pinned %.1f, copies %.1f, compute %.1f; opened in %.2f s, first step %.2f s",
    per.stall_disk * 1e3, per.stall_pinned * 1e3, per.stall_copy * 1e3, per.stall_compute * 1e3, r.opened, r.first)
  say("  %s", r.plan)
end

-- Host bytes of a plan that reads every block from disk by one slot, and of so many blocks beside it.
local function ram_for(folder, c, blocks)
  local over = { device = "meta", dry = true, home = "disk", host_slots = 1, vram = 1 << 50, ram = 1 << 50 }
  local j <close> = open_job(folder, setmetatable({ over = over }, { __index = c }))
  return j.plan.host + blocks * j.model.manifest:block_info(j.model.layers[0].trunk.block).raw_bytes
end

local function run_case(folder, c, rates, resident_of)
  if cfg.ram_blocks >= 0 then c.ram = ram_for(folder, c, cfg.ram_blocks) end
  local all, one = resident_of[key_of(c, c.micros)] or {}, resident_of[key_of(c, 1)] or {}
  local t0, resident = bs.now(), all.median
  -- Plans are scored with the rates of this run, and of compute the resident step's.
  c.over = { rates = { link = rates.h2d, disk = rates.disk, flops = all.flops or rates.gemm } }
  local j <close> = open_job(folder, c)
  local opened = bs.now() - t0
  local r = measure(j, c)
  local planned, e = j.instance.placement:bytes(true), j.instance.engine:stats()
  r.opened, r.home, r.mode, r.row_tokens, r.micros, r.rows = opened, c.home, c.mode, c.tokens, c.micros, cfg.rows
  r.tokens, r.planned = c.tokens * cfg.rows * c.micros, planned
  r.resident, r.resident_micro = resident, one.median
  r.edges, r.floor_edge = floor_of(r.per_step, planned, rates, resident)
  r.floor = r.floor_edge and r.edges[r.floor_edge] or 0
  r.ratio = r.floor > 0 and r.median / r.floor or 0
  if resident and rates.h2d and r.per_step.link > 0 then
    r.overlap = 1 - (r.median - resident) / (r.per_step.link / rates.h2d)
  end
  r.peak, r.planned_peak, r.io = e.peak_bytes, j.plan.peak, j.instance.stream:stats().io
  r.plan, r.simulated, r.simulated_busy = j:describe(), j.plan.seconds, j.plan.busy
  r.ram, r.gpu, r.gpu_memory = j.cfg.ram, bs.gpu.status(), memory(e.pool_bytes)
  if cfg.profile then r.profile = shares(j, c) end
  report(c, r)
  return r
end

-- ---- all of it -------------------------------------------------------------------------------------------

local function all_cases()
  local list, homes = {}, { ram = true, disk = true, auto = true, gpu = true }
  local modes = { train = true, infer = true, empty = true }
  for _, home in ipairs(cfg.home) do
    if not homes[home] then bs.fail("usage", "home=%s: ram, disk, auto or gpu is expected", home) end
    for _, mode in ipairs(cfg.mode) do
      if not modes[mode] then bs.fail("usage", "mode=%s: train, infer or empty is expected", mode) end
      for _, tokens in ipairs(cfg.tokens) do
        for _, micros in ipairs(cfg.micros) do
          list[#list + 1] = { home = home, mode = mode, tokens = tokens, micros = micros }
        end
      end
    end
  end
  return list
end

local cases = all_cases()
local result = { machine = machine.describe(), settings = cfg, resident = {}, cases = {} }
local about = result.machine
say("%s, %s, %d cores, %s; bslua %s", about.gpu or "no GPU", about.cpu, about.cores or 0, about.kernel or "?",
  about.version)
local vocab = cfg.vocab >= 0 and cfg.vocab or cfg.head and 0
  or math.min(4096, random_checkpoint.shapes[cfg.shape].vocab_size)
local folder, bytes, seconds = random_checkpoint.make(cfg.dir, cfg.shape, {
  layers = cfg.layers > 0 and cfg.layers or nil, vocab = vocab > 0 and vocab or nil,
})
say("checkpoint %s: %s%s", folder, gb(bytes), seconds > 0 and (", written in %.1f s"):format(seconds) or "")
result.rates = machine.device_rates(cfg.device, cfg.dtype, say)
do
  local m = model.open(folder, { compute = "auto" })
  result.rates.disk, result.rates.io = machine.disk_rate(cfg.device, m, {}, 4e9, say)
end
result.host = host_overhead(folder)
if cfg.resident then resident_steps(folder, cases, result.resident) end
for _, c in ipairs(cases) do
  if c.home ~= "gpu" then
    collectgarbage()
    if elapsed() > cfg.limit then
      say("%s %s T=%d x%d: skipped, the time limit has passed", c.home, c.mode, c.tokens, cfg.rows * c.micros)
    else
      local ok, r = pcall(run_case, folder, c, result.rates, result.resident)
      if ok then
        result.cases[#result.cases + 1] = r
      else
        say("%s %s T=%d x%d: %s", c.home, c.mode, c.tokens, cfg.rows * c.micros, tostring(r))
      end
    end
  end
end
result.seconds = elapsed()
if cfg.json ~= "" then bs.write_file(cfg.json, bs.json.encode(result) .. "\n") end
say("%.0f s in all", result.seconds)
