-- SPDX-License-Identifier: Apache-2.0
--- Passes: a walk of a program by all micro-batches of a step. Visits come from the stream in the program's order;
-- each one runs every micro-batch (visits.lua) and hands boundaries to the next. Ops are issued here, transfers never:
-- no slot, event or copy is seen above the stream.
--
-- A pass is a table. What is asked of it:
--   micros          number of micro-batches
--   labelled        labelled tokens of all of them: the divisor of loss and gradient
--   train, step     dropout is on; its counter
--   head            "train", "loss", "logits" or "last"; nil: a stack, which has no head
--   lowest          the lowest layer with a backward pass; config.layers: none
--   input_gradient  fn(layer) -> is the gradient of the layer's input wanted? (with a backward pass only)
--   observe         fn(kind, layer, micro, array), sees hidden states; or nil
--   prepare         fn(layer, micro), is called before the ops of a layer are issued; or nil
--   lengths         of micro-batch j at [j + 1]: the tokens that a rotation which depends on the length goes by; or
--                   nil: its longest row
--   cache           keys and values of earlier tokens; or nil
--   next            the same program follows: it is pushed before the last visits
--   cyclic          slots are given as if the same program followed, whether it is pushed yet or not
-- and what its visits leave for later ones:
--   op_hash         hash of the ops of each stage's forward, which the recompute must repeat
--   context         of each micro-batch: what stages see of it
--   kept            scopes that were set aside with their activations
--   gathered        micro-batches whose embedding rows are on the device
--   offsets         of a staged layer: where each expert's rows begin in the order of its routing
local bs = require "bs"
local program = require "bs.instance.program"
local visits = require "bs.instance.visits"

local pass = {}
local K <const> = program.kind

-- After these visits the gradient goes down a layer, whose input comes back from the host meanwhile.
local descends = { [K.norm_backward] = true, [K.turn] = true, [K.backward] = true, [K.mix_backward] = true }

-- Visits before the end of a pass at which the program that follows is pushed: its first blocks then arrive while the
-- last ones of this pass are computed.
local EARLY <const> = 2

--- Run the visits of a program, which has been pushed, on an instance.
function pass.visit_all(inst, list, p)
  if p.observe and not inst.spec.model.embed then visits.observe_embedding(inst, p) end
  local ahead = p.next and #list - math.min(EARLY, #list - 1)
  for i = 1, #list do
    local visit = inst.stream:next()
    if descends[visit.kind] and visit.layer - 1 >= p.lowest then inst.store:fetch(inst.keys.h[visit.layer - 1]) end
    visits.run(inst, p, visit)
    if i == ahead then
      inst.stream:push(list, true)
      inst.pushed_next = list
    end
  end
  inst.stream:end_visit()
  if p.head == "loss" then
    for j = 0, p.micros - 1 do inst.head:finish(j) end
  end
end

--- Undo what a failed pass has left: visits that are pushed and reads that are on their way, and the gradients so far.
-- Parameters are what they were, since only the optimizer changes them. A lost device refuses both calls: the error
-- that came first tells more, so theirs are dropped.
function pass.undo(inst)
  inst.pushed, inst.pushed_next = nil, nil
  pcall(inst.stream.abort, inst.stream)
  if inst.params then pcall(inst.params.zero_grad, inst.params) end
end

--- Run a pass. Whatever is raised in it leaves the instance usable. inst.pushed: the program whose visits the pass
-- before has already pushed (its `next`), or nil.
function pass.run(inst, list, p)
  p.op_hash, p.context, p.kept, p.gathered, p.offsets = {}, {}, {}, {}, {}
  if inst.pushed ~= list then
    if inst.pushed then inst.stream:abort() end
    inst.stream:push(list, (p.cyclic or p.next) == true)
  end
  inst.pushed = nil
  local ok, err = xpcall(pass.visit_all, bs.traceback, inst, list, p)
  for _, kept in pairs(p.kept) do kept:close() end -- of a pass that failed
  if ok then
    inst.pushed, inst.pushed_next = inst.pushed_next, nil
    return
  end
  pass.undo(inst)
  error(err, 0)
end

return pass
