-- SPDX-License-Identifier: Apache-2.0
--- Merging: exactly the targets change, to the numbers that the formula gives; the merged model computes what
-- base and adapter computed.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
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

  local function refused(code, o, ...)
    local ok, err = pcall(merge.run, o)
    assert.is_false(ok)
    assert.equal(code, err.bs_exit, tostring(err))
    for _, text in ipairs { ... } do assert.matches(text, tostring(err), 1, true) end
  end

  it("refuses to write where it reads, around it and inside it", function()
    local base, dir = out .. "/around/model", out .. "/around/adapter"
    bs.mkdir(out .. "/around")
    os.execute(("cp -r tests/data/llama %s && ln -s adapter %s/link"):format(base, out .. "/around"))
    trained_adapter(base, dir, { r = 2 })
    local before = read(dir .. "/adapter_model.safetensors")
    for to, text in pairs {
      ["/around/adapter"] = "the folder of the adapter", ["/around/adapter/"] = "the folder of the adapter",
      ["/around/link"] = "the folder of the adapter", ["/around/model/../adapter"] = "the folder of the adapter",
      ["/around/model"] = "the folder of the model", ["/around"] = "around the folder of the",
      ["/around/adapter/x/y"] = "inside the folder of the adapter",
      ["/around/model/x"] = "inside the folder of the model",
    } do
      refused(2, { model = base, adapter = dir, out = out .. to, overwrite = true }, text)
    end
    assert.equal(before, read(dir .. "/adapter_model.safetensors"))
    assert.is_true(bs.is_file(dir .. "/adapter_config.json"))
    assert.same({ "adapter", "link", "model" }, bs.list_folder(out .. "/around"))
  end)

  it("replaces an earlier model as a whole and keeps everything else", function()
    local base, dir, merged = "tests/data/llama", out .. "/a-over", out .. "/over"
    trained_adapter(base, dir, { r = 2 })
    bs.mkdir(merged .. "/logs")
    local mine = { "notes.bin", "optimizer.pt", "consolidated.safetensors", "logs/x" }
    local stale = { "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
                    "added_tokens.json", "config.json" }
    for _, list in ipairs { mine, stale } do
      for _, name in ipairs(list) do bs.write_file(merged .. "/" .. name, name) end
    end
    merge.run { model = base, adapter = dir, out = merged, overwrite = true }
    for _, name in ipairs(mine) do assert.equal(name, read(merged .. "/" .. name)) end
    assert.same({ "config.json", "consolidated.safetensors", "logs", "model.safetensors", "notes.bin", "optimizer.pt",
      "reference.json" }, bs.list_folder(merged))
    bs.write_file(merged .. "/adapter_config.json", "{}")
    refused(2, { model = base, adapter = dir, out = merged, overwrite = true }, "apply to the merged model once more")
  end)

  it("copies no adapter, follows no link out of the folder, and opens nothing but files", function()
    local base, dir, merged = out .. "/links", out .. "/a-links", out .. "/m-links"
    trained_adapter("tests/data/llama", dir, { r = 2 })
    bs.mkdir(base)
    bs.write_file(out .. "/secret.json", "secret")
    bs.write_file(base .. "/inside.txt", "inside")
    os.execute(([[cd %s && cp %s/tests/data/llama/config.json . && ln -s %s/tests/data/llama/model.safetensors . &&
      ln -s ../secret.json tokenizer.json && ln -s inside.txt alias.txt && ln -s /nowhere gone.txt && mkfifo pipe &&
      echo '{}' > adapter_config.json && ln -s /dev/zero zero && ln -s .. up]]):format(base, os.getenv "PWD",
      os.getenv "PWD"))
    local result = merge.run { model = base, adapter = dir, out = merged }
    table.sort(result.left)
    assert.same({ "adapter_config.json", "gone.txt (a link to nothing)", "model.safetensors", "pipe",
      "tokenizer.json (a link out of the folder)", "up", "zero" }, result.left)
    assert.same({ "alias.txt", "config.json", "inside.txt", "model.safetensors" }, bs.list_folder(merged))
    assert.equal("inside", read(merged .. "/alias.txt"))
  end)

  it("takes the files of a download cache, whose links lead to its blobs", function()
    local root, dir = out .. "/hub", out .. "/a-hub"
    local base, merged = root .. "/models--x--y/snapshots/abc", out .. "/m-hub"
    trained_adapter("tests/data/llama", dir, { r = 2 })
    os.execute(([[mkdir -p %s %s/models--x--y/blobs && cd %s && n=0 &&
      for f in config.json model.safetensors; do cp %s/tests/data/llama/$f ../../blobs/$f; ln -s ../../blobs/$f $f; done
      echo tok > ../../blobs/t && ln -s ../../blobs/t tokenizer.json
      mkdir ../../../other && echo x > ../../../other/blobs && ln -s ../../../other/blobs vocab.json]]):format(base,
      root, base, os.getenv "PWD"))
    local result = merge.run { model = base, adapter = dir, out = merged }
    table.sort(result.left)
    assert.same({ "model.safetensors", "vocab.json (a link out of the folder)" }, result.left)
    assert.equal("tok\n", read(merged .. "/tokenizer.json"))
  end)

  it("refuses a weight that would not be finite, says why, and leaves out= as it was", function()
    local base, dir, merged = out .. "/finite", out .. "/a-finite", out .. "/m-finite"
    local name = "model.layers.0.self_attn.q_proj"
    os.execute(("cp -r tests/data/qwen3_f16 %s"):format(base))
    trained_adapter(base, dir, { r = 2, targets = { "q_proj" } })
    local config, file = read(dir .. "/adapter_config.json"), dir .. "/adapter_model.safetensors"
    local function with(ab, value)
      local f <close>, arrays = assert(bs.safetensors.open(file)), {}
      for _, t in ipairs(f:tensors()) do
        arrays[t.name] = f:read(t.name)
        if t.name:find(name .. ".lora_" .. ab, 1, true) then arrays[t.name]:set(1, value) end
      end
      bs.safetensors.write(file, arrays)
    end
    local good = read(file)
    local settings = { model = base, adapter = dir, out = merged }
    for _, case in ipairs { { "B", 1 / 0, "lora_B of it holds NaN" }, { "A", 0 / 0, "lora_A of it holds NaN" },
                            { "B", 1e8, "values pass the largest of f16" } } do
      with(case[1], case[2])
      refused(5, settings, "tensor '" .. name .. ".weight' cannot be merged", case[3], "nothing was written")
      assert.is_nil(bs.list_folder(merged))
      bs.write_file(file, good)
    end
    merge.run(settings)
    local before = read(merged .. "/model.safetensors")
    settings.overwrite = true
    local path = base .. "/model.safetensors"
    local f <close>, arrays = assert(bs.safetensors.open(path)), {}
    for _, t in ipairs(f:tensors()) do arrays[t.name] = f:read(t.name) end
    arrays[name .. ".weight"]:set(3, 0 / 0)
    bs.safetensors.write(path, arrays)
    refused(5, settings, "the model's own weight holds NaN")
    assert.equal(before, read(merged .. "/model.safetensors"))
    assert.equal(config, read(dir .. "/adapter_config.json"))
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
