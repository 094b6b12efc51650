-- SPDX-License-Identifier: Apache-2.0
-- Lifetimes in the bindings: closed objects, orders of closing and collecting, scopes; and one step through
-- every object.
local bs = require "bs"
local machine = require "tests.support.machine"
local weights, open_engine, step, finish = machine.weights, machine.open_engine, machine.step, machine.finish

describe("closed objects", function()
  it("say so and close again", function()
    local e = open_engine()
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
    local t = machine.new()
    t.device:close()
    for _, name in ipairs {"engine", "batch", "store", "params", "stream", "linear", "norm", "rows"} do
      assert.matches("%(closed%)$", tostring(t[name]), name)
    end
    assert.not_matches("closed", tostring(t.placement))
    t.manifest:close()
    assert.matches("closed", tostring(t.placement))
  end)

  it("take along a scope that is open on them", function()
    local t = machine.new()
    local _, x, y = step(t)
    assert.is_true(y:alive())
    t.linear:close()
    assert.is_false(y:alive())
    assert.equal("bs.tensor (closed)", tostring(x))
    assert.error_matches(function() y:read() end, "tensor of scope 'step', which has ended")
    t.engine:close()
    y:close()
    assert.is_false(y:alive())
    assert.error_matches(function() return x + x end, "tensor of scope 'step'")
  end)
end)

describe("a scope set aside", function()
  it("is walked later, through new handles", function()
    local t = machine.new()
    local scope, x, y = step(t)
    local kept = scope:keep(x, y, y * y) -- the gradient of the product reads y
    assert.equal("bs.scope (closed)", tostring(scope))
    assert.error_matches(function() y:read() end, "tensor of scope 'step', which has ended")
    scope:close()
    local again, x2, y2, z2 = kept:resume()
    assert.error_matches(function() kept:resume() end, "closed bs.kept")
    again:backward {{z2, y2}}
    assert.same({3, 3}, x2:grad():dims())
    again:close()
    finish(t)
    assert.equal(0, (t.device:violations()))
  end)

  it("ends with anything that it may have used", function()
    for _, name in ipairs {"linear", "batch", "engine"} do
      local t = machine.new()
      local scope, x, y = step(t)
      local kept = scope:keep(x, y)
      t[name]:close()
      assert.error_matches(function() kept:resume() end, "closed bs.kept")
    end
  end)

  it("that is collected gives its memory back", function()
    local t = machine.new()
    local scope, x, y = step(t)
    local kept = scope:keep(x, y) -- luacheck: ignore
    kept = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    assert.equal(0, t.engine:stats().arena_now)
  end)
end)

