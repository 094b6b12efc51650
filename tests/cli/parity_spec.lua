-- SPDX-License-Identifier: Apache-2.0
--- recipes/parity.lua against every reference in tests/data: all homes hold, and give the same bits. Nothing passes
-- because there is nothing to hold it against.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local fused_experts = require "bs.model.fused_experts"
local job = require "bs.job"
local tiny = require "tiny"

local bslua = os.getenv("BSLUA") or "build/release/bslua"
local out = tiny.folder("parity")

-- Does it hold, its exit status, and what it wrote.
local function run(model, extra, reference, before)
  local json = out .. "/result.json"
  os.remove(json)
  local ok, _, code = os.execute(("%s %s recipes/parity.lua model=%s reference=%s json=%s %s >%s/log 2>&1"):format(
    before or "", bslua, model, reference, json, extra, out))
  local f = io.open(json)
  local result = f and bs.json.decode(f:read("a"))
  if f then f:close() end
  return ok == true, code, result
end

local function parity(name, extra, reference)
  return run("tests/data/" .. name, extra, reference or "tests/data/" .. name .. "/reference.safetensors")
end

local function hashes(result)
  local h = {}
  for _, c in ipairs(result.checks) do h[c.name] = c.hash end
  return h
end

describe("parity", function()
  local checks = { -- in each reference
    { "llama", 67 }, { "llama_bias", 37 }, { "qwen3", 86 }, { "qwen3_f16", 67 }, { "qwen3_yarn", 37 },
    { "phi3_longrope", 25 },
  }
  for _, reference in ipairs(checks) do
    local name, count = table.unpack(reference)
    it(name .. " holds with every home, to the same bits", function()
      local want
      for _, extra in ipairs { "home=gpu", "home=ram", "home=disk", "home=disk dev_slots=1",
                               "home=disk device=check:cpu" } do
        local ok, code, result = parity(name, extra)
        assert.is_true(ok, extra .. " exit " .. tostring(code))
        assert.is_true(result.ok)
        assert.equal(count, #result.checks)
        want = want or hashes(result)
        assert.same(want, hashes(result))
      end
    end)
  end

  -- The reference of llama_bias with fn(arrays) applied. Returns what parity writes about it.
  local function changed(fn)
    local ref <close> = assert(bs.safetensors.open("tests/data/llama_bias/reference.safetensors"))
    local arrays = {}
    for _, t in ipairs(ref:tensors()) do arrays[t.name] = ref:read(t.name) end
    fn(arrays)
    bs.safetensors.write(out .. "/reference.safetensors", arrays)
    local f <close> = assert(io.open("tests/data/llama_bias/reference.json"))
    bs.write_file(out .. "/reference.json", f:read("a"))
    local ok, code, result = parity("llama_bias", "home=gpu", out .. "/reference.safetensors")
    assert.equal(ok, result.ok)
    assert.equal(ok and 0 or 1, code)
    return result
  end

  -- The checks that fail, in order.
  local function failed(fn)
    local names = {}
    for _, c in ipairs(changed(fn).checks) do
      if not c.ok then names[#names + 1] = c.name end
    end
    return names
  end

  local A <const> = "grad.base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
  local B <const> = "grad.base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"

  it("fails when one number of the reference is off", function()
    assert.same({ B }, failed(function(t) t[B]:set(1, t[B]:get(1) * 1.01 + 1e-4) end))
  end)

  it("fails a gradient that is zero in the reference and not here, or not finite", function()
    assert.same({ A }, failed(function(t) t[A] = bs.array.new("f32", t[A]:dims()) end))
    assert.same({ A }, failed(function(t) t[A]:set(3, 0 / 0) end))
    assert.same({ B }, failed(function(t) t[B]:set(3, math.huge) end))
    local zeros = failed(function(t)
      for name, a in pairs(t) do
        if name:find("^grad%.") then t[name] = bs.array.new("f32", a:dims()) end
      end
    end)
    assert.equal(14 * 2, #zeros) -- none of them is large, so that none is small
  end)

  it("holds where a gradient is zero in the reference and here", function()
    local dir, adapter = out .. "/zero", out .. "/zero/adapter"
    os.execute(("rm -rf '%s' && cp -r tests/data/llama_bias '%s'"):format(dir, dir))
    do
      local j <close> = job.new { model = dir, lora = { r = 4 }, micro_tokens = 24 }
      j:save(adapter) -- B is zero, so the gradient of A is
    end
    local j <close> = job.new { model = dir, adapter = adapter, micro_tokens = 24 }
    local ids, arrays = { 5, 6, 7, 8, 9, 10 }, {}
    j:step({ { row_len = { 6 }, ids = ids, labels = ids } }, { apply = false })
    for name, a in pairs(j:gradients()) do arrays["grad." .. name] = a end
    for _, name in ipairs { "input_ids", "labels" } do arrays[name] = bs.array.new("i64", { 1, 6 }, ids) end
    arrays.attention_mask = bs.array.new("i64", { 1, 6 }, { 1, 1, 1, 1, 1, 1 })
    bs.safetensors.write(dir .. "/reference.safetensors", arrays)
    local ok, _, result = run(dir, "home=gpu", dir .. "/reference.safetensors")
    assert.is_true(ok)
    assert.equal(28, #result.checks)
  end)

  it("fails shapes that differ by a transposition, and entries in which nothing is", function()
    assert.same({ A }, failed(function(t)
      local dims = t[A]:dims()
      t[A] = bs.array.new("f32", { dims[2], dims[1] }, t[A]:bytes())
    end))
    assert.same({ "train.losses" }, failed(function(t) t["train.losses"] = bs.array.new("f32", { 0 }) end))
    assert.same({ "greedy, one row is expected" }, failed(function(t) t.greedy = bs.array.new("i64", { 1, 0 }) end))
    assert.same({ "greedy, one row is expected" }, failed(function(t)
      t.greedy = bs.array.new("i64", { 2, t.greedy:count() // 2 }, t.greedy:bytes())
    end))
    assert.same({ "loss" }, failed(function(t)
      t.loss = bs.array.new("f32", { 2 }, { t.loss:get(1), t.loss:get(1) })
    end))
  end)

  it("counts entries: those of images are unchecked, those that are unknown fail", function()
    local plain = changed(function() end)
    assert.same({ 39, 39, 0, 0 }, { plain.entries.held, plain.entries.used, plain.entries.unchecked,
      plain.entries.unknown })
    local more = changed(function(t) t["vl.logits"] = t.loss end)
    assert.is_true(more.ok)
    assert.same({ 40, 39, 1, 0 }, { more.entries.held, more.entries.used, more.entries.unchecked,
      more.entries.unknown })
    assert.same({ "hidden.99 (unknown entry)", "logit (unknown entry)" }, failed(function(t)
      t["hidden.99"], t.logit = t["hidden.1"], t.logits
    end))
    local gone = "grad.base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    assert.same({ gone .. " (not trained here)" }, failed(function(t) t[gone] = t[A] end))
  end)
end)

describe("gradients of fused experts", function()
  local dir, file = out .. "/fused", out .. "/fused/fused_gate.lua"
  local names = { "gate_proj", "up_proj", "down_proj" }
  local config = tiny.soft_gate_config { model_type = "fused_gate" }

  -- A family whose experts have the usual names, as a user's file.
  setup(function()
    bs.mkdir(dir)
    bs.write_file(file, [[
      local nn, M, stages = require "bs.nn", {}, {}
      for key, value in pairs(require "soft_gate") do M[key] = value end
      for key, value in pairs(M.stages) do stages[key] = value end
      M.model_types, M.stages = { "fused_gate" }, stages
      function M.expert_prefix(i, e) return ("layers.%d.mlp.experts.%d."):format(i, e) end
      function M.expert_tensors(c)
        local t = {}
        nn.linear(t, "gate_proj", c.hidden, c.channels)
        nn.linear(t, "up_proj", c.hidden, c.channels)
        nn.linear(t, "down_proj", c.channels, c.hidden)
        return t
      end
      function stages.expert(_, w, x, weight)
        return nn.row_scale(w.down_proj(nn.glu(w.gate_proj(x), w.up_proj(x), "silu")), weight, 1)
      end
      return M]])
    tiny.checkpoint(dir, dofile(file), config)
  end)

  -- Numbers of the parts of each expert in a row.
  local function fuse(ours, layer, kinds)
    local all, rows, columns = {}, 0, 0
    for e = 0, config.num_experts - 1 do
      for _, kind in ipairs(kinds) do
        local a = ours[("layers.%d.mlp.experts.%d.%s.weight"):format(layer, e, kind)]
        rows, columns = rows + a:dims()[1], a:dims()[2]
        table.move(a:table(), 1, a:count(), #all + 1, all)
      end
    end
    return bs.array.new("f32", { config.num_experts, rows // config.num_experts, columns }, all)
  end

  local function reference(gate_up)
    local j <close> = job.new { model = dir, family = file, trainable = "base", micro_tokens = 24 }
    local ids, arrays = { 5, 6, 7, 8, 9, 10 }, {}
    j:step({ { row_len = { 6 }, ids = ids, labels = ids } }, { apply = false })
    local ours = j:gradients()
    for name, a in pairs(ours) do
      local dims = j.model.checkpoint.tensors[name].dims
      if not name:find(".experts.", 1, true) then
        arrays["fullgrad." .. name] = bs.array.new("f32", dims, a:bytes())
      end
    end
    for layer = 0, config.num_hidden_layers - 1 do
      local place = ("fullgrad.layers.%d.mlp.experts."):format(layer)
      arrays[place .. "gate_up_proj"] = fuse(ours, layer, gate_up)
      arrays[place .. "down_proj"] = fuse(ours, layer, { "down_proj" })
    end
    for _, name in ipairs { "input_ids", "labels" } do arrays[name] = bs.array.new("i64", { 1, 6 }, ids) end
    arrays.attention_mask = bs.array.new("i64", { 1, 6 }, { 1, 1, 1, 1, 1, 1 })
    bs.safetensors.write(dir .. "/reference.safetensors", arrays)
    return run(dir, "home=disk family=" .. file, dir .. "/reference.safetensors", "LUA_PATH='tests/support/?.lua;;'")
  end

  it("are held against those of each expert", function()
    local ok, _, result = reference { "gate_proj", "up_proj" }
    assert.is_true(ok)
    assert.equal(0, result.entries.unknown)
    local _, code, swapped = reference { "up_proj", "gate_proj" }
    assert.equal(1, code)
    for _, c in ipairs(swapped.checks) do assert.equal(not c.name:find("gate_up_proj$"), c.ok, c.name) end
  end)

  it("become those of each expert, whatever the projections are called", function()
    local E, I, H = 3, 2, 4
    for _, called in ipairs { names, { "w1", "w3", "w2" } } do
      local single, fused = {}, {}
      for e = 0, E - 1 do
        for i, name in ipairs(called) do
          local dims = i == 3 and { H, I } or { I, H }
          single[("m.mlp.experts.%d.%s.weight"):format(e, name)] = tiny.tensor(name .. e, dims)
        end
      end
      local shapes = { ["m.mlp.experts.gate_up_proj"] = { E, 2 * I, H }, ["m.mlp.experts.down_proj"] = { E, H, I } }
      for name, dims in pairs(shapes) do
        fused[name] = fused_experts.find(single, name)
        assert.same(dims, fused[name]:dims())
        fused[name] = bs.array.new("f32", { dims[1] * dims[2], dims[3] }, fused[name]:bytes()) -- as parameters are held
      end
      for name, a in pairs(single) do
        local back = fused_experts.find(fused, name, function(n) return shapes[n] end)
        assert.same({ a:dims(), a:hash() }, { back:dims(), back:hash() })
      end
      assert.is_nil(fused_experts.find(fused, "m.mlp.experts.3." .. called[1] .. ".weight",
        function(n) return shapes[n] end))
      single["m.mlp.experts.1." .. called[3] .. ".weight"] = nil
      assert.same({ 1, H, I }, fused_experts.find(single, "m.mlp.experts.down_proj"):dims())
    end
    assert.is_nil(fused_experts.find({}, "m.mlp.experts.gate_up_proj"))
    assert.is_nil(fused_experts.find({}, "m.mlp.gate.weight"))
  end)
end)
