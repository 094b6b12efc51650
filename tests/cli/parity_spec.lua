-- SPDX-License-Identifier: Apache-2.0
--- recipes/parity.lua against every reference in tests/data: all homes hold, and give the same bits.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local tiny = require "tiny"

local bslua = os.getenv("BSLUA") or "build/release/bslua"
local out = tiny.folder("parity")

local function parity(name, extra, reference)
  local json = out .. "/result.json"
  os.remove(json)
  local ok, _, code = os.execute(("%s recipes/parity.lua model=tests/data/%s reference=%s json=%s %s >%s/log 2>&1")
    :format(bslua, name, reference or "tests/data/" .. name .. "/reference.safetensors", json, extra, out))
  local f = io.open(json)
  local result = f and bs.json.decode(f:read("a"))
  if f then f:close() end
  return ok == true, code, result
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

  it("fails when one number of the reference is off", function()
    local ref = assert(bs.safetensors.open("tests/data/llama_bias/reference.safetensors"))
    local arrays = {}
    for _, t in ipairs(ref:tensors()) do arrays[t.name] = ref:read(t.name) end
    local name = "grad.base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    local a = arrays[name]
    a:set(1, a:get(1) * 1.01 + 1e-4)
    bs.safetensors.write(out .. "/reference.safetensors", arrays)
    bs.write_file(out .. "/reference.json",
      assert(io.open("tests/data/llama_bias/reference.json")):read("a"))
    local ok, code, result = parity("llama_bias", "home=gpu", out .. "/reference.safetensors")
    assert.is_false(ok)
    assert.equal(1, code)
    assert.is_false(result.ok)
    for _, c in ipairs(result.checks) do assert.equal(c.name ~= name, c.ok, c.name) end
  end)
end)
