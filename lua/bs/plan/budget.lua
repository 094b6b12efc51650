-- SPDX-License-Identifier: Apache-2.0
--- The budgets of a job: vram=, the device pool, and ram=, every other accounted host byte.
local bs = require "bs"
local args = require "bs.settings.args"

local budget = {}

--- Bytes as messages write them.
function budget.mib(n) return ("%.1f MiB"):format(n / 2 ^ 20) end

-- Units that a size is written in, the coarsest first; written as tenths of a unit where `tenths`.
local typed <const> = {
  { bytes = 1 << 20, format = "%dMiB" }, { bytes = 1 << 20, tenths = true, format = "%d.%dMiB" },
  { bytes = 1 << 10, format = "%dKiB" }, { bytes = 1, format = "%d" },
}

-- A size in the coarsest of these units that makes it less than a percent larger: its text and its bytes.
local function coarse(n)
  for _, u in ipairs(typed) do
    local scale = u.tenths and 10 or 1
    local count = (n * scale + u.bytes - 1) // u.bytes
    local bytes = count * u.bytes // scale
    if bytes - n <= n // 128 then
      return u.tenths and u.format:format(count // 10, count % 10) or u.format:format(count), bytes
    end
  end
end

--- A size as a command line takes it: not less, and less than a percent more.
function budget.typed(n) return (coarse(n)) end

--- The bytes that are read from what budget.typed writes; of a budget that is none, itself.
function budget.rounded(n)
  local _, bytes = coarse(n)
  return bytes
end

--- A budget among the settings of a recipe as a job takes it: bytes, a fraction of what is free, or "auto".
function budget.read(cfg, name)
  local text = cfg[name]
  local value = text == "auto" and text or args.size(text) or args.fraction(text)
  if not value or type(value) == "number" and (value < 0 or math.type(value) == "float" and value > 1) then
    bs.fail("usage", "%s=%s: a size such as 800MiB, auto, or a fraction of what is free such as 0.5 is expected", name,
      text)
  end
  return value
end

-- What "auto" takes of the free memory. The pool of a CPU device and everything else share one memory.
local AUTO <const> = { gpu = { vram = 1.0, ram = 0.75 }, cpu = { vram = 0.5, ram = 0.25 } }

--- Device memory that a pool may take of a GPU: what is free, less what kernels and libraries load later.
function budget.free(device) return math.floor(device:props().total_bytes * 0.95) end

--- Bytes for a job's settings vram and ram on a device: {vram, ram, note = why vram is less than was asked for}. gpu:
-- vram is bounded by what the device has free; that of the cpu device is the host's, and is not.
function budget.bytes(cfg, device, gpu)
  local out = {}
  for _, name in ipairs { "vram", "ram" } do
    local share = cfg[name] == "auto" and AUTO[gpu and "gpu" or "cpu"][name] or cfg[name]
    if math.type(share) == "float" then
      share = math.floor(share * (gpu and name == "vram" and budget.free(device) or bs.memory_available()))
    end
    out[name] = share
  end
  if gpu then budget.limit(out, cfg.device, budget.free(device)) end
  return out
end

--- Lower vram to what a device has free, and say why.
function budget.limit(budgets, device_name, free)
  if budgets.vram < free then return end
  budgets.vram, budgets.note = free, ("device %s has no more free"):format(device_name)
end

return budget
