-- SPDX-License-Identifier: Apache-2.0
--- Merging: exactly the targets change, to the numbers that the formula gives; the merged model computes what
-- base and adapter computed.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local adapter = require "bs.model.adapter"
local checkpoint = require "bs.model.checkpoint"
local job = require "bs.job"
local merge = require "bs.model.merge"
local model = require "bs.model.model"
local qwen3 = require "bs.family.qwen3"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

local out = tiny.folder("merge")
local micro = tiny.micro(1, 40, { 7, 12 })

-- An adapter with nonzero B for a model, as a PEFT folder.
local function trained_adapter(base, dir, lora)
  local j <close> = job.new { model = base, lora = lora, micro_tokens = 24 }
  for _ = 1, 3 do j:step({ micro }, { lr = 2e-2 }) end
  j:save(dir)
end

local function logits(settings)
  settings.micro_tokens, settings.logits = 24, true
  local j <close> = job.new(settings)
  return j:walk({ micro }, { mode = "logits" })[1]
end

local function tensors_of(dir)
  local c, all = checkpoint.open(dir), {}
  for name, t in pairs(c.tensors) do
    local f <close> = assert(bs.safetensors.open(t.path))
    all[name] = f:read(name)
  end
  return all
end

-- W + scale B A by the formula, in f64, then to the dtype.
local function expected(w, a, b, scale)
  local dims, r = w:dims(), a:dims()[1]
  local wt, at, bt, v = w:table(), a:table(), b:table(), {}
  for i = 0, dims[1] - 1 do
    for k = 0, dims[2] - 1 do
      local sum = 0
      for q = 0, r - 1 do sum = sum + bt[i * r + q + 1] * at[q * dims[2] + k + 1] end
      v[i * dims[2] + k + 1] = wt[i * dims[2] + k + 1] + scale * sum
    end
  end
  return v
end

local function read(path)
  local f <close> = assert(io.open(path, "rb"))
  return f:read("a")
end

-- One unit in the last place of a number stored as a dtype.
local function ulp(dtype, v)
  local bits = dtype == "f32" and 23 or dtype == "bf16" and 7 or 10
  return v == 0 and 0 or 2.0 ^ (math.floor(math.log(math.abs(v), 2)) - bits)
end

