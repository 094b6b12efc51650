-- SPDX-License-Identifier: Apache-2.0
--- The learning rate of a step: a linear warm-up, then constant, linear or cosine.
local bs = require "bs"

local schedule = { kinds = { "constant", "linear", "cosine" } }

local LEAST_WARMUP <const> = 5 -- steps, of a warm-up that is given as a share
local FLOOR <const> = 0.1 -- of the learning rate, where the cosine ends

-- Share of the learning rate after the warm-up; p: 0 at the first of these steps, 1 at the last.
local shape = {
  constant = function() return 1 end,
  -- Zero is the step after the last: a step of zero would be for nothing.
  linear = function(p, n) return 1 - p * (n - 1) / n end,
  cosine = function(p) return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * p)) / 2 end,
}

--- Steps of a warm-up in a run of `steps`. warmup: below 1 a share of the steps, at least 5 but at most half
-- of them; from 1 on their number; 0: none.
function schedule.warmup(warmup, steps)
  if warmup <= 0 then return 0 end
  if warmup >= 1 then return math.min(math.floor(warmup), steps) end
  return math.min(math.max(math.ceil(warmup * steps), LEAST_WARMUP), steps // 2)
end

--- o: {lr, steps, kind = "constant" | "linear" | "cosine", warmup (default 0)}. Returns f(step) -> lr for step
-- 1..steps: no step has a rate of 0, the first step after the warm-up has lr, the last one lr (constant),
-- next to nothing (linear) or lr/10 (cosine).
function schedule.new(o)
  local f = shape[o.kind or "constant"]
  if not f then
    bs.fail("usage", "schedule=%s; one of %s is expected", tostring(o.kind), table.concat(schedule.kinds, ", "))
  end
  local warm = schedule.warmup(o.warmup or 0, o.steps)
  local after = o.steps - warm
  return function(step)
    if step <= warm then return o.lr * step / (warm + 1) end
    return o.lr * f(after > 1 and (step - warm - 1) / (after - 1) or 0, after)
  end
end

return schedule
