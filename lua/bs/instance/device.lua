-- SPDX-License-Identifier: Apache-2.0
--- The device of a job: how it is opened, how much of its memory a plan may count on, and what happens when
-- that memory is gone by the time the plan is built.
local bs = require "bs"
local plan = require "bs.plan.choose"

local device = {}

-- Exit status where a device cannot be had: a name that is none, too little memory; the machine's reasons are 1.
local exits = { arg = 2, devmem = 3 }

--- The device of the settings, and what it is to compute in: "auto" is left to the checkpoint where there is a
-- choice.
function device.open(cfg)
  if cfg.device:match("meta$") and not cfg.dry then
    bs.fail(2, "device=%s computes nothing; it is for dry runs", cfg.device)
  end
  local options = { threads = cfg.threads }
  for key, value in pairs(cfg.device_options or {}) do options[key] = value end
  local ok, dev = pcall(bs.device.open, cfg.device, options)
  if not ok then
    local code = bs.code(dev)
    bs.fail(code and (exits[code] or 1) or 2, "device=%s: %s", cfg.device, (dev:gsub("^bs%.device%.open: %w+: ", "")))
  end
  if dev:props().bf16 then return dev, cfg.dtype end
  if cfg.dtype == "bf16" then
    dev:close()
    bs.fail(2, "dtype=bf16: device %s computes in f32", cfg.device)
  end
  return dev, "f32"
end

-- vram= is no more than what is free there, less what kernels and libraries load later.
local function limit(job)
  local free = math.floor(job.device:props().total_bytes * 0.95)
  if job.cfg.vram < free then return end
  job.cfg.vram = free
  job.vram_note = ("device %s has no more free"):format(job.cfg.device)
end

--- Bound vram= by the memory of a GPU, and know that it was. (That of the cpu device is the host's, which is not
-- counted.)
function device.limit(job)
  if job.cfg.device:match("cuda") then limit(job) end
end

local function say(job, fmt, ...)
  local line = fmt:format(...)
  if job.cfg.log then return job.cfg.log(line) end
  io.stderr:write("bslua: ", line, "\n")
end

--- Plan and build: build(job) makes what job.choice says, drop(job) takes it apart. If the memory of the plan is
-- refused because somebody else has taken it meanwhile, there is one more plan with what is left; one that
-- does not fit ends with exit status 3.
function device.start(job, build, drop)
  job.choice = plan.choose(job)
  for attempt = 1, 2 do
    local ok, err = xpcall(build, bs.traceback, job)
    if ok then return end
    if bs.code(err) ~= "devmem" then error(err, 0) end
    drop(job)
    local peak = job.choice.peak
    limit(job)
    if attempt == 2 or job.cfg.vram >= peak then bs.fail(3, "%s", err) end
    job.choice = plan.choose(job)
    say(job, "device %s: %s of memory were free for the plan and are not any more; planned again for %s",
      job.cfg.device, plan.mib(peak), plan.mib(job.choice.peak))
  end
end

return device
