-- SPDX-License-Identifier: Apache-2.0
--- Holds the results of figures.sh in a folder against their bounds: one line each, and figures.json there.
-- What has no result is left out.
--   bslua bench/figures.lua FOLDER
local bs = require "bs"

local folder = arg[1]
local lines, missed = {}, 0

local function result(name)
  local f <close> = io.open(("%s/%s.json"):format(folder, name))
  return f and bs.json.decode(f:read("a"))
end

local function line(name, value, unit, sign, bound)
  local ok = not sign or value == bound or sign == "<=" and value < bound or sign == ">=" and value > bound
  if not ok then missed = missed + 1 end
  local shown = unit == "bytes" and "%.0f" or "%.3f"
  lines[#lines + 1] = { name = name, value = value, unit = unit, sign = sign, bound = bound, ok = ok }
  io.write(("%-58s "):format(name), shown:format(value), " ", unit, "  ",
    sign and sign .. " " .. shown:format(bound) .. (ok and "  ok" or "  NO") or "", "\n")
end

local function gib(n) return n / 2 ^ 30 end

-- What holds for every streamed case: the pool's peak is the plan's, and the bytes that move are. Reads of the next
-- step are under way at both ends of the measured steps: with homes on disk three blocks of them may differ.
local function as_planned(name, c)
  local spare = c.planned.reads > 0 and 3 * c.planned.disk_read / c.planned.reads / #c.samples or 0
  line(name .. ": pool peak less plan", c.peak - c.planned_peak, "bytes", "==", 0)
  line(name .. ": link bytes off the plan", math.abs(c.per_step.link - c.planned.link), "bytes", "<=", spare)
  if spare > 0 then
    line(name .. ": disk bytes off the plan", math.abs(c.per_step.disk - c.planned.disk_read), "bytes", "<=", spare)
  end
end

-- The cases of a result, each named and held against `bounds` = {ratio, roof, ms, gib}.
local function cases(name, bounds)
  local r = result(name)
  for i, c in ipairs(r and r.cases or {}) do
    local b, title = bounds[i] or bounds, ("%s %s T=%d x%d"):format(c.home, c.mode, c.row_tokens, c.rows * c.micros)
    if b.ratio then
      line(("%s / floor (%s)"):format(title, c.floor_edge), c.ratio, "", "<=", b.ratio)
    end
    line(title .. " step", c.median * 1e3, "ms", b.ms and "<=", b.ms)
    line(title .. " / the plan's simulation", c.median / c.simulated, "", b.roof and "<=", b.roof)
    if b.gib then line(title .. " pool", gib(c.peak), "GiB", "<=", b.gib) end
    as_planned(title, c)
    for _, part in ipairs(c.profile and { "GEMM", "attention", "elementwise", "waiting" } or {}) do
      line(("%s: share of %s"):format(title, part), c.profile.shares[part] / c.profile.step, "")
    end
  end
  return r
end

local function ops()
  local r = result "ops"
  for _, case in ipairs(r and r.cases or {}) do
    for _, op in ipairs(case.ops) do
      if op.name == "attention" then
        local at = ("attention T=%d %%s / rate of products"):format(case.tokens)
        local bound = case.tokens == 8192
        line(at:format("forward"), op.forward.gemm_share, "", bound and ">=", 0.38)
        line(at:format("backward"), op.backward.gemm_share, "", bound and ">=", 0.22)
      end
    end
  end
end

local function tiny(turn)
  local ours, torch = result("tiny64-" .. turn), result("torch64-" .. turn)
  for _, c in ipairs(ours and ours.cases or {}) do
    local function tell(name, ...) line(("64 tiny blocks, turn %d, %s"):format(turn, name), ...) end
    if c.mode == "empty" then
      tell("host in an empty visit", c.per_step.issue / c.per_step.visits * 1e6, "us", "<=", 50)
      tell("all of an empty visit", c.median / c.per_step.visits * 1e6, "us")
    else
      tell("step", c.median * 1e3, "ms")
      if torch then
        tell("step of PyTorch's streaming", torch.median * 1e3, "ms")
        tell("times its step rate", torch.median / c.median, "x", ">=", 5)
      end
    end
  end
end

ops()
tiny(1)
tiny(2)
cases("ram", { { ratio = 1.05, gib = 0.95 }, { ratio = 1.05, gib = 1.7 } })
cases("8192", { ratio = 1.08, gib = 3.5 })
local kept = result "kept"
if kept and kept.resident["train/8192/1"] then
  line("resident T=8192, activations kept", kept.resident["train/8192/1"].median * 1e3, "ms", "<=", 504)
end
cases("infer", { ratio = 1.02 })
cases("4x2048", { ms = 600 })
cases("16x2048", { ms = 1860, gib = 2.3 })
cases("4x8192", { ms = 2200, gib = 3.8 })
local eight = cases("8x512", {})
local c = eight and eight.cases[1]
if c and c.resident_micro then
  local least = math.max(c.floor, 8 * c.resident_micro)
  line("8 x 512 / max(floor, 8 x resident micro-step)", c.median / least, "", "<=", 1.1)
end
cases("vram8", { roof = 1.08 })
cases("disk", { ratio = 1.05 })
cases("half", { ratio = 1.05 })
local idle = cases("idle", {})
if idle and idle.cases[2] then
  line("ram=auto / homes in RAM, T=128", idle.cases[2].median / idle.cases[1].median, "", "<=", 1.02)
  line("ram=auto: read from disk in a step", idle.cases[2].per_step.disk, "bytes", "==", 0)
end
bs.write_file(folder .. "/figures.json", bs.json.encode { figures = lines, missed = missed } .. "\n")
io.write(("%d figures, %d missed\n"):format(#lines, missed))
os.exit(missed == 0 and 0 or 1)
