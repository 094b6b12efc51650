-- SPDX-License-Identifier: Apache-2.0
--- Times of the ops of a layer, forward and backward, of the head's tile and of AdamW, at the shapes of a model.
--
--   bslua bench/ops.lua shape=qwen3-8b device=cuda dtype=bf16 dir=FOLDER tokens=2048,8192 [key=value ...]
--   bslua bench/ops.lua help
--
-- Ops are issued as training does, through bs.op and the model's linears, inside scopes of a visit. A sample is
-- wall time over many applications that follow each other on the device without a wait, at least `sample` seconds
-- of them, and one wait at the end: what is neither hidden behind the device nor part of the op is below 2 % of it.
-- Where the host could not issue them as fast as the device ran them, the time is that between events around each
-- launch, and the line says so. Samples of different ops alternate. A backward time is that of a scope with tape and
-- backward pass less that of one without the pass; that of the whole layer is of both, a backward visit.
--
-- FLOPs: 2 for each multiply-add of a product; attention counts the pairs that are not masked, 4 a pair and channel
-- forward, 10 backward (five products). Bytes: every operand once. Shares are of the rate of a product of
-- 8192x4096x4096 and of a copy in device memory, both measured in the same run.
package.path = (arg[0]:match("^(.*)/") or ".") .. "/?.lua;" .. package.path
local bs = require "bs"
local args = require "bs.args"
local lora = require "bs.model.lora"
local machine = require "machine"
local model = require "bs.model.model"
local weights = require "bs.model.weights"
local nn = require "bs.nn"
local program = require "bs.instance.program"
local random_checkpoint = require "random_checkpoint"

local cfg = args.parse(arg, {
  shape = { "tiny", "shape of the model", random_checkpoint.names() },
  dir = { "build/bench", "where checkpoints are made (once) and read" },
  json = { "", "file for all numbers and raw samples" },
  device = { "cpu", "cpu or cuda" },
  dtype = { "auto", "what is computed in", { "auto", "f32", "bf16" } },
  tokens = { { 128 }, "tokens of a row, one case each" },
  rows = { 1, "rows of a micro-batch", 1 },
  r = { 8, "rank of the adapters", 1 },
  vocab = { 0, "rows of the head; 0: as many as one tile has" , 0 },
  rounds = { 5, "samples of each op", 1 },
  sample = { 0.05, "least seconds of a sample", 0, 10 },
  pool = { "8GiB", "bytes of the device pool" },
}, "bslua bench/ops.lua key=value ...")

local PER_SCOPE <const> = 4
local TARGETS <const> = { "q_proj", "k_proj", "v_proj", "o_proj" }

local say <const> = bs.say

