-- SPDX-License-Identifier: Apache-2.0
--- The training loop: steps over a data set, evaluation, progress lines, the saved adapter. While it runs,
-- the first signal (Ctrl-C, SIGTERM, a closed terminal or pipe) ends it at the border of a step, and the program ends
-- by that signal. What fails in a step leaves the adapter of the steps before it.
local bs = require "bs"
local budget = require "bs.plan.budget"
local diagnose = require "bs.train.diagnose"
local schedule = require "bs.train.schedule"

local loop = {}

--- Options of a run; see loop.train.
loop.rules = {
  data = { type = "table", required = true }, valid = { type = "table" },
  steps = { type = "integer", least = 1, required = true },
  lr = { type = "number", least = 0, finite = true, default = 2e-4 },
  schedule = { words = schedule.kinds }, warmup = { type = "number", least = 0, finite = true },
  weight_decay = { type = "number", least = 0, finite = true }, clip = { type = "number", least = 0, finite = true },
  eval_every = { type = "integer", least = 0, default = 0 }, out = { type = "string" },
  say = { type = "function", default = function() end },
}

-- The signals are the host program's; under a stock lua there is no such module.
local host = package.preload["bs.host"] and require "bs.host"

local function interrupted() return host and host.interrupted() end

local function clock(seconds)
  local n = math.floor(seconds + 0.5)
  if n < 100 then return ("%ds"):format(n) end
  if n < 6000 then return ("%dm%02ds"):format(n // 60, n % 60) end
  return ("%dh%02dm"):format(n // 3600, n % 3600 // 60)
end

local function mb(n) return ("%.1f MB"):format(n / 1e6) end

-- Cumulative counters that a step's numbers are differences of.
local function counters(job)
  local inst = job.instance
  local s, r, b = inst.stream:stats(), inst.embedding:stats(), inst.store:stats()
  return {
    time = bs.now(), disk = s.disk_read, rows = r.read, link = s.link_bytes, boundary = b.out_bytes + b.back_bytes,
    stall = s.stall_disk_s + s.stall_pinned_s + s.stall_copy_s + s.stall_compute_s, disk_stall = s.stall_disk_s,
  }
end

--- What is resident where, what the last step moved and what it waited for: one line.
function loop.residency(job, before, after)
  local inst = job.instance
  local s, e, warm = inst.stream:stats(), inst.engine:stats(), inst.placement:bytes(true)
  local seconds, unpinned = math.max(after.time - before.time, 1e-9), job.device:props().unpinned_bytes
  return ("%d blocks on the device, %d in ram; pool %s of %s; step read %s (plan %s) + rows %s, link %s; "
    .. "waited for disk %.0f%%%s"):format(s.resident_device, s.resident_host, budget.mib(e.peak_bytes),
    budget.mib(e.pool_bytes), mb(after.disk - before.disk), mb(warm.disk_read), mb(after.rows - before.rows),
    mb(after.link - before.link), 100 * (after.disk_stall - before.disk_stall) / seconds,
    unpinned > 0 and ("; %s of ram are not page-locked"):format(budget.mib(unpinned)) or "")
end

--- Mean loss over all rows of a data set, weighted by trained tokens; nil when a signal came. One that is not finite
-- ends with exit status 5.
function loop.evaluate(job, data)
  local sum, n = 0, 0
  for i = 1, data:passes() do
    if interrupted() then return nil end
    local micros = data:pass(i)
    local loss, count = job:walk(micros, { mode = "loss" })
    if not diagnose.finite(loss) then
      diagnose.run(job.instance, micros, "the loss of the evaluated rows", "the evaluation ends here")
    end
    sum, n = sum + loss * count, n + count
  end
  return sum / n
end

local function held_out(job, o, when)
  local loss = o.valid and loop.evaluate(job, o.valid)
  if loss then o.say("held-out loss %s %.4f (perplexity %.3f)", when, loss, math.exp(loss)) end
  return loss or nil
end

local function one_step(job, o, step, result)
  local before = counters(job)
  local micros = o.data:step(step)
  local ready = bs.now()
  local lr = result.rate(step)
  local r = job:step(micros, {
    lr = lr, weight_decay = o.weight_decay, clip = o.clip, next = step < o.steps and not result.eval_due(step),
  })
  local after = counters(job)
  result.steps, result.tokens = step, result.tokens + r.tokens
  result.losses[step], result.reads[step] = r.loss, after.disk - before.disk
  result.data_seconds = result.data_seconds + ready - before.time
  result.step_seconds = result.step_seconds + after.time - before.time
  o.say("step %d/%d | loss %.4f | lr %.2e | norm %.3f | %d tokens, %d trained | %.0f tok/s | %s left", step, o.steps,
    r.loss, lr, r.norm, r.tokens, r.labelled, result.tokens / result.step_seconds,
    clock(result.step_seconds / step * (o.steps - step)))
  if step <= 2 or step % 10 == 0 or step == o.steps then o.say("  %s", loop.residency(job, before, after)) end
end

local function to_save(o, result) return o.out and o.out ~= "" and result.steps > 0 end

local function save(job, o, result)
  if not to_save(o, result) then return end
  job:save(o.out)
  result.saved = true
  o.say("adapter saved in %s", o.out)
end

-- Something failed: a step, the rows for it, an evaluation. A step is a transaction, so the parameters are those of the
-- steps before. The logits of a save's test would need the checkpoint, which may be what failed. A second signal asks
-- for an end at once.
local function rescue(job, o, result)
  if not to_save(o, result) or bs.cancelled() then return end
  local what = ("the adapter of %d steps"):format(result.steps)
  if job.instance.applying then
    bs.log("%s is not saved: what failed had changed a part of it", what)
    return
  end
  local ok, why = pcall(job.save, job, o.out, { walk = false })
  if ok then
    bs.log("%s is saved in %s, its bits tested, its logits not; to train on from there: adapter=%s", what, o.out, o.out)
  else
    bs.log("%s could not be saved: %s", what, tostring(why))
  end
end

-- The steps, and the evaluations between them.
local function run_steps(job, o, result)
  for step = 1, o.steps do
    if interrupted() then break end
    one_step(job, o, step, result)
    if result.eval_due(step) then
      result.last_eval = held_out(job, o, ("after step %d"):format(step)) or result.last_eval
    end
  end
end

--- Train. o: {data, steps, lr, schedule and warmup (see bs.train.schedule; default constant), weight_decay, clip,
-- valid and eval_every (held-out rows are evaluated before, every so many steps, and at the end), out (folder
-- of the adapter; it is saved before the last evaluation, and when a step fails), say(fmt, ...) prints a line}. Returns
-- {steps, tokens, losses, reads, first_eval, last_eval, seconds, step_seconds, data_seconds, saved, interrupted = the
-- name of a signal}.
function loop.train(job, o)
  local _ <close> = host and host.hold()
  local every, start = o.valid and o.eval_every or 0, bs.now()
  local result = {
    steps = 0, tokens = 0, losses = {}, reads = {}, step_seconds = 0, data_seconds = 0,
    rate = schedule.new { lr = o.lr, steps = o.steps, kind = o.schedule, warmup = o.warmup },
    eval_due = function(step) return every > 0 and step % every == 0 and step < o.steps end,
  }
  result.first_eval = held_out(job, o, "before training")
  local ok, err = xpcall(run_steps, bs.traceback, job, o, result)
  if not ok then
    rescue(job, o, result)
    error(err, 0)
  end
  result.interrupted = interrupted()
  if result.interrupted then
    o.say("stopped by SIG%s after step %d of %d", result.interrupted, result.steps, o.steps)
  end
  save(job, o, result)
  if not result.interrupted then
    result.last_eval = held_out(job, o, ("after step %d"):format(result.steps)) or result.last_eval
  end
  result.interrupted = interrupted()
  result.seconds = bs.now() - start
  return result
end

return loop
