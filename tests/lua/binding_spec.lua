-- SPDX-License-Identifier: Apache-2.0
-- The bindings themselves: closed objects, wrong arguments, unknown options, orders of closing. What the
-- functions compute is tested elsewhere.
local bs = require "bs"

-- A raw file of f32 weights and a manifest over it: block 0 "a" (w [4,3], bias [4], norm [3]) and block 1
-- "b" (w [4,3]); a row table [5,3].
local function weights()
  local path = os.tmpname()
  local numbers = {}
  for i = 1, 46 do numbers[i] = string.pack("<f", math.sin(i)) end
  bs.write_file(path, table.concat(numbers))
  local m = bs.manifest.new()
  local f = m:file(path)
  local ids = {a = m:block("a", "layer"), b = m:block("b", "layer")}
  ids.w = m:tensor(ids.a, "w", "f32", {4, 3}, f, 0)
  ids.bias = m:tensor(ids.a, "bias", "f32", {4}, f, 48)
  ids.norm = m:tensor(ids.a, "norm", "f32", {3}, f, 64)
  ids.bw = m:tensor(ids.b, "w", "f32", {4, 3}, f, 76)
  ids.rows = m:rows("embed", "f32", 5, 3, f, 124)
  m:finish()
  finally(function() os.remove(path) end)
  return m, ids
end

local MB <const> = 1024 * 1024

local function engine(blocks)
  local device = bs.device.open("check:cpu", {threads = 1})
  return bs.engine.open {device = device, pool_bytes = 4 * MB, n_blocks = blocks or 2}, device
end

-- Everything that hangs on one engine.
local function machine()
  local m, ids = weights()
  local e, device = engine()
  local t = {manifest = m, ids = ids, engine = e, device = device}
  t.batch = bs.batch.open(e, {micros = 2, tokens = 8, rows = 4})
  t.store = bs.store.open(e, t.batch, {{name = "x", channels = 3, keep = "device"},
                                       {name = "h", channels = 3, keep = "host"}})
  t.params = bs.params.open(e)
  t.a = t.params:add("lora_a", 2, 3)
  t.b = t.params:add("lora_b", 4, 2)
  t.params:seal()
  t.program = {{block = ids.a, kind = 1, layer = 7, stage = 2}, {block = ids.b}}
  t.plan = bs.plan.new {manifest = m, homes = {[ids.a] = "disk", [ids.b] = "ram"}, dev_slots = 1,
                        host_slots = 1, program = t.program, cyclic = true}
  t.stream = bs.stream.open {engine = e, plan = t.plan, io = {engine = "pool", threads = 1}}
  t.linear = bs.linear.new(e, {manifest = m, block = ids.a, weight = ids.w, bias = ids.bias,
                               params = t.params, lora_a = t.a, lora_b = t.b, scale = 2, name = "a.w"})
  t.norm = bs.weight.new(e, m, ids.a, ids.norm)
  t.rows = bs.rows.open(e, {manifest = m, rows = ids.rows, home = "ram", batch = t.batch})
  e:seal()
  t.params:init_kaiming(t.a, 1)
  return t
end

-- One forward and backward of x = embed, y = linear(norm(x)) in micro-batch 0.
local function step(t)
  t.batch:set(0, {row_len = {2, 1}, ids = {4, 0, 2}, labels = {4, 0, -100}})
  t.batch:begin(1)
  t.rows:gather(t.store, 0, 0, 1.0)
  t.stream:push(t.program, true)
  local visit = t.stream:next()
  local scope = t.engine:scope {label = "step", batch = t.batch, micro = 0, tape = true}
  local x = t.store:get(0, 0):want_grad()
  local y = bs.op.linear(bs.op.rmsnorm(x, t.norm, 1e-6), t.linear)
  return scope, x, y, visit
end

local function finish(t)
  t.stream:finish_visit()
  t.stream:next()
  t.stream:finish_visit()
end

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
  end)
end)

