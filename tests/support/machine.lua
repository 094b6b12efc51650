-- SPDX-License-Identifier: Apache-2.0
-- A small machine for the specs of the bindings: one of every object, over a raw file of weights.
local bs = require "bs"

local machine = {}

-- Specs run side by side, and a file that is replaced between two looks at it is refused.
local path = ("build/test-tmp/machine-%d.bin"):format(bs.pid())
machine.ends = setmetatable({}, {__gc = function() os.remove(path) end})

-- A raw file of f32 weights and a manifest over it: block 0 "a" (w [4,3], bias [4], norm [3]) and block 1
-- "b" (w [4,3]); a row table [5,3].
function machine.weights()
  local numbers = {}
  for i = 1, 46 do numbers[i] = string.pack("<f", math.sin(i)) end
  bs.mkdir "build/test-tmp"
  bs.write_file(path, table.concat(numbers))
  local m = bs.manifest.new()
  local f = m:file(path)
  local ids = {a = m:block("a", "layer"), b = m:block("b", "layer")}
  ids.w = m:tensor(ids.a, "w", "f32", {4, 3}, f, 0)
  ids.bias = m:tensor(ids.a, "bias", "f32", {4}, f, 48)
  ids.norm = m:tensor(ids.a, "norm", "f32", {3}, f, 64)
  ids.bw = m:tensor(ids.b, "w", "f32", {4, 3}, f, 76)
  ids.rows = m:row_table("embed", "f32", 5, 3, f, 124)
  m:finish()
  return m, ids
end

local MB <const> = 1024 * 1024

function machine.open_engine()
  local device = bs.device.open("check:cpu", {threads = 1})
  return bs.engine.open {device = device, pool_bytes = 4 * MB, n_blocks = 2}, device
end

-- Everything that hangs on one engine.
function machine.new()
  local m, ids = machine.weights()
  local e, device = machine.open_engine()
  local t = {manifest = m, ids = ids, engine = e, device = device}
  t.batch = bs.batch.open(e, {micros = 2, tokens = 8, rows = 4})
  t.store = bs.store.open(e, t.batch, {{name = "x", channels = 3, stay = "device"},
                                       {name = "h", channels = 3, stay = "host"}})
  t.params = bs.params.open(e)
  t.a = t.params:add("lora_a", 2, 3)
  t.b = t.params:add("lora_b", 4, 2)
  t.params:seal()
  t.program = {{block = ids.a, kind = 1, layer = 7, stage = 2}, {block = ids.b}}
  t.placement = bs.placement.new {manifest = m, homes = {[ids.a] = "disk", [ids.b] = "ram"}, dev_slots = 1,
                        host_slots = 1, program = t.program, cyclic = true}
  t.stream = bs.stream.open {engine = e, placement = t.placement, io = {engine = "pool", threads = 1}}
  t.linear = bs.linear.new(e, {manifest = m, block = ids.a, weight = ids.w, bias = ids.bias,
                               params = t.params, lora_a = t.a, lora_b = t.b, scale = 2, name = "a.w"})
  t.norm = bs.weight.new(e, m, ids.a, ids.norm)
  t.rows = bs.embedding.open(e, {manifest = m, rows = ids.rows, home = "ram", batch = t.batch})
  e:seal()
  t.params:init_kaiming(t.a, 1)
  return t
end

-- One forward and backward of x = embed, y = linear(norm(x)) in micro-batch 0.
function machine.step(t)
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

function machine.finish(t)
  t.stream:end_visit()
  t.stream:next()
  t.stream:end_visit()
end

return machine
