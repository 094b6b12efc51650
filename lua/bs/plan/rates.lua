-- SPDX-License-Identifier: Apache-2.0
--- The rates that plans are scored with: bytes/s of disk and link, FLOP/s of products.
local bs = require "bs"
local measure = require "bs.plan.measure"

local rates = {}

--- Fixed, so that a plan does not depend on the day.
rates.fixed = {
  cpu = { disk = 2e9, link = 25e9, flops = 2e11 },
  gpu = { disk = 2e9, link = 25e9, flops = 1e14 },
}

--- The setting rates= of a job: {link, disk, flops}, what is absent being fixed, or "measure": those of this machine,
-- now. Anything else ends with exit status 2.
function rates.check(given)
  if given == nil or given == "measure" then return end
  local names = "measure, or a table of link, disk and flops"
  if type(given) ~= "table" then bs.fail("usage", "rates=%s; %s is expected", tostring(given), names) end
  for name, v in pairs(given) do
    if not rates.fixed.cpu[name] then bs.fail("usage", "rates.%s: unknown; %s is expected", tostring(name), names) end
    if type(v) ~= "number" or not (v > 0 and v < math.huge) then
      bs.fail("usage", "rates.%s=%s; a number above 0 is expected", name, tostring(v))
    end
  end
end

--- {disk, link, flops} for a checked setting, on a device.
function rates.of(given, device, spec, gpu)
  if given == "measure" then return measure.rates(device, spec.model, spec.batch.tokens, spec.io) end
  local out = {}
  for name, v in pairs(gpu and rates.fixed.gpu or rates.fixed.cpu) do out[name] = v end
  for name, v in pairs(given or {}) do out[name] = v end
  return out
end

return rates
