-- SPDX-License-Identifier: Apache-2.0
--- One small job, streamed from disk through real slots, three steps, against the same job resident:
-- run in every build, so that the sanitizers see streamer, driver, bindings and interpreter together.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"
local tiny = require "tiny"

local dir = tiny.folder("streamed_job")
tiny.checkpoint(dir, qwen3, tiny.qwen3_config(), "bf16")

local function train(settings)
  settings.model, settings.micro_tokens, settings.micros = dir, 24, 2
  settings.lora = { r = 4, alpha = 8, dropout = 0.1, top_fraction = 0.6 }
  local j <close> = job.new(target.settings(settings))
  local losses, hash = {}, 0
  for s = 1, 3 do
    losses[s] = j:step({ tiny.micro(s, 300, { 9, 11 }, 2), tiny.micro(s + 50, 300, { 20 }) },
      { lr = 1e-2, next = s < 3 }).loss
  end
  local names, values = {}, j:parameters()
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do hash = bs.hash(values[name]:bytes(), hash) end
  return losses, hash
end

-- Weights updated in their homes, saved, and streamed from what was saved.
local function train_base()
  local base = tiny.folder("streamed_job_base")
  tiny.checkpoint(base, qwen3, tiny.qwen3_config { tie_word_embeddings = true }, "f32")
  local micros, loss = { tiny.micro(1, 300, { 9, 11 }, 2) }
  do
    local j <close> = job.new {
      model = base, trainable = "base", home = "gpu", micro_tokens = 24, device = target.check,
    }
    for s = 1, 2 do j:step(micros, { lr = 1e-2, next = s < 2 }) end
    loss = j:walk(micros, { mode = "loss" })
    j:save_base(base .. "/saved")
  end
  local j <close> = job.new {
    model = base .. "/saved", trainable = "none", home = "disk", micro_tokens = 24, device = target.device,
  }
  assert(j:walk(micros, { mode = "loss" }) == loss, "the saved base gives another loss")
end

train_base()
local resident, want = train { home = "gpu" }
local streamed, got = train { home = "disk", dev_slots = 2, host_slots = 2, device = target.check }
for s = 1, 3 do assert(resident[s] == streamed[s], "losses differ in step " .. s) end
assert(want == got, "adapters differ")
print(("streamed equals resident over 3 steps, losses %.4f %.4f %.4f"):format(table.unpack(streamed)))
