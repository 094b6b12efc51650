-- SPDX-License-Identifier: Apache-2.0
-- The program as a shell sees it: options, exit status, streams, signals; and the arguments of recipes.
local args = require "bs.args"

local bslua = assert(os.getenv "BSLUA" or arg and arg[-1], "BSLUA is not set")

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

-- Run bslua through a shell. Returns exit status (128 + n for a signal), stdout, stderr.
local function run(words, options)
  options = options or {}
  local out, err, input = os.tmpname(), os.tmpname(), os.tmpname()
  local line = {options.env or "", quote(bslua)}
  for _, w in ipairs(words) do line[#line + 1] = quote(w) end
  local f <close> = assert(io.open(input, "w"))
  f:write(options.input or "")
  f:close()
  local _, how, code = os.execute(table.concat(line, " ") .. " <" .. input .. " >" .. out .. " 2>" .. err)
  local function slurp(path)
    local h <close> = assert(io.open(path))
    local text = h:read "a"
    os.remove(path)
    return text
  end
  os.remove(input)
  return how == "signal" and 128 + code or code, slurp(out), slurp(err)
end

local function script(text)
  local path = os.tmpname()
  local f <close> = assert(io.open(path, "w"))
  f:write(text)
  finally(function() os.remove(path) end)
  return path
end

describe("options", function()
  it("run in the order given, then the script with its arguments", function()
    local path = script "#!/usr/bin/env bslua\nprint(x, y, ..., arg[0] == SELF, arg[1], arg[-1])"
    local code, out = run {"-e", "x = 1", "-ey=x+1", "-e", "SELF = '" .. path .. "'", path, "a", "-b"}
    assert.equal(0, code)
    assert.matches("^1\t2\ta\t", out)
    assert.matches("a\tSELF = '", out)
  end)

  it("require modules into globals", function()
    local code, out = run {"-l", "bs", "-l", "a=bs.args", "-e", "print(bs.version, a.parse ~= nil)"}
    assert.equal(0, code)
    assert.matches("^%d+%.%d+%.%d+\ttrue\n$", out)
  end)

  it("print help and version to stdout", function()
    local code, out, err = run {"--help"}
    assert.same({0, ""}, {code, err})
    assert.matches("^usage: bslua", out)
    code, out = run {"--version"}
    assert.equal(0, code)
    assert.matches("^bslua %d+%.%d+%.%d+ %(Lua 5%.4", out)
    assert.matches("io_uring", out)
    code, out = run {"-v"}
    assert.equal(0, code)
    assert.matches("Copyright", out)
  end)

  it("that are wrong are usage errors", function()
    for _, words in ipairs {{"--nonsense"}, {"-x"}, {"-e"}, {"-l"}, {"-i"}, {"-vx"}} do
      local code, out, err = run(words)
      assert.same({2, ""}, {code, out})
      assert.matches("^bslua: " .. words[1]:gsub("%-", "%%-"), err)
    end
  end)

  it("read standard input without a script or with -", function()
    local code, out = run({}, {input = "print('in', ...)"})
    assert.same({0, "in\n"}, {code, out})
    code, out = run({"-", "a"}, {input = "print('in', ..., arg[0])"})
    assert.same({0, "in\ta\t-\n"}, {code, out})
  end)

  it("stop at --", function()
    local code, _, err = run {"--", "-e"}
    assert.equal(1, code)
    assert.matches("cannot open %-e", err)
  end)

  it("obey LUA_INIT and BSLUA_HOME, but not with -E", function()
    local code, out = run({"-e", "print(x)"}, {env = "LUA_INIT_5_4='x = 5'"})
    assert.same({0, "5\n"}, {code, out})
    code, out = run({"-E", "-e", "print(x)"}, {env = "LUA_INIT_5_4='x = 5'"})
    assert.same({0, "nil\n"}, {code, out})
    local file = script "y = 6"
    code, out = run({"-e", "print(y)"}, {env = "LUA_INIT=@" .. file})
    assert.same({0, "6\n"}, {code, out})
    local home = os.tmpname()
    os.remove(home)
    assert(os.execute("mkdir -p " .. home .. "/bs"))
    finally(function() os.execute("rm -r " .. home) end)
    local f = assert(io.open(home .. "/bs/args.lua", "w"))
    f:write "return 'from home'"
    f:close()
    local show = "print((require 'bs.args'))"
    code, out = run({"-e", show}, {env = "BSLUA_HOME=" .. home})
    assert.same({0, "from home\n"}, {code, out})
    code, out = run({"-E", "-e", show}, {env = "BSLUA_HOME=" .. home})
    assert.equal(0, code)
    assert.matches("^table", out)
  end)
end)

describe("exit status", function()
  it("is 1 with message and traceback for an error", function()
    local code, out, err = run {script "print 'a' local function f() error 'bad luck' end f()"}
    assert.same({1, "a\n"}, {code, out})
    assert.matches("^bslua: .*:1: bad luck\nstack traceback:", err)
    code, out, err = run {"-e", "error {}"}
    assert.same({1, ""}, {code, out})
    assert.matches("error object is a table value", err)
    code, out, err = run {"-e", "error(setmetatable({}, {__tostring = function() return 'own' end}))"}
    assert.same({1, "", "bslua: own\n"}, {code, out, err})
  end)

  it("is 1 for a script that does not exist or compile", function()
    local code, _, err = run {"/nowhere/recipe.lua"}
    assert.equal(1, code)
    assert.equal("bslua: cannot open /nowhere/recipe.lua: No such file or directory\n", err)
    code = run {script "x x"}
    assert.equal(1, code)
    code = run {"-l", "nonsense", "-e", "print 1"}
    assert.equal(1, code)
  end)

  it("is what bs.fail or os.exit says, without a traceback", function()
    local code, out, err = run {"-l", "bs", "-e", "print 'x' bs.fail('plan', '%d bytes', 5)"}
    assert.same({3, "x\n", "bslua: 5 bytes\n"}, {code, out, err})
    assert.equal(7, (run {"-e", "os.exit(7)"}))
    assert.equal(0, (run {"-e", "os.exit(true, true)"}))
  end)

  it("is 1 when a failing script leaves objects open", function()
    local code, _, err = run {"-l", "bs", "-e", [[
      device = bs.device.open "cpu"
      engine = bs.engine.open {device = device, pool_bytes = 1 << 20}
      scope = engine:seal() or engine:scope {}
      tensor = bs.op.from_array(engine, bs.array.new("f32", {1, 1}))
      error "over"]]}
    assert.equal(1, code)
    assert.matches("over\nstack traceback", err)
    assert.not_matches("Sanitizer", err)
  end)
end)

describe("log lines", function()
  it("reach the script's function when the call that caused them returns", function()
    local path = script(("w"):rep(8192))
    -- Without a free file descriptor there is no io_uring, and the fall-back says so.
    local code, out, err = run({script([[
      local bs = require "bs"
      local m = bs.manifest.new()
      m:tensor(m:block("a", "layer"), "w", "f32", {1024}, m:file "]] .. path .. [[", 0)
      m:finish()
      local device = bs.device.open("cpu", {threads = 1})
      local engine = bs.engine.open {device = device, pool_bytes = 1 << 20, n_blocks = 1}
      local placement = bs.placement.new {manifest = m, homes = {[0] = "disk"}, dev_slots = 1, host_slots = 1,
                                program = {{block = 0}}, cyclic = true}
      local lines, files = {}, {}
      bs.log_to(function(line) lines[#lines + 1] = line end)
      repeat
        local file = io.open "/dev/null"
        files[#files + 1] = file
      until not file
      local ok = pcall(bs.stream.open, {engine = engine, placement = placement})
      print(ok, #lines, lines[1])
      bs.log_to(error)
      pcall(bs.stream.open, {engine = engine, placement = placement})
      bs.log_to(nil)]])}, {env = "ulimit -n 64;"})
    assert.same({0, ""}, {code, err})
    assert.matches("pool of threads", out)
    assert.matches("^true\t1\t", out)
  end)
end)

-- A child that interrupts its parent: the signal comes while the script runs, without any wait for time. It
-- may come a moment after the child has ended, when another thread of the process was given it first.
local INTERRUPT <const> = "local function interrupt(sig) io.popen('kill -' .. (sig or 'INT') .. ' $PPID'):close() end "

describe("an interruption", function()
  it("ends a script by the signal", function()
    local code, out, err = run {script(INTERRUPT .. [[
      interrupt()
      while true do end]])}
    assert.same({130, ""}, {code, out})
    assert.equal("bslua: interrupted!\n", err)
  end)

  it("is not swallowed by pcall", function()
    local code = run {script(INTERRUPT .. [[
      interrupt()
      while true do pcall(function() while true do end end) end]])}
    assert.equal(130, code)
  end)

  it("reaches libbs, in a coroutine too", function()
    local code, out = run {"-l", "bs", "-e", INTERRUPT .. [[
      coroutine.wrap(function()
        interrupt()
        repeat until bs.cancelled()
        io.write "cancelled"
        io.flush()
      end)()
      print "never"]]}
    assert.same({130, "cancelled"}, {code, out})
  end)

  it("is only noted while the script holds the signals", function()
    for sig, status in pairs {INT = 130, TERM = 143} do
      local code, out = run {script(INTERRUPT .. [[
        local host = require "bs.host"
        assert(host.interrupted() == nil)
        do
          local hold <close> = host.hold()
          interrupt "]] .. sig .. [["
          repeat until host.interrupted()
          print(host.interrupted())
        end
        print "saved"]])}
      assert.same({status, sig .. "\nsaved\n"}, {code, out})
    end
  end)

  it("acts at once when it comes a second time", function()
    local code, out = run {script(INTERRUPT .. [[
      local host = require "bs.host"
      local hold <close> = host.hold()
      interrupt()
      repeat until host.interrupted()
      interrupt()
      while true do end]])}
    assert.same({130, ""}, {code, out})
  end)
end)

describe("arguments of recipes", function()
  local settings = {
    steps = {100, "optimizer steps"}, lr = {1e-4, "learning rate"}, vram = {0, "device memory"},
    fast = {false, "less checking"}, out = {"run", "folder"}, targets = {{"q", "v"}, "linears"},
    layers = {{1, 2}, "layer numbers"},
  }

  local function fails(words, ...)
    local ok, err = pcall(args.parse, words, settings)
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
    for _, pattern in ipairs {...} do assert.matches(pattern, tostring(err)) end
  end

  it("take the type of the default", function()
    local t, given = args.parse({"steps=20", "lr=1/8", "vram=1.5GiB", "fast=yes", "out=a=b", "targets=k,o",
                                 "layers=3"}, settings)
    assert.same({steps = 20, lr = 0.125, vram = 1610612736, fast = true, out = "a=b", targets = {"k", "o"},
                 layers = {3}}, t)
    assert.is_true(given.lr)
    assert.equal("integer", math.type(t.vram))
    t, given = args.parse({}, settings)
    assert.same({100, 1e-4, false, {"q", "v"}}, {t.steps, t.lr, t.fast, t.targets})
    assert.is_nil(next(given))
    assert.equal(2, args.parse({"lr=2"}, settings).lr)
    assert.same({}, args.parse({"targets="}, settings).targets)
  end)

  it("understand sizes", function()
    local size = {["64MB"] = 64000000, ["64MiB"] = 67108864, ["2k"] = 2000, ["1e3"] = 1000, ["12"] = 12,
                  ["0.5GiB"] = 536870912, ["-1"] = -1, ["3 mb"] = 3000000}
    for text, n in pairs(size) do assert.equal(n, args.size(text), text) end
    for _, text in ipairs {"", "MB", "1.5", "5x", "1e999", "nan", "0x10MB", "1..2k"} do
      assert.is_nil(args.size(text), text)
    end
  end)

  it("that are misspelt list the right ones, nearest first", function()
    fails({"step=3"}, "unknown setting 'step'", "did you mean steps, ")
    fails({"vrma=3"}, "did you mean vram, ")
  end)

  it("of the wrong form, type or number are refused", function()
    fails({"steps"}, "not of the form key=value")
    fails({"steps=many"}, "setting 'steps': an integer or a size")
    fails({"steps=1.5"}, "integer")
    fails({"lr=fast"}, "a number or a fraction")
    fails({"lr=1/0"}, "a number or a fraction")
    fails({"fast=maybe"}, "true or false")
    fails({"layers=1,x"}, "for each item")
    fails({"steps=1", "steps=1"}, "'steps' is given twice")
  end)

  it("print help with defaults", function()
    local text = args.help(settings, "A recipe.")
    assert.matches("^A recipe%.\n  fast ", text)
    assert.matches("lr +learning rate %[0%.0001%]", text)
    assert.matches("targets +linears %[q,v%]", text)
    local code, out = run {"-l", "a=bs.args", "-e", "a.parse({'help'}, {n = {1, 'count'}}, 'About.')"}
    assert.same({0, "About.\n  n  count [1]\n"}, {code, out})
  end)
end)

describe("the built files", function()
  -- What readelf says of a file; nil where there is no readelf, or sanitizers have their own ways.
  local function facts(path)
    local p <close> = assert(io.popen(("readelf -hldW --dyn-syms '%s' 2>/dev/null"):format(path)))
    local text = p:read "a"
    return text ~= "" and not text:find "__[at]san_init" and text or nil
  end
  local folder = bslua:match "^(.*/)" or "./"

  for _, name in ipairs { "bslua", "libbs.so", "module/bs.so" } do
    it(name .. " is hardened", function()
      local text = facts(folder .. name)
      if not text then return end
      assert.truthy(text:find("Type:%s+DYN"), "it is loaded at a fixed address")
      if name == "bslua" then assert.truthy(text:find("Flags:[^\n]*PIE"), "no position-independent program") end
      assert.truthy(text:find "GNU_RELRO" and text:find("BIND_NOW", 1, true), "its tables stay writable")
      assert.truthy(text:find("GNU_STACK[^\n]* RW "), "its stack can be executed")
      assert.truthy(text:find("__stack_chk_fail", 1, true), "no stack protector")
      if folder:find "/release/$" then -- checked sizes need an optimiser
        assert.truthy(text:find("__vsnprintf_chk", 1, true), "no _FORTIFY_SOURCE")
      end
    end)
  end
end)
