-- SPDX-License-Identifier: Apache-2.0
--- A small training run to which signals come: interrupted_job.lua MODEL WHEN SIGNALS OUT [coroutine]
--   WHEN     a number: in that call of the family's layer, forward or backward; "any": some time from step 3 on;
--            "valid": before the first evaluation; "steps=N": never, N steps
--   SIGNALS  INT, TERM or INT,TERM: the second after the first
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local host = require "bs.host"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local tiny = require "tiny"

local model, when, signals, out, where = table.unpack(arg)
local steps = tonumber(when:match("^steps=(%d+)$")) or 1000000
local kill = {}
for name in signals:gmatch("%a+") do kill[#kill + 1] = ("kill -%s %d"):format(name, bs.pid()) end

-- A signal from a child that popen starts: system() would ignore SIGINT meanwhile.
local function signal_now()
  io.popen(kill[1]):close()
  repeat until host.interrupted()
  if kill[2] then io.popen(kill[2]):close() end
end

local call, layer = math.mininteger, qwen3.layer
function qwen3.layer(...)
  local y = layer(...)
  call = call + 1
  if call == tonumber(when) then signal_now() end
  return y
end

-- A child that sends the signals some time after it has read a line.
local child <close> = io.popen("read _ && { " .. table.concat(kill, "; ") .. "; }", "w")

local rows = {}
function rows.step(_, step)
  if when == "any" and step == 3 then
    child:write("now\n")
    child:flush()
  end
  return { tiny.micro(step, 300, { 9, 11 }, 2), tiny.micro(step + 50, 300, { 20 }) }
end

-- Held-out rows that cannot be read: nothing is, once a signal has come.
local held_out = {}
function held_out.passes()
  signal_now()
  return 1
end

local j <close> = job.new {
  keep = 0,
  model = model, micro_tokens = 24, micros = 2, lora = { r = 4, alpha = 8 }, home = "disk", dev_slots = 1,
  host_slots = 1,
}
call = 0 -- those of the dry run do not count

local function train()
  return j:run {
    data = rows, steps = steps, lr = 1e-2, out = out, valid = when == "valid" and held_out or nil, eval_every = 1,
    say = function(...) print(string.format(...)) end,
  }
end
local r = where == "coroutine" and coroutine.wrap(train)() or train()
print("finished", r.steps, r.interrupted, j.steps_done)