local function median(list)
  local v = table.move(list, 1, #list, 1, {})
  table.sort(v)
  return #v % 2 == 1 and v[#v // 2 + 1] or (v[#v // 2] + v[#v // 2 + 1]) / 2
end

-- ---- what ops run on -----------------------------------------------------------------------------------

-- A one-layer model on the device, with adapters (`lora`) and without (`plain`), and what a layer hands from op to op.
local function open_rig(device, folder, T)
  local m = model.open(folder, { compute = device:props().bf16 and cfg.dtype or "f32" })
  local c, homes, list, keys = m.config, {}, program.walk(m), {}
  for b = 0, m.n_blocks - 1 do homes[b] = "gpu" end
  local rig = { device = device, m = m, c = c, T = T, w = m.compute == "bf16" and 2 or 4, key = {} }
  rig.placement = bs.placement.new {
    manifest = m.manifest, homes = homes, dev_slots = 1, host_slots = 1, program = list,
  }
  rig.engine = bs.engine.open {
    device = device, compute = m.compute, pool_bytes = args.size(cfg.pool), expand_bytes = m.expand_bytes,
    n_blocks = m.n_blocks, seed = 1,
  }
  local e = rig.engine
  rig.batch = bs.batch.open(e, { micros = 1, tokens = T, rows = cfg.rows })
  for name, channels in pairs { x = c.channels, o = c.heads * c.head_dim, q = c.heads * c.head_dim,
                                k = c.kv_heads * c.head_dim, v = c.kv_heads * c.head_dim, gate = c.hidden,
                                up = c.hidden } do
    keys[#keys + 1] = { name = name, channels = channels, dtype = m.compute, stay = "device" }
    rig.key[name] = #keys - 1
  end
  rig.store = bs.store.open(e, rig.batch, keys)
  rig.params = bs.params.open(e)
  local adapters = lora.select(m, lora.spec { r = cfg.r, targets = TARGETS })
  local trainer = { params = rig.params, adapter = lora.register(m, adapters, rig.params), base = {} }
  rig.params:seal()
  rig.head = bs.head.open(e, { batch = rig.batch, channels = c.channels, vocab = c.vocab, tile_rows = m.tile_rows })
  local f, scaling = nn.inv_freq(c.rope, 1)
  rig.rope = bs.rope.new(e, bs.array.new("f32", { #f }, f), scaling, c.rope_style or "half")
  rig.lora, rig.plain = weights.bind(m, e, trainer), weights.bind(m, e)
  rig.stream = bs.stream.open { engine = e, placement = rig.placement }
  e:seal()
  for _, a in ipairs(adapters) do
    local id = trainer.adapter[a.full]
    rig.params:init_kaiming(id.a, 1)
    rig.params:init_kaiming(id.b, 2)
    rig.trained = (rig.trained or 0) + a.r * (a.inn + a.out)
  end
  rig.stream:push(list, false)
  return rig
end

local function close_rig(rig)
  rig.stream:abort()
  for _, part in ipairs { "stream", "head", "params", "store", "batch", "engine" } do rig[part]:close() end
end

local function set_batch(rig)
  local micro = { row_len = {}, ids = {}, labels = {} }
  for r = 1, cfg.rows do micro.row_len[r] = rig.T // cfg.rows end
  for i = 1, rig.T // cfg.rows * cfg.rows do micro.ids[i], micro.labels[i] = i % rig.c.vocab, i * 7 % rig.c.vocab end
  rig.T = #micro.ids
  rig.batch:set(0, micro)
  rig.batch:begin(1)
end

local function scope_of(rig, tape)
  return rig.engine:scope { batch = rig.batch, micro = 0, label = "bench", tape = tape, train = true, step = 1 }
end

-- The values that ops see inside a layer.
local function fill(rig)
  local c, w, store, key = rig.c, rig.plain.layers[0].trunk, rig.store, rig.key
  local _ <close> = scope_of(rig, false)
  local x = bs.op.from_array(rig.engine, bs.array.new("f32", { rig.T, c.channels }):uniform(1.7, 1, "x"))
  local a = w.self_attn
  local h = nn.rmsnorm(x, w.input_layernorm, c.eps)
  local q, k, v = a.q_proj(h), a.k_proj(h), a.v_proj(h)
  store:put(key.x, 0, x)
  store:put(key.q, 0, q)
  store:put(key.k, 0, k)
  store:put(key.v, 0, v)
  store:put(key.o, 0, bs.op.attention(q, k, v, rig.heads))
  store:put(key.gate, 0, w.mlp.gate_proj(h))
  store:put(key.up, 0, w.mlp.up_proj(h))
  rig.engine:wait()
end

-- ---- the ops ---------------------------------------------------------------------------------------------

-- List of {name, kind, count = times in a layer, inputs = names, gradient = name of a tensor as wide as the result,
-- fn(inputs), flops = {forward, backward}, bytes = the same}; backward is absent where there is none.
local function ops_of(rig)
  local c, T, w = rig.c, rig.T, rig.w
  local plain, with = rig.plain.layers[0].trunk, rig.lora.layers[0].trunk
  local Q, KV, C, I, list = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.channels, c.hidden, {}
  local function add(op) list[#list + 1] = op end
  local function linear(name, input, gradient, part, inn, out, lora_too)
    local product, bytes, r = 2.0 * T * inn * out, w * (T * inn + inn * out + T * out), cfg.r
    add { name = name, kind = "gemm", count = lora_too and 0 or 1, inputs = { input }, gradient = gradient,
          fn = plain[part][name], flops = { product, product }, bytes = { bytes, bytes } }
    if not lora_too then return end
    local small, moved = 2.0 * T * r * (inn + out), w * r * (inn + out + 2 * T)
    add { name = name .. "+lora", kind = "gemm", count = 1, inputs = { input }, gradient = gradient,
          fn = with[part][name], flops = { product + small, product + 2 * small },
          bytes = { bytes + moved, bytes + 2 * moved } }
  end
  local function memory(name, count, inputs, fn, elements, forward, backward)
    add { name = name, kind = "elementwise", count = count, inputs = inputs, gradient = inputs[1], fn = fn,
          flops = { 0.0, backward and 0.0 }, bytes = { w * elements * forward, backward and w * elements * backward } }
  end
  linear("q_proj", "x", "q", "self_attn", C, Q, true)
  linear("k_proj", "x", "k", "self_attn", C, KV, true)
  linear("v_proj", "x", "v", "self_attn", C, KV, true)
  linear("o_proj", "o", "x", "self_attn", Q, C, true)
  linear("gate_proj", "x", "gate", "mlp", C, I)
  linear("up_proj", "x", "up", "mlp", C, I)
  linear("down_proj", "gate", "x", "mlp", I, C)
  local pairs_ = 0.5 * T * (T / cfg.rows + 1)
  add { name = "attention", kind = "attention", count = 1, inputs = { "q", "k", "v" },
        gradient = "q", fn = function(q, k, v) return bs.op.attention(q, k, v, rig.heads) end,
        flops = { 4 * pairs_ * Q, 10 * pairs_ * Q }, bytes = { w * 2 * T * (Q + KV), w * 4 * T * (Q + KV) } }
  memory("rmsnorm", 2, { "x" }, function(x) return nn.rmsnorm(x, plain.input_layernorm, c.eps) end, T * C, 2, 3)
  local q_norm, k_norm = plain.self_attn.q_norm, plain.self_attn.k_norm
  local function rotate(x, norm, heads)
    if norm then return bs.op.norm_rope(x, norm, c.eps, false, rig.rope, heads) end
    return bs.op.rope(x, rig.rope, heads)
  end
  local rope = q_norm and "norm+rope" or "rope"
  memory(rope .. " q", 1, { "q" }, function(q) return rotate(q, q_norm, c.heads) end, T * Q, 2, q_norm and 3 or 2)
  memory(rope .. " k", 1, { "k" }, function(k) return rotate(k, k_norm, c.kv_heads) end, T * KV, 2, k_norm and 3 or 2)
  memory("glu", 1, { "gate", "up" }, function(g, u) return nn.glu(g, u, c.act) end, T * I, 3, 5)
  memory("add", 2, { "x", "x" }, function(a, b) return a + b end, T * C, 3)
  -- A backward visit runs the layer again, but for its last product.
  local flops = { 0.0, -2.0 * T * I * C }
  for _, op in ipairs(list) do
    flops[1], flops[2] = flops[1] + op.count * op.flops[1], flops[2] + op.count * (op.flops[1] + (op.flops[2] or 0))
  end
  local ctx = {
    micro = 0, layer = 0, attend = bs.op.attention,
    rope = function(x, heads) return bs.op.rope(x, rig.rope, heads) end,
    norm_rope = function(x, norm, eps, heads) return bs.op.norm_rope(x, norm, eps, false, rig.rope, heads) end,
  }
  add { name = "layer", kind = "layer", count = 0, inputs = { "x" }, gradient = "x",
        fn = function(x) return rig.m.family.layer(c, with, x, ctx) end, flops = flops, bytes = { 0.0, 0.0 } }
  return list
end

-- ---- samples -------------------------------------------------------------------------------------------------

-- One scope with a few applications; passes: "plain", "tape", "backward".
local function apply(rig, op, pass)
  local scope <close> = scope_of(rig, pass ~= "plain")
  local out = {}
  for i = 1, op.kind == "layer" and 1 or PER_SCOPE do
    local x = {}
    for k, name in ipairs(op.inputs) do
      x[k] = rig.store:get(rig.key[name], 0)
      if pass ~= "plain" then x[k]:want_grad() end
    end
    out[i] = { op.fn(table.unpack(x)), rig.store:get(rig.key[op.gradient], 0) }
  end
  if pass == "backward" then scope:backward(out) end
  return #out
end

-- Seconds of one application by the device, and of issuing it.
local function sample(rig, issue, n)
  local count = 0
  rig.engine:wait()
  local t0 = bs.now()
  for _ = 1, n do count = count + issue() end
  local issued = bs.now() - t0
  rig.engine:wait()
  return (bs.now() - t0) / count, issued / count
end

-- How many calls fill a sample.
local function calls(rig, issue)
  issue() -- first use of kernels and memory
  local t, _ = sample(rig, issue, 1)
  return math.max(1, math.ceil(cfg.sample / (t * issue())))
end

-- Seconds of one application between events around its launches.
local function device_time(rig, issue)
  local sum, count = 0, 0
  rig.engine:wait()
  rig.device:profile(true)
  for _ = 1, 5 do count = count + issue() end
  rig.engine:wait()
  for _, row in ipairs(rig.device:profile()) do sum = sum + row.seconds end
  rig.device:profile(false)
  return sum / count
end

local function measure(rig, list)
  local passes = { "plain", "tape", "backward" }
  for _, op in ipairs(list) do
    op.n, op.time, op.issue, op.device = {}, {}, {}, {}
    for _, pass in ipairs(passes) do
      if pass == "plain" or op.flops[2] then
        op.n[pass] = calls(rig, function() return apply(rig, op, pass) end)
        op.device[pass] = device_time(rig, function() return apply(rig, op, pass) end)
        op.time[pass], op.issue[pass] = {}, {}
      end
    end
  end
  for i = 1, cfg.rounds do
    for _, op in ipairs(list) do
      for pass, n in pairs(op.n) do
        op.time[pass][i], op.issue[pass][i] = sample(rig, function() return apply(rig, op, pass) end, n)
      end
    end
  end
end

-- Samples of something else than an op of the tape.
local function series(rig, issue)
  local n, times, issues = calls(rig, issue), {}, {}
  for i = 1, cfg.rounds do times[i], issues[i] = sample(rig, issue, n) end
  return times, median(issues), device_time(rig, issue)
end

-- ---- results ---------------------------------------------------------------------------------------------------

local function summary(times, issue, device, flops, bytes, rates)
  local r = { median = median(times), min = math.min(table.unpack(times)), samples = times, flops = flops,
              bytes = bytes, issue = issue, device = device }
  r.host_bound = issue > 0.9 * r.median and device > 0
  r.seconds = r.host_bound and device or r.median
  r.tflops, r.gbps = flops / r.seconds / 1e12, bytes / r.seconds / 1e9
  r.gemm_share, r.copy_share = rates.gemm and flops / r.seconds / rates.gemm, r.gbps * 1e9 / rates.device_copy
  return r
end

local function line(name, way, s)
  say("  %-13s %-8s %9.1f us (least %9.1f)  %7.1f TFLOP/s %5.1f %%  %7.0f GB/s %5.1f %%%s", name, way,
    s.seconds * 1e6, s.min * 1e6, s.tflops, 100 * (s.gemm_share or 0), s.gbps, 100 * s.copy_share,
    s.host_bound and ("  (by events; issued every %.1f)"):format(s.issue * 1e6) or "")
end

local function report(list, rates)
  local out = {}
  for _, op in ipairs(list) do
    local t, r = op.time, { name = op.name, kind = op.kind, count = op.count }
    r.forward = summary(t.plain, median(op.issue.plain), op.device.plain, op.flops[1], op.bytes[1], rates)
    line(op.name, "forward", r.forward)
    if t.backward then
      local times = {}
      for i, both in ipairs(t.backward) do
        times[i] = op.kind == "layer" and both or math.max(both - t.tape[i], 1e-9)
      end
      local device = op.kind == "layer" and op.device.backward or op.device.backward - op.device.tape
      r.backward = summary(times, median(op.issue.backward) - median(op.issue.tape), device, op.flops[2], op.bytes[2],
        rates)
      r.tape, r.tape_and_backward = t.tape, t.backward
      line(op.name, "backward", r.backward)
    end
    out[#out + 1] = r
  end
  return out
end

-- Where the time of a forward layer goes, by the times of its parts.
local function shares(list)
  local sum = { gemm = 0, attention = 0, elementwise = 0 }
  for _, r in ipairs(list) do
    if r.kind == "layer" then sum.layer = r.forward.seconds
    else sum[r.kind] = sum[r.kind] + r.count * r.forward.seconds end
  end
  sum.rest = sum.layer - sum.gemm - sum.attention - sum.elementwise
  say("  a layer, forward: products %.1f %%, attention %.1f %%, elementwise %.1f %%, rest %.1f %%",
    100 * sum.gemm / sum.layer, 100 * sum.attention / sum.layer, 100 * sum.elementwise / sum.layer,
    100 * sum.rest / sum.layer)
  return sum
end

-- The head's first tile, in its visit, with what goes before it.
local function head_tile(rig, rates)
  local m, C = rig.m, rig.c.channels
  local tile, weight, V = m.tiles[1], rig.lora.tiles[1].weight, m.tiles[1].n
  while rig.stream:next().block ~= tile.block do rig.engine:wait() end
  local times, issued, device = series(rig, function()
    local _ <close> = scope_of(rig, false)
    rig.head:begin("train", rig.batch:labelled(0))
    rig.head:put(0, bs.op.labelled(rig.store:get(rig.key.x, 0)))
    rig.head:tile(0, weight, tile.first)
    return 1
  end)
  local s = summary(times, issued, device, 4.0 * rig.T * V * C, rig.w * (V + rig.T) * C + 8.0 * rig.T * C, rates)
  line("head tile", V .. " rows", s)
  return { name = "head tile", kind = "head", rows = V, forward = s }
end

local function adamw(rig, rates)
  local o, step = { lr = 1e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, clip = 1.0 }, 0
  local times, issued, device = series(rig, function()
    step = step + 1
    o.step = step
    rig.params:apply(o, 1.0)
    return 1
  end)
  local s = summary(times, issued, device, 0.0, rig.trained * (28.0 + rig.w), rates)
  line("adamw", ("%.2f M"):format(rig.trained / 1e6), s)
  return { name = "adamw", kind = "optimizer", elements = rig.trained, forward = s }
end

local function run_case(device, folder, tokens, rates)
  local rig = open_rig(device, folder, tokens * cfg.rows)
  rig.heads = { heads = rig.c.heads, kv_heads = rig.c.kv_heads, head_dim = rig.c.head_dim }
  set_batch(rig)
  rig.stream:next()
  fill(rig)
  local copies = series(rig, function()
    local _ <close> = scope_of(rig, false)
    rig.store:put(rig.key.gate, 0, rig.store:get(rig.key.up, 0))
    return 1
  end)
  rates = setmetatable({ device_copy = 2 * rig.w * rig.T * rig.c.hidden / median(copies) }, { __index = rates })
  say("T=%d x%d, %s: copy in device memory %.0f GB/s", tokens, cfg.rows, rig.m.compute, rates.device_copy / 1e9)
  local list = ops_of(rig)
  measure(rig, list)
  local r = { tokens = tokens, rows = cfg.rows, dtype = rig.m.compute, device_copy = rates.device_copy,
              ops = report(list, rates) }
  r.shares = shares(r.ops)
  table.insert(r.ops, adamw(rig, rates))
  table.insert(r.ops, head_tile(rig, rates))
  close_rig(rig)
  return r
end

local result = { machine = machine.describe(), settings = cfg, cases = {} }
say("%s, %s, %d cores; bslua %s", result.machine.gpu or "no GPU", result.machine.cpu, result.machine.cores or 0,
  result.machine.version)
local folder = random_checkpoint.make(cfg.dir, cfg.shape, { layers = 1, vocab = cfg.vocab > 0 and cfg.vocab or "tile" })
result.rates = machine.device_rates(cfg.device, cfg.dtype, say)
do
  local device <close> = bs.device.open(cfg.device, {})
  for _, tokens in ipairs(cfg.tokens) do
    collectgarbage()
    result.cases[#result.cases + 1] = run_case(device, folder, tokens, result.rates)
  end
end
result.rates_after = machine.device_rates(cfg.device, cfg.dtype, say)
if cfg.json ~= "" then bs.write_file(cfg.json, bs.json.encode(result) .. "\n") end