describe("arguments", function()
  it("of a wrong type name the right one", function()
    local e <close> = engine()
    assert.error_matches(function() bs.batch.open(bs.array.new("f32", {1}), {}) end,
                         "bs.engine expected, got bs.array")
    assert.error_matches(function() bs.batch.open(nil, {}) end, "bs.engine expected, got n")
    assert.error_matches(function() e.sync(io.stdout) end, "bs.engine expected, got FILE%*")
    assert.error_matches(function() e.close(io.stdout) end, "bs.engine expected, got FILE%*")
    assert.error_matches(function() e.close(7) end, "bs.engine expected, got number")
    assert.equal("protected", getmetatable(e))
  end)

  it("in option tables are checked by name and kind", function()
    local function fails(options, pattern)
      assert.error_matches(function() bs.device.open("cpu", options) end, pattern)
    end
    fails({thread = 1}, "unknown option 'thread' %(valid: threads, jitter_us, jitter_seed, drop_wait, fail_call%)")
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
    local e <close> = engine()
    local m, ids = weights()
    local homes = {[0] = "gpu", [1] = "gpu"}
    local plan = bs.plan.new {manifest = m, homes = homes, dev_slots = 1, program = {{block = ids.a}}}
    assert.error_matches(function() bs.stream.open {engine = e, plan = plan, io = {dept = 1}} end,
                         "unknown option 'io.dept' %(valid: engine, depth,")
    local batch = bs.batch.open(e, {micros = 1, tokens = 4, rows = 1})
    local function store(key) return function() bs.store.open(e, batch, {key}) end end
    assert.error_matches(store {name = "x", channels = 1}, "option 'key 0: keep' is missing")
    assert.error_matches(store {name = "x", channels = 1, keep = "here"}, "unknown 'here' %(valid: pass, device, host%)")
    assert.error_matches(store {name = "x", channels = 1, keep = "pass", dtype = "f3"}, "unknown dtype 'f3'")
    assert.error_matches(store(3), "table expected")
  end)

  it("of a plan name the block or the visit", function()
    local m, ids = weights()
    local function plan(homes, program)
      return function() bs.plan.new {manifest = m, homes = homes, dev_slots = 1, program = program} end
    end
    local ok = {{block = ids.a}}
    assert.error_matches(plan({[0] = "gpu"}, ok), "homes%[1%]: string expected, got nil")
    assert.error_matches(plan({[0] = "gpu", "cloud"}, ok), "homes%[1%]: unknown 'cloud' %(valid: disk, ram, gpu%)")
    assert.error_matches(plan({[0] = "gpu", "gpu", "gpu"}, ok), "homes%[2%]: not one of the 2 blocks")
    local homes = {[0] = "gpu", "gpu"}
    assert.error_matches(plan(homes, {{}}), "visit 1: 'block': integer expected, got nil")
    assert.error_matches(plan(homes, {7}), "visit 1 is not a table")
    assert.error_matches(plan(homes, {{block = ids.a, kind = 1.5}}), "visit 1: 'kind': integer expected")
  end)

  it("of a micro-batch have to fit each other", function()
    local e <close> = engine()
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

describe("closed objects", function()
  it("say so and close again", function()
    local e = engine()
    local objects = {bs.manifest.new(), bs.device.open "meta", e, bs.params.open(e)}
    for _, o in ipairs(objects) do
      local name = tostring(o):match "^bs%.%l+"
      o:close()
      o:close()
      assert.equal(name .. " (closed)", tostring(o))
    end
    assert.error_matches(function() e:stats() end, "closed bs.engine")
    assert.error_matches(function() objects[1]:finish() end, "closed bs.manifest")
    assert.error_matches(function() objects[4]:count() end, "closed bs.params")
  end)

  it("take along what was made on them", function()
    local t = machine()
    t.device:close()
    for _, name in ipairs {"engine", "batch", "store", "params", "stream", "linear", "norm", "rows"} do
      assert.matches("%(closed%)$", tostring(t[name]), name)
    end
    assert.not_matches("closed", tostring(t.plan))
    t.manifest:close()
    assert.matches("closed", tostring(t.plan))
  end)

  it("take along a scope that is open on them", function()
    local t = machine()
    local _, x, y = step(t)
    assert.is_true(y:alive())
    t.linear:close()
    assert.is_false(y:alive())
    assert.matches("dead", tostring(x))
    assert.error_matches(function() y:read() end, "bs.tensor.read: state: .*step.* %[state%]")
    t.engine:close()
    y:close()
    assert.is_false(y:alive())
    assert.error_matches(function() return x + x end, "%[state%]")
  end)
end)

describe("collection", function()
  it("keeps owners while something made on them lives", function()
    local batch
    do
      local e = engine()
      batch = bs.batch.open(e, {micros = 1, tokens = 4, rows = 1})
    end
    collectgarbage()
    collectgarbage()
    batch:set(0, {row_len = {1}, ids = {1}})
    assert.equal(1, batch:tokens(0))
  end)

  it("keeps what the tape of the open scope names", function()
    local t = machine()
    local scope, x, y = step(t)
    t.linear, t.norm = nil, nil
    collectgarbage()
    collectgarbage()
    scope:backward {{y, y}}
    assert.same({3, 3}, x:grad():dims())
    scope:close()
    finish(t)
    assert.equal(0, (t.device:violations()))
  end)

  it("in any order leaves no device memory", function()
    collectgarbage()
    local before = bs.host_bytes "device"
    for _ = 1, 3 do
      local t = machine()
      step(t)
    end
    collectgarbage()
    collectgarbage()
    assert.equal(before, bs.host_bytes "device")
  end)
end)

describe("<close>", function()
  it("unwinds nested objects when an error comes in the middle", function()
    local kept = {}
    local ok, err = pcall(function()
      local t = machine()
      kept.t = t
      local engine <close> = t.engine
      local store <close> = t.store
      local scope <close>, x, y = step(t)
      kept.y, kept.scope = y, scope
      assert(x and engine and store)
      bs.op.add(y, x)
    end)
    assert.is_false(ok)
    assert.equal("shape", bs.code(err))
    assert.is_false(kept.y:alive())
    assert.matches("closed", tostring(kept.scope))
    assert.matches("closed", tostring(kept.t.params))
    assert.error_matches(function() kept.scope:hash() end, "closed bs.scope")
  end)
end)

describe("a step", function()
  it("runs through every object", function()
    local t = machine()
    t.params:set(t.b, bs.array.new("f32", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8}))
    local scope, x, y, visit = step(t)
    assert.same({block = t.ids.a, kind = 1, layer = 7, stage = 2, serial = 0}, visit)
    assert.same({3, 4}, y:dims())
    assert.equal("f32", y:dtype())
    assert.equal("bs.tensor f32 [3 4]", tostring(y))
    assert.is_true(y:capacity() >= 3)
    assert.same({3, 4}, y:read():dims())
    assert.not_equal(0, scope:hash())
    scope:backward {{y, y}}
    assert.same({3, 3}, x:grad():dims())
    t.store:put(0, 0, x:grad())
    scope:close()
    finish(t)
    assert.is_true(t.params:norm() > 0)
    local before = t.params:get(t.a):hash()
    t.params:apply({lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, step = 1}, t.params:norm())
    assert.not_equal(before, t.params:get(t.a):hash())
    assert.same({4, 2}, t.params:moment(t.b, 1):dims())
    t.params:set_moment(t.b, 2, t.params:moment(t.b, 1))
    t.params:zero_grad()
    assert.equal(0.0, t.params:grad(t.b):get(1))
    assert.equal("lora_b", t.params:name(t.b))
    assert.equal(2, t.params:count())
    assert.same({3, 3}, t.store:read(0, 0):dims())
    assert.is_true(t.engine:stats().launches > 0)
    assert.equal(2, t.stream:stats().loads)
    assert.is_string(t.stream:where(t.ids.a))
    assert.equal(0, (t.device:violations()))
  end)

  it("norms rows by mean and deviation", function()
    local t = machine()
    local scope, x = step(t)
    local y = bs.op.layernorm(x, t.norm, t.norm, 1e-5):read():table()
    local v, w = x:read():table(), {}
    for c, n in ipairs(bs.op.layernorm(x * 0.0, t.norm, t.norm, 1e-5):read():table()) do w[c] = n end
    local mean = (v[1] + v[2] + v[3]) / 3
    local var = ((v[1] - mean) ^ 2 + (v[2] - mean) ^ 2 + (v[3] - mean) ^ 2) / 3
    for c = 1, 3 do -- of constant rows only the bias is left
      assert.is_true(math.abs(y[c] - ((v[c] - mean) / math.sqrt(var + 1e-5) * w[c] + w[c])) < 1e-5)
    end
    assert.error_matches(function() bs.op.layernorm(x, t.norm, nil, 1e-5) end, "bs.weight expected")
    scope:close()
    finish(t)
  end)

  it("gives a weight its rows of a larger parameter", function()
    local m, ids = weights()
    local e <close> = engine()
    local params = bs.params.open(e)
    local id = params:add_base("rows", 12, 1)
    params:seal()
    for first = 0, 9 do bs.weight.new(e, m, ids.a, ids.norm, params, id, first) end
    assert.error_matches(function() bs.weight.new(e, m, ids.a, ids.norm, params, id, 10) end, "beyond the parameter")
    assert.error_matches(function() bs.weight.new(e, m, ids.a, ids.norm, params, id) end, "3 elements")
  end)

  it("allows no second scope and no op outside one", function()
    local t = machine()
    local scope, _, y = step(t)
    local ok, err = pcall(t.engine.scope, t.engine, {})
    assert.is_false(ok)
    assert.equal("state", bs.code(err))
    assert.is_true(y:alive())
    scope:close()
    assert.has_error(function() t.store:get(0, 0) end)
    t.engine:scope({label = "again"}):close()
    finish(t)
  end)

  it("multiplies by tensors and by numbers on either side", function()
    local e <close> = engine()
    local scope <close> = e:seal() or e:scope {}
    local x = bs.op.from_array(e, bs.array.new("f32", {1, 2}, {1, 2}))
    assert.same({3.0, 6.0}, (x * 3):read():table())
    assert.same({3.0, 6.0}, (3 * x):read():table())
    assert.same({1.0, 4.0}, (x * x):read():table())
    assert.same({2.0, 4.0}, (x + x):read():table())
    assert.same({2.0}, bs.op.columns(x, 2, 1):read():table())
    assert.error_matches(function() bs.op.columns(x, 0, 1) end, "counted from 1")
    assert.error_matches(function() return x + 1 end, "bs.tensor expected, got number")
    assert.error_matches(function() bs.op.act(x, "swish") end, "invalid option 'swish'")
    assert.is_truthy(scope)
  end)
end)

describe("manifest and plan", function()
  it("hand back what they were given", function()
    local m, ids = weights()
    assert.equal(2, m:blocks())
    local info = m:block_info(ids.a)
    assert.equal("a", info.name)
    assert.equal("layer", info.kind)
    assert.equal(3, info.n_tensors)
    assert.equal((12 + 4 + 3) * 4, info.payload)
    local w = m:tensor_info(ids.a, ids.bias)
    assert.same({"bias", "f32", {4}, 48, 16}, {w.name, w.dtype, w.dims, w.offset, w.bytes})
    assert.equal(ids.bias, m:find(ids.a, "bias"))
    assert.is_nil(m:find(ids.a, "b"))
    assert.has_error(function() m:block_info(2) end)
    assert.has_error(function() m:tensor_info(ids.a, 3) end)
    assert.is_true(m:alignment() >= 1)
    local again = bs.manifest.from_json(m:json())
    assert.equal(m:digest(), again:digest())
    assert.has_error(function() bs.manifest.from_json "{}" end)
  end)

  it("count bytes and list transfers", function()
    local t = machine()
    local warm = t.plan:bytes(true)
    local slots = t.manifest:block_info(t.ids.a).payload + t.manifest:block_info(t.ids.b).payload
    assert.equal(slots, warm.link)
    assert.equal(2, warm.loads)
    local list = t.plan:transfers(false)
    assert.equal(2, #list)
    assert.equal(t.ids.a, list[1].block)
    assert.is_true(list[1].load)
    assert.is_true(t.plan:device_bytes() >= t.plan:slot_bytes())
    assert.is_true(t.plan:host_bytes() >= t.plan:host_slot_bytes())
  end)

  it("say what stores, heads and rows take before they are made", function()
    local m, ids = weights()
    local batch = {micros = 2, tokens = 8, rows = 4}
    local device, host = bs.store.bytes(batch, {{name = "x", channels = 3, keep = "host"}})
    assert.is_true(device > 0 and host > 0)
    assert.is_true(bs.head.bytes(batch, {channels = 3, vocab = 5, tile_rows = 2}) > 0)
    device, host = bs.rows.bytes(m, ids.rows, "ram", batch)
    assert.is_true(device >= 0 and host > 0)
    assert.error_matches(function() bs.rows.bytes(m, ids.rows, "tape", batch) end, "invalid option 'tape'")
  end)
end)