describe("collection", function()
  it("keeps owners while something made on them lives", function()
    local batch
    do
      local e = open_engine()
      batch = bs.batch.open(e, {micros = 1, tokens = 4, rows = 1})
    end
    collectgarbage()
    collectgarbage()
    batch:set(0, {row_len = {1}, ids = {1}})
    assert.equal(1, batch:tokens(0))
  end)

  it("keeps what the tape of the open scope names", function()
    local t = machine.new()
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
      local t = machine.new()
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
      local t = machine.new()
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
  local AT <const> = {lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, step = 1}

  -- A machine whose parameters have the gradients of one backward pass of a sum; key 0 of its store holds dx.
  local function stepped()
    local t = machine.new()
    t.params:set(t.b, bs.array.new("f32", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8}))
    local scope, x, y = step(t)
    scope:backward {{y, y}}
    t.store:put(0, 0, x:grad())
    scope:close()
    finish(t)
    return t
  end

  it("is handed the visits that were pushed", function()
    local t = machine.new()
    local scope, _, _, visit = step(t)
    assert.same({block = t.ids.a, kind = 1, layer = 7, stage = 2, serial = 0}, visit)
    scope:close()
    finish(t)
  end)

  it("has tensors that tell what they are", function()
    local t = machine.new()
    local scope, _, y = step(t)
    assert.same({3, 4}, y:dims())
    assert.equal("f32", y:dtype())
    assert.equal("bs.tensor f32 [3 4]", tostring(y))
    assert.is_true(y:capacity() >= 3)
    assert.same({3, 4}, y:read():dims())
    scope:close()
    finish(t)
  end)

  it("hashes its ops, and gives a leaf a gradient of its shape", function()
    local t = machine.new()
    local scope, x, y = step(t)
    assert.not_equal(0, scope:hash())
    scope:backward {{y, y}}
    assert.same({3, 3}, x:grad():dims())
    scope:close()
    finish(t)
  end)

  it("puts into a store what is read back in its shape", function()
    assert.same({3, 3}, stepped().store:read(0, 0):dims())
  end)

  it("ends in parameters that change", function()
    local t = stepped()
    assert.is_true(t.params:norm() > 0)
    local before = t.params:get(t.a):hash()
    t.params:apply(AT, t.params:norm())
    assert.not_equal(before, t.params:get(t.a):hash())
  end)

  it("leaves moments that can be read and set", function()
    local t = stepped()
    t.params:apply(AT, t.params:norm())
    assert.same({4, 2}, t.params:moment(t.b, 1):dims())
    t.params:set_moment(t.b, 2, t.params:moment(t.b, 1))
    assert.equal(t.params:moment(t.b, 1):hash(), t.params:moment(t.b, 2):hash())
  end)

  it("has accumulators that are zeroed, under names", function()
    local t = stepped()
    t.params:zero_grad()
    assert.equal(0.0, t.params:grad(t.b):get(1))
    assert.equal("lora_b", t.params:name(t.b))
    assert.equal(2, t.params:count())
  end)

  it("is counted, and orders all that conflicts", function()
    local t = stepped()
    assert.is_true(t.engine:stats().launches > 0)
    assert.equal(2, t.stream:stats().loads)
    assert.is_string(t.stream:where(t.ids.a))
    assert.equal(0, (t.device:violations()))
  end)

  it("allows no second scope and no op outside one", function()
    local t = machine.new()
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

  it("norms rows by mean and deviation", function()
    local t = machine.new()
    local scope, x = step(t)
    local y = bs.op.layernorm(x, t.norm, t.norm, 1e-5):read():table()
    local bias = bs.op.layernorm(x * 0.0, t.norm, t.norm, 1e-5):read():table() -- all that constant rows leave
    local v = x:read():table()
    local mean = (v[1] + v[2] + v[3]) / 3
    local var = ((v[1] - mean) ^ 2 + (v[2] - mean) ^ 2 + (v[3] - mean) ^ 2) / 3
    for c = 1, 3 do
      local want = (v[c] - mean) / math.sqrt(var + 1e-5) * bias[c] + bias[c]
      assert.is_true(math.abs(y[c] - want) < 1e-5)
    end
    assert.error_matches(function() bs.op.layernorm(x, t.norm, nil, 1e-5) end, "bs.weight expected")
    scope:close()
    finish(t)
  end)

  it("gives a weight its rows of a larger parameter", function()
    local m, ids = weights()
    local e <close> = open_engine()
    local params = bs.params.open(e)
    local id = params:add_base("rows", 12, 1)
    params:seal()
    for first = 0, 9 do bs.weight.new(e, m, ids.a, ids.norm, params, id, first) end
    assert.error_matches(function() bs.weight.new(e, m, ids.a, ids.norm, params, id, 10) end, "beyond the parameter")
    assert.error_matches(function() bs.weight.new(e, m, ids.a, ids.norm, params, id) end, "3 elements")
  end)

end)

describe("the operators of tensors", function()
  local e, x
  before_each(function()
    e = open_engine()
    e:seal()
    e:scope {}
    x = bs.op.from_array(e, bs.array.new("f32", {1, 2}, {1, 2}))
  end)
  after_each(function() e:close() end)

  it("multiply by tensors and by numbers on either side", function()
    assert.same({3.0, 6.0}, (x * 3):read():table())
    assert.same({3.0, 6.0}, (3 * x):read():table())
    assert.same({1.0, 4.0}, (x * x):read():table())
  end)

  it("add tensors, but no numbers", function()
    assert.same({2.0, 4.0}, (x + x):read():table())
    assert.error_matches(function() return x + 1 end, "bs.tensor expected, got number")
  end)

  it("have columns counted from 1", function()
    assert.same({2.0}, bs.op.columns(x, 2, 1):read():table())
    assert.error_matches(function() bs.op.columns(x, 0, 1) end, "counted from 1")
  end)

  it("have activations of known words only", function()
    assert.error_matches(function() bs.op.act(x, "swish") end, "invalid option 'swish'")
  end)
end)

describe("manifest and placement", function()
  it("hand back the blocks that they were given", function()
    local m, ids = weights()
    assert.equal(2, m:blocks())
    local info = m:block_info(ids.a)
    assert.same({"a", "layer", 3, (12 + 4 + 3) * 4}, {info.name, info.kind, info.n_tensors, info.payload})
    assert.has_error(function() m:block_info(2) end)
    assert.is_true(m:alignment() >= 1)
  end)

  it("hand back the tensors that they were given, also by name", function()
    local m, ids = weights()
    local w = m:tensor_info(ids.a, ids.bias)
    assert.same({"bias", "f32", {4}, 48, 16}, {w.name, w.dtype, w.dims, w.offset, w.bytes})
    assert.equal(ids.bias, m:find(ids.a, "bias"))
    assert.is_nil(m:find(ids.a, "b"))
    assert.has_error(function() m:tensor_info(ids.a, 3) end)
  end)

  it("are the same after a way through JSON", function()
    local m = weights()
    assert.equal(m:digest(), bs.manifest.from_json(m:json()):digest())
    assert.has_error(function() bs.manifest.from_json "{}" end)
  end)

  it("count bytes and list transfers", function()
    local t = machine.new()
    local warm = t.placement:bytes(true)
    local slots = t.manifest:block_info(t.ids.a).payload + t.manifest:block_info(t.ids.b).payload
    assert.equal(slots, warm.link)
    assert.equal(2, warm.loads)
    local list = t.placement:transfers(false)
    assert.equal(2, #list)
    assert.equal(t.ids.a, list[1].block)
    assert.is_true(list[1].load)
    assert.is_true(t.placement:device_bytes() >= t.placement:slot_bytes())
    assert.is_true(t.placement:host_bytes() >= t.placement:host_slot_bytes())
  end)

  it("say what stores, heads and rows take before they are made", function()
    local m, ids = weights()
    local batch = {micros = 2, tokens = 8, rows = 4}
    local device, host = bs.store.bytes(batch, {{name = "x", channels = 3, stay = "host"}})
    assert.is_true(device > 0 and host > 0)
    assert.is_true(bs.head.bytes(batch, {channels = 3, vocab = 5, tile_rows = 2}) > 0)
    device, host = bs.embedding.bytes(m, ids.rows, "ram", batch)
    assert.is_true(device >= 0 and host > 0)
    assert.error_matches(function() bs.embedding.bytes(m, ids.rows, "tape", batch) end, "invalid option 'tape'")
  end)
end)
