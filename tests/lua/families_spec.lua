-- SPDX-License-Identifier: Apache-2.0
--- Every shipped family: its reference where one is at hand (BS_SHARED, default ../shared), and from the
-- project alone: gradients of all weights against differences of the loss, equal bits of every home,
-- adapters on every linear, which table longrope takes.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local checkpoint = require "bs.model.checkpoint"
local family = require "bs.model.find_family"
local job = require "bs.job"
local model = require "bs.model.model"
local models = require "family_models"
local tiny = require "tiny"

-- ---- references ------------------------------------------------------------------------------------------

local bslua = os.getenv("BSLUA") or "build/release/bslua"
local goldens = (os.getenv("BS_SHARED") or "../shared") .. "/goldens"

local function folders_in(dir)
  local out, p = {}, assert(io.popen(("ls '%s' 2>/dev/null"):format(dir)))
  for name in p:lines() do
    if io.open(("%s/%s/reference.safetensors"):format(dir, name)) then out[#out + 1] = name end
  end
  p:close()
  return out
end

local function parity(name, home)
  local out = tiny.folder("families")
  local ok = os.execute(("%s recipes/parity.lua model='%s/%s' reference='%s/%s/reference.safetensors' home=%s "
    .. "json=%s/json >%s/log 2>&1"):format(bslua, goldens, name, goldens, name, home, out, out))
  if not ok then return nil, checkpoint.read_file(out .. "/log") end
  local hashes = {}
  for _, c in ipairs(checkpoint.read_json(out .. "/json").checks) do hashes[c.name] = c.hash or c.error end
  return hashes
end

describe("the reference", function()
  local names = folders_in(goldens)
  if #names == 0 then
    it("is not at hand", function() pending("no folder " .. goldens .. " (BS_SHARED)") end)
  end
  for _, name in ipairs(names) do
    it("of " .. name .. " holds with every home, to the same bits", function()
      local known, why = pcall(family.find, checkpoint.read_json(goldens .. "/" .. name .. "/config.json"))
      if not known then return pending(tostring(why)) end
      local want, log = parity(name, "gpu")
      if not want and log:find("adapter_config.json: 'target_parameters'", 1, true) then
        assert.is_nil(log:find("FAIL", 1, true), log)
        return pending(name .. ": its adapter is refused")
      end
      assert.is_truthy(want, log)
      for _, home in ipairs { "ram", "disk" } do
        local got
        got, log = parity(name, home)
        assert.is_truthy(got, log)
        assert.same(want, got)
      end
    end)
  end
end)

-- ---- small models of every family -----------------------------------------------------------------------

local small, VOCAB = models.small, models.VOCAB

local function folder(kind, over, name)
  local dir = tiny.folder("family-" .. (name or kind))
  local hf = {}
  for key, value in pairs(small[kind]) do hf[key] = value end
  for key, value in pairs(over or {}) do hf[key] = value end
  tiny.checkpoint(dir, family.find(hf), hf, "f32")
  return dir
end

local function micros() return { tiny.micro(1, VOCAB, { 9, 20 }, 1), tiny.micro(2, VOCAB, { 12 }) } end

local function open(dir, settings)
  local s = { model = dir, micro_tokens = 32, micros = 2 }
  for key, value in pairs(settings) do s[key] = value end
  return job.new(s)
end

-- The checkpoint moved by h along a direction over the tensors of so many dims.
local function moved(dir, along, h)
  local to = tiny.folder "family-moved"
  local file <close> = assert(bs.safetensors.open(dir .. "/model.safetensors"))
  local arrays = {}
  for _, t in ipairs(file:tensors()) do
    local a, d = file:read(t.name), along[t.name]
    if d then
      local v = a:table()
      for i = 1, #v do v[i] = v[i] + h * d[i] end
      a = bs.array.new("f32", t.dims, v)
    end
    arrays[t.name] = a
  end
  bs.safetensors.write(to .. "/model.safetensors", arrays)
  bs.write_file(to .. "/config.json", checkpoint.read_file(dir .. "/config.json"))
  return to
end

-- A direction over the vectors (ndim 1) or matrices, and the slope of the loss along it by the gradients.
local function direction(dir, gradients, ndim)
  local file <close>, along, slope = assert(bs.safetensors.open(dir .. "/model.safetensors")), {}, 0
  for _, t in ipairs(file:tensors()) do
    if t.name:find "correction_bias" then -- of a choice, which has no slope
      for _, v in ipairs(gradients[t.name]:table()) do assert.equal(0, v) end
    elseif #t.dims == ndim then
      local g = gradients[t.name]:table()
      local d = tiny.direction(t.name, t.dims, g)
      for i = 1, #d do slope = slope + d[i] * g[i] end
      along[t.name] = d
    end
  end
  return along, slope
end

-- Gradients by the names of the file, those of slices joined.
local function by_tensor(j)
  local out = {}
  for name, list in pairs(model.in_file(j.model, j:gradients())) do
    local bytes = {}
    for k, g in ipairs(list) do bytes[k] = g:bytes() end
    out[name] = #list == 1 and list[1]
      or bs.array.new("f32", j.model.checkpoint.tensors[name].dims, table.concat(bytes))
  end
  return out
end

local function loss(dir)
  local j <close> = open(dir, { trainable = "none" })
  return (j:walk(micros(), { mode = "loss" }))
end

describe("a small model of", function()
  it("each family is tested", function()
    for _, name in ipairs(family.shipped) do assert.is_table(small[name], name) end
  end)

  local kinds = {}
  for kind in pairs(small) do kinds[#kinds + 1] = kind end
  table.sort(kinds)
  for _, kind in ipairs(kinds) do
    describe(kind, function()
      local dir, hf = nil, small[kind]
      setup(function() dir = folder(kind) end)

      it("has the gradients that its loss has, in every home", function()
        local want
        local smooth = models.all_experts[kind]
        local at = smooth and folder(kind, smooth, kind .. "-all") or dir
        for _, home in ipairs { "gpu", "ram", "disk" } do
          local j <close> = open(at, { trainable = "base", home = home })
          assert.is_true(#j.model.tiles > 1)
          j:step(micros(), { apply = false })
          want = want or by_tensor(j)
          assert.equal(tiny.digest(want), tiny.digest(by_tensor(j)), home)
        end
        local fused = kind == "gpt_oss" or kind == "qwen3_vl_moe"
        for ndim = 1, fused and 3 or 2 do
          local along, slope = direction(at, want, ndim)
          local h = 5e-3 / slope -- the loss, an f32 of about 6, moves by 0.01
          local by_loss = (loss(moved(at, along, h)) - loss(moved(at, along, -h))) / (2 * h)
          assert.is_true(math.abs(by_loss - slope) < 1e-3 * slope,
            ("%d dims: %.8g by differences, %.8g by gradients"):format(ndim, by_loss, slope))
        end
      end)

      it("trains an adapter on every linear, to the same bits in every home", function()
        local want, fam = nil, family.find(hf)
        local linears, targets = 0, {} -- experts and router are not "all", they are asked for by name
        model.each_linear(model.open(dir), function(l)
          linears = linears + 1
          targets[#targets + 1] = l.full:match "[^.]+$"
        end)
        for _, home in ipairs { "gpu", "disk" } do
          local j <close> = open(dir, { lora = { r = 2, targets = targets }, home = home, dev_slots = 2 })
          assert.equal(linears, #j.spec.adapters)
          for s = 1, 2 do j:step(micros(), { lr = 1e-2, next = s < 2 }) end
          local values = j:parameters()
          for name in pairs(values) do
            assert.equal(fam.peft_prefix .. fam.prefix(0):match("^.*layers%."), name:match("^.*layers%."))
          end
          want = want or tiny.digest(values)
          assert.equal(want, tiny.digest(values))
        end
      end)
    end)
  end
end)

-- ---- longrope: which table -----------------------------------------------------------------------------

describe("longrope", function()
  local function rope(short, long)
    return { type = "longrope", short_factor = short, long_factor = long, attention_factor = 1.25 }
  end
  local short, long = { 1.0, 1.1, 1.2, 1.3 }, models.long_factors
  local both, only_short, only_long
  setup(function()
    both = folder("phi3", { rope_scaling = rope(short, long) }, "longrope")
    only_short = folder("phi3", { rope_scaling = rope(short, short) }, "longrope-short")
    only_long = folder("phi3", { rope_scaling = rope(long, long) }, "longrope-long")
  end)
  local function logits(dir, lengths)
    local j <close> = open(dir, { trainable = "none", logits = true, micros = 1, home = "disk" })
    return j:walk({ tiny.micro(3, VOCAB, lengths) }, { mode = "logits" })[1]:hash()
  end

  it("takes the short factors up to the original length, the long ones from then on", function()
    assert.equal(logits(only_short, { 16 }), logits(both, { 16 }))
    assert.equal(logits(only_long, { 17 }), logits(both, { 17 }))
    assert.not_equal(logits(only_short, { 17 }), logits(both, { 17 }))
  end)

  it("goes by the longest row for all rows of a micro-batch", function()
    assert.equal(logits(only_short, { 5, 16, 4 }), logits(both, { 5, 16, 4 }))
    assert.equal(logits(only_long, { 5, 17, 4 }), logits(both, { 5, 17, 4 }))
  end)
end)
