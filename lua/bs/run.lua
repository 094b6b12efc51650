-- SPDX-License-Identifier: Apache-2.0
--- The training loop: steps over a data set, evaluation, progress lines, the saved adapter.
local bs = require "bs"
local plan = require "bs.plan"

local run = {}

local function clock(seconds)
  local n = math.floor(seconds + 0.5)
  if n < 100 then return ("%ds"):format(n) end
  if n < 6000 then return ("%dm%02ds"):format(n // 60, n % 60) end
  return ("%dh%02dm"):format(n // 3600, n % 3600 // 60)
end

local function mb(n) return ("%.1f MB"):format(n / 1e6) end

-- Cumulative counters that a step's numbers are differences of.
local function counters(job)
  local s, r, b = job.stream:stats(), job.rows:stats(), job.store:stats()
  return {
    time = bs.now(), disk = s.disk_read, rows = r.read, link = s.link_bytes, boundary = b.out_bytes + b.back_bytes,
    stall = s.stall_disk_s + s.stall_pinned_s + s.stall_copy_s + s.stall_compute_s, disk_stall = s.stall_disk_s,
  }
end

--- What is resident where, what the last step moved and what it waited for: one line.
function run.residency(job, before, after)
  local s, e, warm = job.stream:stats(), job.engine:stats(), job.plan:bytes(true)
  local seconds = math.max(after.time - before.time, 1e-9)
  return ("%d blocks on the device, %d in ram; pool %s of %s; step read %s (plan %s) + rows %s, link %s; "
    .. "waited for disk %.0f%%"):format(s.resident_device, s.resident_host, plan.mib(e.peak_bytes),
    plan.mib(e.pool_bytes), mb(after.disk - before.disk), mb(warm.disk_read), mb(after.rows - before.rows),
    mb(after.link - before.link), 100 * (after.disk_stall - before.disk_stall) / seconds)
end

--- Mean loss over all rows of a data set, weighted by trained tokens.
function run.evaluate(job, data)
  local sum, n = 0, 0
  for i = 1, data:passes() do
    local loss, count = job:walk(data:pass(i), "loss")
    sum, n = sum + loss * count, n + count
  end
  return sum / n
end

--- Train. o: {data, valid, steps, lr, weight_decay, clip, eval_every, out, say}. say(fmt, ...) prints a line.
-- Returns {first_eval, last_eval, losses, seconds, read_per_step}.
function run.train(job, o)
  local say, result = o.say, { losses = {}, reads = {} }
  if o.valid then
    result.first_eval = run.evaluate(job, o.valid)
    say("held-out loss before training %.4f", result.first_eval)
  end
  local start, tokens = bs.now(), 0
  for step = 1, o.steps do
    local eval_now = o.valid and (step == o.steps or o.eval_every > 0 and step % o.eval_every == 0)
    local before = counters(job)
    local r = job:step(o.data:step(step), {
      lr = o.lr, weight_decay = o.weight_decay, clip = o.clip, next = step < o.steps and not eval_now,
    })
    local after = counters(job)
    tokens = tokens + r.tokens
    result.losses[step], result.reads[step] = r.loss, after.disk - before.disk
    local elapsed = bs.now() - start
    say("step %d/%d | loss %.4f | norm %.3f | %d tokens, %d trained | %.0f tok/s | %s left", step, o.steps, r.loss,
      r.norm, r.tokens, r.labelled, tokens / elapsed, clock(elapsed / step * (o.steps - step)))
    if step <= 2 or step % 10 == 0 or step == o.steps then
      say("  %s", run.residency(job, before, after))
    end
    if eval_now then
      result.last_eval = run.evaluate(job, o.valid)
      say("held-out loss after step %d %.4f", step, result.last_eval)
    end
  end
  result.seconds = bs.now() - start
  if o.out and o.out ~= "" then
    job:save(o.out)
    say("adapter saved in %s", o.out)
  end
  return result
end

return run
