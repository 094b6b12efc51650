-- SPDX-License-Identifier: Apache-2.0
--- What a job computes in: dtype= and who decides it; plans and dry runs of bf16 on `meta`, which counts
-- memory and holds no numbers.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local store_keys = require "bs.instance.store_keys"
local qwen3 = require "bs.family.qwen3"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

local VOCAB = 200
local folders = {}
local function folder(family, kind)
  local key = (family == qwen3 and "dense-" or "staged-") .. kind
  if not folders[key] then
    folders[key] = tiny.folder("dtype-" .. key)
    local config = family == qwen3 and tiny.qwen3_config { vocab_size = VOCAB } or tiny.soft_gate_config()
    tiny.checkpoint(folders[key], family, config, kind)
  end
  return folders[key]
end

local function open(settings)
  settings.device, settings.dry = settings.device or "meta", true
  settings.micro_tokens, settings.micros = 24, 2
  settings.lora = settings.lora or { r = 4, alpha = 8, dropout = 0.1 }
  return job.new(settings)
end

local micros = { tiny.micro(1, VOCAB, { 9, 11 }, 2), tiny.micro(2, VOCAB, { 20 }) }

describe("a dry run in bf16", function()
  for _, family in ipairs { qwen3, soft_gate } do
    for _, kind in ipairs { "bf16", "f16", "f32" } do
      for _, trainable in ipairs { "lora", "base", "none" } do
        local name = (family == qwen3 and "dense " or "staged ") .. kind .. " " .. trainable
        it("gives the regions and the arena of the real one: " .. name, function()
          for _, home in ipairs { "gpu", "disk" } do
            local j <close> = open { model = folder(family, kind), dtype = "bf16", trainable = trainable,
                                     home = home, logits = true }
            if trainable ~= "none" then j:step(micros, { apply = trainable ~= "base" }) end
            j:walk(micros, { mode = "loss" })
            assert.equal(j.plan.peak, j.instance.engine:stats().peak_bytes)
            assert.equal(kind == "bf16", j.model.expand_bytes == 0)
          end
        end)
      end
    end
  end

  it("keeps hand-offs in bf16 and sums over experts in f32", function()
    local j <close> = open { model = folder(soft_gate, "bf16"), dtype = "bf16" }
    local types = {}
    for _, key in ipairs((store_keys.list(j.spec, "device", 0))) do types[key.name] = key.dtype end
    for _, name in ipairs { "h.0", "g", "mix.h", "mix.u", "mix.r", "mix.dh", "dy" } do
      assert.equal("bf16", types[name], name)
    end
    for _, name in ipairs { "y", "mix.du", "mix.dr" } do assert.equal("f32", types[name], name) end
  end)

  it("takes less than in f32 and needs no expansion of a bf16 checkpoint", function()
    local peak = {}
    for _, dtype in ipairs { "f32", "bf16" } do
      local j <close> = open { model = folder(qwen3, "bf16"), dtype = dtype, trainable = "none", home = "disk" }
      peak[dtype] = { arena = j.instance.engine:stats().arena_peak, all = j.plan.peak }
    end
    assert.is_true(peak.bf16.all < peak.f32.all)
  end)
end)

describe("dtype=", function()
  local function computes(settings)
    settings.trainable = "none"
    local j <close> = open(settings)
    return j.model.compute
  end

  it("auto is bf16 where the device can and most of the checkpoint is", function()
    assert.equal("bf16", computes { model = folder(qwen3, "bf16"), dtype = "auto" })
    assert.equal("f32", computes { model = folder(qwen3, "f32"), dtype = "auto" })
    assert.equal("f32", computes { model = folder(qwen3, "f16"), dtype = "auto" })
    assert.equal("f32", computes { model = folder(qwen3, "bf16"), dtype = "auto", device = "cpu" })
    assert.equal("f32", computes { model = folder(qwen3, "bf16") })
  end)

  local function refused(settings, text)
    local ok, err = pcall(computes, settings)
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
    assert.matches(text, err.message)
  end

  it("refuses what the device or nobody computes in", function()
    local model = folder(qwen3, "bf16")
    refused({ model = model, dtype = "bf16", device = "cpu" }, "dtype=bf16: device cpu computes in f32")
    refused({ model = model, dtype = "bf16", device = "check:cpu" }, "device check:cpu computes in f32")
    refused({ model = model, dtype = "f16" }, "dtype=f16; f32, bf16, auto is expected")
    refused({ model = model, device = "abacus" }, "device=abacus: .*no device is called 'abacus'")
  end)

  it("is an option of engines, and devices say whether they can", function()
    local cpu <close> = bs.device.open("cpu", { threads = 1 })
    local meta <close> = bs.device.open("meta", {})
    assert.is_false(cpu:props().bf16)
    assert.is_true(meta:props().bf16)
    assert.error_matches(function() bs.engine.open { device = cpu, compute = "bf16" } end,
      "the cpu device computes in f32")
    assert.error_matches(function() bs.engine.open { device = meta, compute = "f9" } end,
      "option 'compute': unknown dtype 'f9'")
    bs.engine.open({ device = meta, compute = "bf16" }):close()
  end)
end)

describe("parity", function()
  local function run(words)
    local out = tiny.folder("dtype-parity") .. "/log"
    local _, _, code = os.execute(("%s recipes/parity.lua model=tests/data/qwen3 "
      .. "reference=tests/data/qwen3/reference.safetensors %s >%s 2>&1"):format(
      os.getenv "BSLUA" or "build/release/bslua", words, out))
    local f <close> = assert(io.open(out))
    return code, f:read "a"
  end

  it("ends with status 2 where the device does not compute in the dtype", function()
    local code, text = run "dtype=bf16"
    assert.equal(2, code)
    assert.matches("dtype=bf16: device cpu computes in f32", text)
    assert.equal(2, (run "dtype=f16"))
  end)
end)
