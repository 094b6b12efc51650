-- SPDX-License-Identifier: Apache-2.0
-- Ctrl-C, SIGTERM, a closed terminal and a closed pipe while training: the first ends the run at the border of a step
-- and saves; a second one that is meant ends it at once. And streams that cannot be written, and a disk that is full
-- while the adapter is saved.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local qwen3 = require "bs.family.qwen3"
local tiny = require "tiny"

local bslua = assert(os.getenv "BSLUA" or arg and arg[-1], "BSLUA is not set")
local root = tiny.folder("interrupt-" .. bs.pid())
local HUP <const>, INT <const>, PIPE <const>, TERM <const>, XCPU <const> = 1, 2, 13, 15, 24
teardown(function() os.execute("rm -r " .. root) end)

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function read(path)
  local f = io.open(path, "rb")
  if not f then return nil end
  local text = f:read("a")
  f:close()
  return text
end

-- A program whose output is read while it runs; its own first line is its process id.
local function start(words, before)
  local line = {}
  for i, w in ipairs(words) do line[i] = quote(w) end
  local p = io.popen(("%s echo $$; exec %s %s 2>&1"):format(before or "", quote(bslua), table.concat(line, " ")))
  local self = { pid = p:read(), lines = {} }
  -- Read up to a line with this text; all of it without one.
  function self.wait(text)
    for l in p:lines() do
      self.lines[#self.lines + 1] = l
      if text and l:find(text, 1, true) then return l end
    end
    if text then error(("'%s' did not come: %s"):format(text, self.output())) end
  end
  function self.output() return table.concat(self.lines, "\n") end
  function self.kill(sig) os.execute(("kill -%s %s"):format(sig, self.pid)) end
  function self.finish()
    self.wait()
    local _, how, code = p:close()
    return how, code, self.output()
  end
  return self
end

local function recipe(out, ...)
  return { "recipes/qwen8b_lora.lua", "model=tests/data/qwen3", "data=tests/data/rows.jsonl", "step_tokens=80",
           "micro_tokens=40", "r=4", "schedule=constant", "warmup=0", "home=disk", "threads=1", "out=" .. out, ... }
end

local function run(words, before) return start(words, before).finish() end

local model = root .. "/model"
tiny.checkpoint(model, qwen3, tiny.qwen3_config(), "bf16")
local function job_run(...) return run { "tests/support/interrupted_job.lua", model, ... } end

local function adapter(dir) return read(dir .. "/adapter_model.safetensors") end

describe("the recipe", function()
  for name, number in pairs { INT = INT, TERM = TERM, HUP = HUP, XCPU = XCPU } do
    it("ends at the border of a step after SIG" .. name .. ", saves, and is trained on from there", function()
      local out = root .. "/" .. name
      local p = start(recipe(out, "steps=1000000", "valid=tests/data/rows.jsonl"))
      p.wait("step 3/")
      p.kill(name)
      local how, code, text = p.finish()
      assert.same({ "signal", number }, { how, code })
      assert.is_truthy(text:find("stopping at the next good place", 1, true), text)
      local last = text:match("stopped by SIG" .. name .. " after step (%d+) of 1000000\n")
      assert.is_truthy(text:find("\nstep " .. last .. "/", 1, true))
      assert.is_nil(text:find("\nstep " .. last + 1 .. "/", 1, true))
      assert.is_truthy(text:find("adapter saved in " .. out, 1, true))
      assert.is_truthy(text:find("to train on from here: adapter=" .. out, 1, true))
      -- The adapter is that of as many steps.
      local same = root .. "/same"
      assert.equal("exit", (run(recipe(same, "steps=" .. last))))
      assert.equal(adapter(same), adapter(out))
      local again = recipe(root .. "/more", "steps=1", "adapter=" .. out)
      for i, w in ipairs(again) do
        if w == "r=4" then table.remove(again, i) end
      end
      how, code, text = run(again)
      assert.same({ "exit", 0 }, { how, code }, text)
    end)
  end

  -- Through a shell, with its standard streams as `streams` says; status, and what it said on stderr if that is a file.
  local function with_streams(words, before, streams)
    local line, status, err = {}, root .. "/status.txt", root .. "/err.txt"
    for i, w in ipairs(words) do line[i] = quote(w) end
    os.execute(("rm -f %s; (%s { %s %s; echo $? >%s; } %s) 2>%s"):format(err, before, quote(bslua),
      table.concat(line, " "), status, streams, err))
    return tonumber(read(status)), read(err)
  end

  it("saves when nobody reads its output any more", function()
    for _, streams in ipairs { "| head -n 9 >/dev/null", "2>&1 | head -n 9 >/dev/null" } do
      for _, before in ipairs { "", "trap '' PIPE;" } do -- a parent that ignores it leaves that to its children
        local out = root .. "/pipe"
        os.execute("rm -rf " .. out)
        local code, err = with_streams(recipe(out, "steps=1000000"), before, streams)
        assert.equal(128 + PIPE, code)
        assert.is_truthy(adapter(out))
        if not streams:find("2>&1") then assert.matches("nobody reads the output any more; stopping at", err) end
      end
    end
  end)

  it("is not ended by a closed terminal under nohup", function()
    local out = root .. "/nohup"
    local p = start(recipe(out, "steps=200"), "trap '' HUP;")
    p.wait("step 3/")
    p.kill("HUP")
    local how, code, text = p.finish()
    assert.same({ "exit", 0 }, { how, code })
    assert.is_truthy(text:find("\nstep 200/200", 1, true))
  end)

  it("runs to its end when its streams are closed or full", function()
    for _, streams in ipairs { ">&-", ">/dev/null 2>&-", ">&- 2>&- <&-", ">/dev/full", ">/dev/full 2>&1" } do
      local out = root .. "/streams"
      os.execute("rm -rf " .. out)
      assert.equal(0, (with_streams(recipe(out, "steps=2"), "", streams)), streams)
      local want = root .. "/streams-want"
      if not adapter(want) then assert.equal("exit", (run(recipe(want, "steps=2")))) end
      assert.equal(adapter(want), adapter(out), streams)
      assert.equal(read(want .. "/adapter_config.json"), read(out .. "/adapter_config.json"), streams)
    end
  end)

  it("leaves the old adapter whole when the disk is full", function()
    local out = root .. "/full"
    assert.equal("exit", (run(recipe(out, "steps=1"))))
    local old, config = adapter(out), read(out .. "/adapter_config.json")
    assert.is_true(#old > 70000)
    local how, code, text = run(recipe(out, "steps=2", "seed=2"), "ulimit -f 32;")
    assert.same({ "exit", 1 }, { how, code })
    assert.is_truthy(text:find("adapter_model.safetensors", 1, true), text)
    assert.is_truthy(text:find("step 2/2", 1, true))
    assert.equal(old, adapter(out))
    assert.equal(config, read(out .. "/adapter_config.json"))
    local files = io.popen("ls -A " .. out)
    assert.equal("adapter_config.json\nadapter_model.safetensors\n", files:read("a"))
    files:close()
  end)
end)

describe("the first signal", function()
  -- The adapter of so many steps without any signal.
  local function steps(n)
    local out = ("%s/steps-%s"):format(root, n)
    if not adapter(out) then assert.equal("exit", (job_run("steps=" .. n, "INT", out))) end
    return adapter(out)
  end

  -- A step calls layer 10 times a pass, forward for two micro-batches and then backward.
  for what, call in pairs { forward = "2", ["the last forward"] = "10", backward = "13", ["step 2"] = "29" } do
    it("in a layer's " .. what .. " ends the step it came in", function()
      local out, n = root .. "/first-" .. call, tonumber(call) <= 20 and "1" or "2"
      local how, code, text = job_run(call, "INT", out)
      assert.same({ "signal", INT }, { how, code })
      assert.is_truthy(text:find(("finished\t%s\tINT\t%s"):format(n, n), 1, true), text)
      assert.equal(steps(n), adapter(out))
    end)
  end

  it("in the first evaluation ends the run, and nothing is saved", function()
    local out = root .. "/valid"
    local how, code, text = job_run("valid", "INT", out)
    assert.same({ "signal", INT }, { how, code })
    assert.is_truthy(text:find("stopped by SIGINT after step 0 of", 1, true), text)
    assert.is_truthy(text:find("finished\t0\tINT\t0", 1, true), text)
    assert.is_nil(adapter(out))
  end)

  it("in a coroutine ends the step it came in", function()
    local out = root .. "/coroutine"
    local how, code, text = job_run("13", "TERM", out, "coroutine")
    assert.same({ "signal", TERM }, { how, code })
    assert.is_truthy(text:find("finished\t1\tTERM\t1", 1, true), text)
    assert.equal(steps "1", adapter(out))
  end)

  it("at any moment ends a whole step", function()
    for _ = 1, 5 do
      local out = root .. "/any"
      local how, code, text = job_run("any", "INT", out)
      assert.same({ "signal", INT }, { how, code })
      local n = text:match("finished\t(%d+)\tINT")
      assert.equal(steps(n), adapter(out))
    end
  end)
end)

describe("a signal that the system repeats", function()
  for _, signals in ipairs { "HUP,HUP", "XCPU,XCPU", "TERM,HUP", "INT,PIPE" } do
    it("does not end the step: " .. signals, function()
      local out = root .. "/repeated"
      local how, code, text = job_run("13", signals, out)
      assert.same({ "signal", ({ H = HUP, X = XCPU, T = TERM, I = INT })[signals:sub(1, 1)] }, { how, code })
      assert.is_truthy(text:find("finished\t1\t" .. signals:match("%a+"), 1, true), text)
    end)
  end
end)

describe("the second signal", function()
  local function check(how, text, out)
    assert.equal("signal", how)
    assert.is_truthy(text:find("interrupted!", 1, true) or text:find("cancelled", 1, true), text)
    assert.is_nil(text:find("finished", 1, true))
    assert.is_nil(text:find("stack traceback", 1, true), text)
    assert.is_nil(text:find("Sanitizer", 1, true))
    assert.is_nil(adapter(out))
  end

  it("ends the step it comes in without saving", function()
    for _, call in ipairs { "2", "13" } do
      for _, where in ipairs { "main", "coroutine" } do
        local out = root .. "/second-" .. call .. where
        local how, _, text = job_run(call, "INT,TERM", out, where)
        check(how, text, out)
      end
    end
  end)

  it("ends by force what does not look", function()
    local how, code, text = run { "-e", [[
      local bs, host = require "bs", require "bs.host"
      local hold <close> = host.hold()
      coroutine.wrap(function()
        for _ = 1, 2 do
          io.popen("kill -TERM " .. bs.pid()):close()
          repeat until host.interrupted()
        end
        while true do end
      end)()]] }
    assert.same({ "signal", TERM }, { how, code })
    assert.matches("^bslua: stopping at the next good place; the same again stops at once$", text)
  end)

  it("may come at any moment", function()
    for i = 1, 5 do
      local out = root .. "/second-any" .. i
      local how, _, text = job_run("any", "INT,TERM", out)
      -- Between the two a step may have ended, and with it the run.
      if not adapter(out) then check(how, text, out) else assert.equal("signal", how) end
    end
  end)
end)
