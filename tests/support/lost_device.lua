-- SPDX-License-Identifier: Apache-2.0
--- A small training run whose device fails at some operation: lost_device.lua MODEL OPERATION OUT DEVICE DTYPE
package.path = "tests/support/?.lua;" .. package.path
local job = require "bs.job"
local tiny = require "tiny"

local model, operation, out, device, dtype = table.unpack(arg)
local j <close> = job.new {
  model = model, micro_tokens = 24, lora = { r = 4, alpha = 8 }, home = "disk", device = device, dtype = dtype,
  device_options = { fail_call = math.tointeger(tonumber(operation)) },
}
local data = { step = function(_, s) return { tiny.micro(s, 300, { 9, 11 }, 2) } end }
j:run { data = data, steps = 3, lr = 1e-2, out = out, say = function(...) print(string.format(...)) end }
