-- SPDX-License-Identifier: Apache-2.0
--- A job: a spec, a plan for it, the instance that both make on a device, and the optimizer's progress. Recipes,
-- parity, benches and tests drive it.
--
--   local job <close> = job.new { model = DIR, lora = {...}, vram = bytes, ram = bytes }
--   job:step(micros)          one optimizer step        job:walk(micros, {mode = "loss"})   mean loss
--   job:run{...}              the training loop         job:save(dir)                        the adapter, tested
--
-- A micro-batch is {row_len = {...}, ids = {...}, labels = {...} or nil, row_id = {...} or nil}.
-- Fields: cfg (settings), device, spec, model, plan, instance, steps_done.
local bs = require "bs"
local budget = require "bs.plan.budget"
local choose = require "bs.plan.choose"
local dry = require "bs.plan.dry"
local generate = require "bs.decode.generate"
local guard = require "bs.settings.guard"
local instance = require "bs.instance.instance"
local loop = require "bs.train.loop"
local open_device = require "bs.instance.open_device"
local options = require "bs.settings.options"
local parameters = require "bs.instance.parameters"
local rates = require "bs.plan.rates"
local save = require "bs.train.save"
local settings = require "bs.train.job_settings"
local spec = require "bs.instance.spec"
local step = require "bs.train.step"

local job = {}
local methods = {}
local mt = { __index = methods, __name = "bs.job" }

-- ---- making a job --------------------------------------------------------------------------------------

local function say(self, fmt, ...)
  local line = fmt:format(...)
  if self.cfg.log then return self.cfg.log(line) end
  bs.log("%s", line)
end

-- What a plan is chosen by; only the budgets may change between two choices.
local function wishes(self, gpu, cache_channels)
  local cfg = self.cfg
  return {
    needs = dry.needs(self.spec, self.device:props().workspace_bytes, cache_channels),
    rates = rates.of(cfg.rates, self.device, self.spec, gpu), home = cfg.home, boundaries = cfg.boundaries,
    dev_slots = cfg.dev_slots, host_slots = cfg.host_slots, keep = cfg.keep,
    knobs = cfg.knobs,
  }
end

-- Plan and build. If the memory of the plan is refused because somebody else has taken it meanwhile, there is one
-- more plan with what is left; one that does not fit ends with exit status 3.
local function start(self, budgets, wish, cache_channels)
  for attempt = 1, 2 do
    local before = self.plan
    wish.vram, wish.ram, wish.note = budgets.vram, budgets.ram, budgets.note
    self.plan = choose.plan(self.spec, wish)
    if before then
      say(self, "device %s: %s of memory were free for the plan and are not any more; planned again for %s",
        self.cfg.device, budget.mib(before.peak), budget.mib(self.plan.peak))
    end
    local ok, made = xpcall(instance.open, bs.traceback, self.spec, self.plan, self.device, {
      pool_bytes = self.plan.peak, workspace_bytes = self.device:props().workspace_bytes,
      cache_channels = cache_channels,
    })
    if ok then
      self.instance = made
      return
    end
    if bs.code(made) ~= "devmem" then error(made, 0) end
    budget.limit(budgets, self.cfg.device, budget.free(self.device))
    if attempt == 2 or budgets.vram >= self.plan.peak then bs.fail("plan", "%s", made) end
  end
end

--- A new job; cfg: see bs.train.job_settings. Closes what it has opened where anything is refused.
function job.new(cfg)
  local self = setmetatable({ cfg = settings.read(cfg), steps_done = 0 }, mt)
  local _ <close> = guard(self)
  local compute
  self.device, compute = open_device(self.cfg)
  local gpu = self.cfg.device:match("cuda") ~= nil
  local budgets = budget.bytes(self.cfg, self.device, gpu)
  self.spec = spec.new(self.cfg, compute)
  self.model = self.spec.model
  local channels = self.cfg.cache and dry.cache_channels(self.spec, self.device:props().workspace_bytes)
  start(self, budgets, wishes(self, gpu, channels), channels)
  self.cfg.vram, self.cfg.ram = budgets.vram, budgets.ram
  if self.instance.params then parameters.load(self.spec, self.instance) end
  self.spec:close()
  return self
