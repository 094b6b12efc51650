-- SPDX-License-Identifier: Apache-2.0
--- The optimizer step, a transaction: only `apply` at its end changes parameters. Whatever is raised before it leaves
-- them as they were: a failed pass undoes itself (instance/pass.lua), a number that is not finite is undone here.
local bs = require "bs"
local diagnose = require "bs.train.diagnose"
local options = require "bs.settings.options"

local step = {}

local function finite(default) return { type = "number", finite = true, default = default } end

--- Options of a step: of AdamW (Loshchilov & Hutter 2019; clip bounds the gradient's global norm, 0 is off); apply:
-- false leaves the parameters alone; next: the same program follows, so that its first blocks are read meanwhile.
step.rules = {
  lr = finite(2e-4), beta1 = finite(0.9), beta2 = finite(0.999), eps = finite(1e-8), weight_decay = finite(0),
  clip = finite(1.0),
  apply = { type = "boolean", default = true }, next = { type = "boolean", default = false },
}

-- Base weights are updated in their homes, so these must be f32 and on the device.
local function check_update(spec)
  if not spec.fixed then return end
  bs.fail("usage", 'trainable="base": weights are updated where every block\'s home is the device and every tensor '
    .. "is stored as f32; %s (apply=false gives the gradients)", spec.fixed)
end

-- Parameters must not learn from NaN or infinity.
local function check_finite(inst, micros, what, value)
  if diagnose.finite(value) then return end
  inst:undo()
  diagnose.run(inst, micros, what)
end

--- One step over a list of micro-batches. number: of the step, from 1. o: see step.rules. Returns {loss, norm, tokens,
-- labelled}, and whether parameters have changed.
function step.run(inst, micros, number, o)
  o = options.read("step: ", o, step.rules)
  if o.apply then check_update(inst.spec) end
  local loss, labelled = inst:forward_backward(micros, { step = number, next = o.next })
  local norm = inst.params:norm()
  if loss then check_finite(inst, micros, "loss", loss) end
  check_finite(inst, micros, "the gradient's norm", norm)
  if o.apply then
    inst.applying = true -- left so by what fails there: a part of the parameters has changed
    inst:apply({
      step = number, lr = o.lr, beta1 = o.beta1, beta2 = o.beta2, eps = o.eps, weight_decay = o.weight_decay,
      clip = o.clip,
    }, norm)
    inst.applying = nil
  end
  local tokens = 0
  for j = 0, #micros - 1 do tokens = tokens + inst.batch:tokens(j) end
  return { loss = loss, norm = norm, labelled = labelled, tokens = tokens }, o.apply
end

return step