describe("merging", function()
  for _, case in ipairs {
    { "llama", { r = 4, targets = { "q_proj", "down_proj" } }, 1e-6 },
    { "qwen3", { r = 3, alpha = 5, rslora = true, layers = { 1 } }, 1e-2 },
    { "qwen3_f16", { r = 2, alpha_pattern = { o_proj = 9 } }, 2e-3 },
  } do
    local name, spec, bound = table.unpack(case)
    describe(name, function()
      local base, dir, merged = "tests/data/" .. name, out .. "/a-" .. name, out .. "/m-" .. name
      local result, before, after, saved
      setup(function()
        trained_adapter(base, dir, spec)
        result = merge.run { model = base, adapter = dir, out = merged, threads = 2 }
        before, after = tensors_of(base), tensors_of(merged)
        saved = adapter.open(model.open(base), dir)
      end)
      teardown(function() saved:close() end)

      it("has targets of the formula's numbers, in their dtype", function()
        for i, a in ipairs(saved.list) do
          local key = a.full .. ".weight"
          local first, second = saved:read(a.full)
          local want = i <= 4 and expected(before[key], first, second, a.scale) or {} -- plain Lua is slow
          local got = after[key]:table()
          for at = 1, #want do
            local slack = 0.5001 * ulp(before[key]:dtype(), want[at]) + 2e-7 * (math.abs(want[at]) + 1)
            assert.is_true(math.abs(got[at] - want[at]) <= slack, key .. " " .. at)
          end
          assert.equal(before[key]:dtype(), after[key]:dtype())
        end
      end)

      it("differs from its base in all targets, and in nothing else", function()
        local target = {}
        for _, a in ipairs(saved.list) do target[a.full .. ".weight"] = true end
        assert.equal(#saved.list, result.tensors)
        for key, value in pairs(before) do
          assert.equal(not target[key], value:hash() == after[key]:hash(), key)
        end
        for key in pairs(after) do assert.is_truthy(before[key], key) end
        assert.equal(read(base .. "/config.json"), read(merged .. "/config.json"))
      end)

      it("gives the logits of base and adapter, which are not those of the base", function()
        local want, got = logits { model = base, adapter = dir }, logits { model = merged, trainable = "none" }
        local err = bs.array.rel_err(got, want)
        assert.is_true(err <= bound, ("logits differ by %.2e"):format(err))
        assert.is_true(bs.array.rel_err(logits { model = base, trainable = "none" }, want) > 10 * err)
      end)
    end)
  end

  it("keeps shards, index, metadata and other files, but no other weights", function()
    local base = out .. "/sharded"
    os.execute(("cp -r tests/data/qwen3 %s"):format(base))
    for _, name in ipairs { "tokenizer.json", "pytorch_model.bin", "consolidated.safetensors", ".hidden" } do
      bs.write_file(base .. "/" .. name, name)
    end
    local dir, merged = out .. "/a-sharded", out .. "/m-sharded"
    trained_adapter(base, dir, { r = 2, layers = { 0 } })
    local result = merge.run { model = base, adapter = dir, out = merged }
    table.sort(result.left)
    assert.same({ ".hidden", "adapter", "consolidated.safetensors",
      "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors",
      "pytorch_model.bin", "reference.safetensors" }, result.left)
    assert.equal("tokenizer.json", read(merged .. "/tokenizer.json"))
    assert.equal(read(base .. "/model.safetensors.index.json"), read(merged .. "/model.safetensors.index.json"))
    for i = 1, 3 do
      local shard = ("/model-0000%d-of-00003.safetensors"):format(i)
      local a, b = assert(bs.safetensors.open(base .. shard)), assert(bs.safetensors.open(merged .. shard))
      assert.same(a:tensors(), b:tensors())
      assert.same(a:metadata(), b:metadata())
    end
  end)

  it("merges experts of a staged family", function()
    local base, dir, merged = out .. "/gate", out .. "/a-gate", out .. "/m-gate"
    tiny.checkpoint(base, soft_gate, tiny.soft_gate_config(), "f32")
    trained_adapter(base, dir, { r = 2, targets = { "experts", "attention", "gate" } })
    merge.run { model = base, adapter = dir, out = merged }
    local err = bs.array.rel_err(logits { model = merged, trainable = "none" }, logits { model = base, adapter = dir })
    assert.is_true(err <= 1e-6, tostring(err))
  end)

  it("refuses a folder that holds something, unless told, and the model's own always", function()
    local base, dir, merged = "tests/data/llama", out .. "/a-llama2", out .. "/full"
    trained_adapter(base, dir, { r = 2 })
    bs.mkdir(merged)
    bs.write_file(merged .. "/note.txt", "mine")
    bs.write_file(merged .. "/model-00001-of-00002.safetensors", "stale")
    bs.write_file(merged .. "/model.safetensors.index.json", "{}")
    local function run(o)
      local ok, err = pcall(merge.run, { model = base, adapter = dir, out = o.out, overwrite = o.overwrite })
      return ok, type(err) == "table" and err.bs_exit, tostring(err)
    end
    local ok, code, message = run { out = merged }
    assert.same({ false, 2 }, { ok, code })
    assert.matches("overwrite=true", message, 1, true)
    assert.is_true(run { out = merged, overwrite = true })
    assert.equal("mine", read(merged .. "/note.txt"))
    assert.is_nil(io.open(merged .. "/model-00001-of-00002.safetensors"))
    assert.is_nil(io.open(merged .. "/model.safetensors.index.json"))
    checkpoint.open(merged)
    ok, code = run { out = base .. "/../llama", overwrite = true }
    assert.same({ false, 2 }, { ok, code })
    assert.is_true(bs.is_file(base .. "/config.json"))
  end)

  it("refuses an adapter of another model before it writes anything", function()
    local dir = out .. "/a-other"
    trained_adapter("tests/data/llama", dir, { r = 2 })
    local ok, err = pcall(merge.run, { model = "tests/data/qwen3", adapter = dir, out = out .. "/never" })
    assert.is_false(ok)
    assert.equal(1, err.bs_exit)
    assert.is_nil(bs.list_folder(out .. "/never"))
  end)

  it("holds one weight at a time; the number of threads changes no bits", function()
    local base, dir, script = out .. "/wide", out .. "/a-wide", out .. "/peak.lua"
    tiny.checkpoint(base, qwen3, tiny.qwen3_config { hidden_size = 64, intermediate_size = 512 }, "bf16")
    trained_adapter(base, dir, { r = 2 })
    bs.write_file(script, ([[
      local bs, merge = require "bs", require "bs.model.merge"
      merge.run { model = "%s", adapter = "%s", out = arg[1], threads = tonumber(arg[2]) }
      print(bs.host_peak("arrays"))]]):format(base, dir))
    local weight, r = 512 * 64 * 2, 2
    local hashes = {}
    for threads = 1, 3 do
      local to = out .. "/t" .. threads
      local p <close> = assert(io.popen(("%s %s %s %d"):format(os.getenv("BSLUA") or "build/release/bslua", script, to,
        threads)))
      local peak = p:read("n")
      assert.is_true(peak <= weight + 4 * r * (512 + 64) + 1024, "arrays took " .. tostring(peak))
      hashes[threads] = bs.hash(read(to .. "/model.safetensors"))
    end
    assert.same({ hashes[1], hashes[1], hashes[1] }, hashes)
  end)
end)
