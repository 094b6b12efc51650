-- SPDX-License-Identifier: Apache-2.0
--- Streamed equals resident whatever the order in which operations of different queues end: fifty seeds of
-- random delays before every operation, home=disk with two slots, three steps, every byte.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"
local tiny = require "tiny"

local SEEDS <const>, MOST_US <const> = 50, 40

local dir = tiny.folder("jitter-" .. target.dtype)
tiny.checkpoint(dir, qwen3, tiny.qwen3_config { vocab_size = 200, num_hidden_layers = 3 }, "bf16")

-- Losses, a hash of all gradients, a hash of the adapters; what a check device found.
local function train(settings)
  settings.model, settings.micro_tokens, settings.micros = dir, 24, 2
  settings.lora = { r = 4, alpha = 8, dropout = 0.1, top_fraction = 0.7 }
  local j <close> = job.new(target.settings(settings))
  local losses, grads = {}, 0
  for s = 1, 3 do
    local micros = { tiny.micro(s, 200, { 9, 11 }, 2), tiny.micro(s + 50, 200, { 20 }) }
    losses[s] = j:step(micros, { lr = 1e-2, next = s < 3 }).loss
    grads = bs.hash(string.pack("<i8", tiny.digest(j:gradients())), grads)
  end
  local violations, text = j.device:violations()
  assert(violations == 0, text)
  return { losses = losses, grads = grads, adapters = tiny.digest(j:parameters()) }
end

describe("under random delays", function()
  local want
  setup(function() want = train { home = "gpu" } end)
  for _, device in ipairs { target.device, target.check } do
    it("a job streamed from disk on " .. device .. " gives the bits of a resident one", function()
      for seed = 1, SEEDS do
        local options = { jitter_us = MOST_US, jitter_seed = seed }
        assert.same(want, train { home = "disk", dev_slots = 2, host_slots = 2, device = device,
                                  boundaries = seed % 2 == 0 and "host" or "device", device_options = options })
      end
    end)
  end
end)