end

function methods:close()
  for _, part in ipairs { "instance", "spec", "device" } do
    if self[part] then self[part]:close() end
  end
  self.instance, self.device = nil, nil
end
mt.__close = methods.close

-- ---- what a call needs of a job: told in one line, as a setting that cannot be --------------------------

local function open_instance(self, call)
  if not self.instance then bs.fail("usage", "%s: the job is closed", call) end
  return self.instance
end

local function training(self, call)
  local inst = open_instance(self, call)
  if inst.spec.trainable == "none" then
    bs.fail("usage", '%s: trainable="none" trains nothing; a job with "lora" or "base" is expected', call)
  end
  return inst
end

local function check_folder(call, dir)
  if type(dir) ~= "string" or dir == "" then
    bs.fail("usage", "%s: %s is given; the name of a folder is expected", call, dir == "" and "''" or tostring(dir))
  end
end

local function check_adapters(self, call)
  if #self.spec.adapters > 0 then return end
  bs.fail("usage", '%s: a job with trainable="%s" has no adapter to save%s', call, self.spec.trainable,
    self.spec.trainable == "base" and "; save_base(dir) writes its weights" or "")
end

-- ---- passes and steps ----------------------------------------------------------------------------------

--- Forward walk; see instance:walk.
function methods:walk(micros, o) return open_instance(self, "walk"):walk(micros, o) end

--- Walk of rows that go on; see instance:decode.
function methods:decode(micros, o) return open_instance(self, "decode"):decode(micros, o) end

--- Gradients of a step into the accumulators, nothing is applied; see instance:forward_backward.
function methods:forward_backward(micros, o)
  return training(self, "forward_backward"):forward_backward(micros, o)
end

--- One optimizer step, a transaction; see bs.train.step.
function methods:step(micros, o)
  local result, applied = step.run(training(self, "step"), micros, self.steps_done + 1, o)
  if applied then self.steps_done = self.steps_done + 1 end
  return result
end

--- The training loop; see bs.train.loop.
function methods:run(o)
  training(self, "run")
  o = options.read("run: ", o, loop.rules)
  if o.out and o.out ~= "" then check_adapters(self, "run: out=" .. o.out) end
  return loop.train(self, o)
end

--- Rows that are written on; see bs.decode.generate.
function methods:generate(prompts, o)
  local inst = open_instance(self, "generate")
  return generate.run(inst, prompts, options.read("generate: ", o, generate.rules))
end

-- ---- values --------------------------------------------------------------------------------------------

--- Gradients in the accumulators, and values of what is trained: parameter name -> array.
function methods:gradients() return training(self, "gradients"):gradients() end
function methods:parameters() return open_instance(self, "parameters"):parameters() end

--- Bytes of all blocks as stored.
function methods:weight_bytes()
  local n = 0
  for b = 0, self.model.n_blocks - 1 do n = n + self.model.manifest:block_info(b).payload end
  return n
end

--- One line: what is where.
function methods:describe() return choose.describe(self.model, self.plan) end

-- ---- saving --------------------------------------------------------------------------------------------

--- Save the adapter as a PEFT folder, tested (save.adapter).
function methods:save(dir, o)
  local inst = open_instance(self, "save")
  check_folder("save", dir)
  check_adapters(self, "save")
  save.adapter(inst, dir, o)
end

--- Write the weights of a job with trainable="base" as a checkpoint folder (see save.base).
function methods:save_base(dir, o)
  local inst = open_instance(self, "save_base")
  check_folder("save_base", dir)
  save.base(inst, dir, o)
end

return job
