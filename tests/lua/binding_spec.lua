-- SPDX-License-Identifier: Apache-2.0
-- What the bindings say about wrong arguments and failures. What the functions compute is tested elsewhere.
local bs = require "bs"
local machine = require "tests.support.machine"
local weights, open_engine = machine.weights, machine.open_engine

describe("plain functions", function()
  it("tell the version and the build", function()
    assert.matches("^%d+%.%d+%.%d+$", bs.version)
    assert.matches("io_uring", bs.build())
    assert.is_false(bs.cancelled())
  end)

  it("hash text with a seed", function()
    assert.equal(bs.hash "abc", bs.hash("abc", 0))
    assert.not_equal(bs.hash "abc", bs.hash("abc", 1))
    assert.not_equal(bs.hash "abc", bs.hash "abd")
  end)

  it("find the status word of a message", function()
    assert.equal("io", bs.code "bs.x: io: cannot [io]")
    assert.is_nil(bs.code "bs.x: io: cannot [oi]")
    assert.is_nil(bs.code "[io] in front")
    assert.is_nil(bs.code "io]")
    assert.is_nil(bs.code(nil))
    assert.is_nil(bs.code {})
  end)

  it("name the exit statuses of programs", function()
    assert.same({ done = 0, error = 1, usage = 2, plan = 3, data = 4, nonfinite = 5, selftest = 6 }, bs.exit)
  end)

  it("count memory, time and reads", function()
    assert.is_true(#bs.tags() > 3)
    for _, tag in ipairs(bs.tags()) do assert.is_true(bs.host_peak(tag) >= bs.host_bytes(tag)) end
    assert.error_matches(function() bs.host_bytes "nothing" end, "unknown memory tag 'nothing'")
    local now, peak = bs.rss()
    assert.is_true(now > 0 and peak >= now)
    local a = bs.now()
    assert.is_true(bs.now() >= a)
    assert.is_true(bs.io_bytes() == nil or bs.io_bytes() >= 0)
  end)

  it("take a log function and survive a failing one", function()
    bs.log_to(function() error "no" end)
    bs.log_to(nil)
    assert.error_matches(function() bs.log_to(5) end, "function expected")
    local lines = {}
    bs.log_to(function(line) lines[#lines + 1] = line end)
    bs.log "told"
    bs.log_to(nil)
    assert.same({ "told" }, lines)
  end)

  it("read whole files, and say what is none", function()
    local path = os.tmpname()
    bs.write_file(path, "a\0b")
    assert.equal("a\0b", bs.read_file(path))
    assert.equal("a\0b", bs.read_file(path, 3))
    local text, message, code = bs.read_file(path, 2)
    os.remove(path)
    assert.is_nil(text)
    assert.matches("has 3 bytes; 2 is the limit", message, 1, true)
    assert.equal("format", code)
    text, message, code = bs.read_file "/dev/zero"
    assert.is_nil(text)
    assert.matches("regular file is needed", message, 1, true)
    assert.equal("io", code)
  end)
end)

describe("arguments", function()
  it("of a wrong type name the right one", function()
    local e <close> = open_engine()
    assert.error_matches(function() bs.batch.open(bs.array.new("f32", {1}), {}) end,
                         "bs.engine expected, got bs.array")
    assert.error_matches(function() bs.batch.open(nil, {}) end, "bs.engine expected, got n")
    assert.error_matches(function() e.wait_all(io.stdout) end, "bs.engine expected, got FILE%*")
    assert.error_matches(function() e.close(io.stdout) end, "bs.engine expected, got FILE%*")
    assert.error_matches(function() e.close(7) end, "bs.engine expected, got number")
    assert.equal("protected", getmetatable(e))
  end)

  it("in option tables are checked by name and kind", function()
    local function fails(options, pattern)
      assert.error_matches(function() bs.device.open("cpu", options) end, pattern)
    end
    fails({thread = 1}, "unknown option 'thread' %(valid: threads, jitter_us, jitter_seed, drop_wait, fail_call, "
      .. "fail_pin, device_left, workspace_bytes%)")
    fails({threads = "1"}, "option 'threads': integer expected, got string")
    fails({threads = 1.5}, "option 'threads': integer expected, got number")
    fails({threads = 1 << 40}, "option 'threads': 1099511627776 is outside")
    fails({jitter_us = -1}, "option 'jitter_us': %-1 is outside")
    fails({drop_wait = 1}, "option 'drop_wait': string expected, got number")
    fails({[1] = 2}, "option names must be strings")
    fails(7, "table expected, got number")
    assert.error_matches(function() bs.engine.open {} end, "option 'device' is missing")
    assert.error_matches(function() bs.engine.open() end, "table expected, got n")
    assert.error_matches(function() bs.engine.open {device = 1} end,
                         "option 'device': bs.device expected, got number")
    local device <close> = bs.device.open "cpu"
    assert.error_matches(function() bs.engine.open {device = device, pool_bytes = -1} end, "'pool_bytes': %-1")
    device:close()
    assert.error_matches(function() bs.engine.open {device = device} end, "option 'device': closed bs.device")
  end)

  it("in nested tables are named with their path", function()
    local e <close> = open_engine()
    local m, ids = weights()
    local homes = {[0] = "gpu", [1] = "gpu"}
    local placement = bs.placement.new {manifest = m, homes = homes, dev_slots = 1, program = {{block = ids.a}}}
    assert.error_matches(function() bs.stream.open {engine = e, placement = placement, io = {dept = 1}} end,
                         "unknown option 'io.dept' %(valid: engine, depth,")
    local batch = bs.batch.open(e, {micros = 1, tokens = 4, rows = 1})
    local function store(key) return function() bs.store.open(e, batch, {key}) end end
    assert.error_matches(store {name = "x", channels = 1}, "option 'key 0: stay' is missing")
    assert.error_matches(store {name = "x", channels = 1, stay = "here"},
                         "unknown 'here' %(valid: pass, device, host%)")
    assert.error_matches(store {name = "x", channels = 1, stay = "pass", dtype = "f3"}, "unknown dtype 'f3'")
    assert.error_matches(store(3), "table expected")
  end)

  it("of a placement name the block or the visit", function()
    local m, ids = weights()
    local function placement(homes, program)
      return function() bs.placement.new {manifest = m, homes = homes, dev_slots = 1, program = program} end
    end
    local ok = {{block = ids.a}}
    assert.error_matches(placement({[0] = "gpu"}, ok), "homes%[1%]: string expected, got nil")
    assert.error_matches(placement({[0] = "gpu", "cloud"}, ok), "homes%[1%]: unknown 'cloud' %(valid: disk, ram, gpu%)")
    assert.error_matches(placement({[0] = "gpu", "gpu", "gpu"}, ok), "homes%[2%]: not one of the 2 blocks")
    local homes = {[0] = "gpu", "gpu"}
    assert.error_matches(placement(homes, {{}}), "visit 1: 'block': integer expected, got nil")
    assert.error_matches(placement(homes, {7}), "visit 1 is not a table")
    assert.error_matches(placement(homes, {{block = ids.a, kind = 1.5}}), "visit 1: 'kind': integer expected")
  end)

  it("of a micro-batch have to fit each other", function()
    local e <close> = open_engine()
    local b = bs.batch.open(e, {micros = 1, tokens = 8, rows = 2})
    local function set(t) return function() b:set(0, t) end end
    assert.error_matches(set {row_len = {2}, ids = {1}}, "'ids' has 1 entries, 2 expected")
    assert.error_matches(set {row_len = {2}, ids = {1, 2}, labels = {1}}, "'labels' has 1 entries")
    assert.error_matches(set {row_len = {2}, ids = {1, "2"}}, "'ids'%[2%]: integer expected, got string")
    assert.error_matches(set {row_len = {2}, ids = {1, 2}, row_id = {1, 2}}, "'row_id' has 2 entries, 1 expected")
    assert.error_matches(set {row_len = {-1}, ids = {}}, "negative")
    assert.error_matches(set {row_len = {math.maxinteger, math.maxinteger}, ids = {}}, "absurd")
    assert.error_matches(set {ids = {}}, "option 'row_len' is missing")
    assert.error_matches(set {row_len = {1}, ids = bs.array.new("f32", {1})}, "not an open i64")
  end)

  it("of a micro-batch may be arrays, and are counted", function()
    local e <close> = open_engine()
    local b = bs.batch.open(e, {micros = 1, tokens = 8, rows = 2})
    b:set(0, {row_len = {2, 1}, ids = bs.array.new("i64", {3}, {1, 2, 3}), labels = {1, 2, 3}})
    assert.equal(3, b:tokens(0))
    assert.equal(1, b:labelled(0))
    assert.equal(2, b:longest(0))
    assert.error_matches(function() b:tokens(-1) end, "outside")
  end)
end)

describe("errors of libbs", function()
  it("name function, status and detail", function()
    local ok, err = pcall(bs.device.open, "abacus")
    assert.is_false(ok)
    assert.matches("^bs%.device%.open: %l+: .*abacus.* %[%l+%]$", err)
    assert.is_string(bs.code(err))
  end)

  it("leave a closed object behind and nothing open", function()
    for _ = 1, 100 do pcall(bs.device.open, "abacus") end
    collectgarbage()
  end)
end)
