-- SPDX-License-Identifier: Apache-2.0
--- Saved adapters: what is written comes back, by PEFT's rules; a save is tested before it replaces anything;
-- training goes on from it.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local adapter = require "bs.model.adapter"
local job = require "bs.job"
local model = require "bs.model.model"
local save = require "bs.train.save"
local tiny = require "tiny"

local out = tiny.folder("adapter")
local micro = tiny.micro(3, 40, { 9, 6 })

local function open(settings)
  settings.model = settings.model or "tests/data/llama"
  settings.micro_tokens = settings.micro_tokens or 24
  return job.new(settings)
end

local function train(j, steps)
  local losses = {}
  for s = 1, steps do losses[s] = j:step({ micro }, { lr = 2e-2 }).loss end
  return losses
end

local function digest(j) return tiny.digest(j:parameters()) end

local function read(path)
  local f <close> = assert(io.open(path, "rb"))
  return f:read("a")
end

local function config_of(dir) return bs.json.decode(read(dir .. "/adapter_config.json")) end

local function last(j) return j:walk({ micro }, { mode = "last" })[1] end

describe("an adapter", function()
  local cases = {
    { "of all linears", { r = 4 } },
    { "with rsLoRA", { r = 4, alpha = 3, rslora = true } },
    { "of some targets", { r = 2, targets = { "q_proj", "mlp" } } },
    { "of some layers", { r = 2, layers = { 1 } } },
    { "with patterns", { r = 4, alpha = 8, rank_pattern = { q_proj = 2, ["layers.1.mlp.up_proj"] = 6 },
                         alpha_pattern = { down_proj = 5 } } },
    { "with everything", { r = 3, alpha = 2, rslora = true, dropout = 0.25, layers = { 0, 1 },
                           targets = { "attention" }, rank_pattern = { ["layers.0.self_attn.v_proj"] = 1 },
                           alpha_pattern = { v_proj = 7 } } },
  }
  for _, name in ipairs { "llama", "qwen3" } do
    for i, case in ipairs(cases) do
      it(name .. " " .. case[1] .. " comes back with the same bits, scales and logits", function()
        local dir = ("%s/%s-%d"):format(out, name, i)
        local j <close> = open { model = "tests/data/" .. name, lora = case[2], home = "disk" }
        train(j, 2)
        local before, logits = digest(j), last(j)
        j:save(dir)
        assert.equal(before, digest(j))
        assert.same({ "adapter_config.json", "adapter_model.safetensors" }, bs.list_folder(dir))
        for _, settings in ipairs { { trainable = "lora" }, { trainable = "none" } } do
          settings.model, settings.adapter = "tests/data/" .. name, dir
          local k <close> = open(settings)
          assert.equal(before, digest(k))
          assert.equal(logits:hash(), last(k):hash())
          assert.equal(#j.spec.adapters, #k.spec.adapters)
          for n, a in ipairs(j.spec.adapters) do
            local b = k.spec.adapters[n]
            assert.same({ a.full, a.r, a.alpha, a.scale, a.dropout }, { b.full, b.r, b.alpha, b.scale, b.dropout })
          end
          if settings.trainable == "lora" then
            k:save(dir .. "-again")
            assert.equal(read(dir .. "/adapter_config.json"), read(dir .. "-again/adapter_config.json"))
            assert.equal(read(dir .. "/adapter_model.safetensors"), read(dir .. "-again/adapter_model.safetensors"))
          end
        end
      end)
    end
  end

  it("says what it wraps in PEFT's words", function()
    local dir = out .. "/words"
    local j <close> = open { lora = { r = 4, alpha = 8, layers = { 1 }, targets = { "v_proj", "q_proj" }, rslora = true,
                                      rank_pattern = { q_proj = 2 }, alpha_pattern = { v_proj = 3 } } }
    j:save(dir)
    local c = config_of(dir)
    assert.same({ "q_proj", "v_proj" }, c.target_modules)
    assert.same({ 1 }, c.layers_to_transform)
    assert.equal("layers", c.layers_pattern)
    assert.same({ 4, 8, true, "LORA", "none" }, { c.r, c.lora_alpha, c.use_rslora, c.peft_type, c.bias })
    assert.same({ ["model.layers.1.self_attn.q_proj"] = 2 }, c.rank_pattern)
    assert.same({ ["model.layers.1.self_attn.v_proj"] = 3 }, c.alpha_pattern)
    local file <close> = assert(bs.safetensors.open(dir .. "/adapter_model.safetensors"))
    assert.same({ format = "pt" }, file:metadata())
    assert.is_truthy(file:find("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"))
    assert.equal(4, #file:tensors())
  end)

  it("that is no product of layers and names is written with full names", function()
    local dir = out .. "/odd"
    local j <close> = open { lora = { r = 2, targets = { "layers.0.self_attn.q_proj", "layers.1.mlp.up_proj" } } }
    train(j, 1)
    j:save(dir)
    local c = config_of(dir)
    assert.same({ "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj" }, c.target_modules)
    assert.equal(bs.json.null, c.layers_to_transform)
    local k <close> = open { adapter = dir }
    assert.equal(digest(j), digest(k))
  end)

  it("with patterns that disagree, or are expressions, is refused", function()
    for _, case in ipairs {
      { 1, "matches two patterns", { alpha_pattern = { q_proj = 1, ["self_attn.q_proj"] = 2 } } },
      { 2, "regular expressions are not", { alpha_pattern = { ["layers\\.[01]\\..*"] = 1 } } },
    } do
      local ok, err = pcall(open, { lora = case[3] })
      assert.is_false(ok)
      assert.equal(case[1], err.bs_exit)
      assert.is_truthy(tostring(err):find(case[2], 1, true), tostring(err))
    end
    local same <close> = open { lora = { alpha_pattern = { q_proj = 1, ["self_attn.q_proj"] = 1 } } }
    assert.is_truthy(same)
  end)

  it("that is used and not trained takes its values only", function()
    local dir = out .. "/frozen"
    local j <close> = open { lora = { r = 8 } }
    j:save(dir)
    local k <close> = open { adapter = dir, trainable = "none" }
    assert.is_true(k.instance.params:device_bytes() * 3 < j.instance.params:device_bytes())
    assert.error_matches(function() k.instance.params:grad(0) end, "is frozen")
    assert.error_matches(function() k.instance.params:zero_grad() end, "are frozen")
    local m, n = j:walk({ micro }, { mode = "loss" }), k:walk({ micro }, { mode = "loss" })
    assert.equal(m, n)
  end)
end)

describe("a save", function()
  it("goes on exactly where training was: steps before and after see no difference", function()
    local function run(saves, micros)
      local j <close> = open { lora = { r = 4, dropout = 0.1 }, home = "disk", micros = micros }
      local losses = train(j, 2)
      if saves then j:save(out .. "/between") end
      table.move(train(j, 2), 1, 2, 3, losses)
      return losses, digest(j)
    end
    for _, micros in ipairs { 1, 2, 3, 4 } do
      local want, hash = run(false, micros)
      local got, other = run(true, micros)
      assert.same(want, got)
      assert.equal(hash, other)
    end
  end)

  it("is what training goes on from, with a fresh optimizer", function()
    local dir = out .. "/resume"
    local j <close> = open { lora = { r = 4 } }
    train(j, 3)
    j:save(dir)
    local next_loss = j:step({ micro }, { apply = false }).loss
    local k <close> = open { adapter = dir }
    assert.equal(next_loss, k:step({ micro }, {}).loss)
    assert.equal(1, k.steps_done)
    k:save(dir)
    local again <close> = open { adapter = dir }
    assert.equal(digest(k), digest(again))
  end)

  it("is what the recipe trains on from with adapter=, which has its own rank and targets", function()
    local dir = out .. "/recipe"
    local function recipe(words)
      local p <close> = assert(io.popen(("%s recipes/qwen8b_lora.lua model=tests/data/llama data=tests/data/rows.jsonl "
        .. "valid=tests/data/rows.jsonl steps=2 step_tokens=48 micro_tokens=40 lr=1e-2 out=%s %s 2>&1"):format(
        os.getenv("BSLUA") or "build/release/bslua", dir, words)))
      return p:read("a")
    end
    local made = recipe "r=3 alpha=5"
    local first, last_loss = made:match("held%-out loss ([%d.]+) %-> ([%d.]+)")
    assert.is_true(tonumber(last_loss) < tonumber(first))
    local again = recipe("adapter=" .. dir)
    assert.equal(last_loss, again:match("held%-out loss ([%d.]+) %->"))
    local told = "rows from the first on in the order of seed=1, a new warm-up, fresh moments\n"
    assert.same({ nil, 1 }, { made:find(told, 1, true), select(2, again:gsub(told:gsub("%-", "%%-"), "")) })
    assert.same({ 3, 5 }, { config_of(dir).r, config_of(dir).lora_alpha })
    assert.matches("r= is what the adapter in " .. dir .. " says", recipe("r=3 adapter=" .. dir), 1, true)
  end)

  it("of an adapter that has not been trained yet is fine", function()
    local j <close> = open { lora = { r = 4 } }
    j:save(out .. "/untrained")
  end)

  describe("whose file is damaged before its test ends with status 6 and leaves the old one:", function()
    local dir, j, tensors, config, before = out .. "/damaged", nil, nil, nil, nil
    setup(function()
      j = open { lora = { r = 4, alpha = 8, alpha_pattern = { q_proj = 4 } } }
      train(j, 1)
      j:save(dir)
      tensors, config = read(dir .. "/adapter_model.safetensors"), read(dir .. "/adapter_config.json")
      train(j, 1)
      before = digest(j)
    end)
    teardown(function() j:close() end)

    local function in_config(pattern, by)
      return function(_, path) bs.write_file(path, (read(path):gsub(pattern, by))) end
    end
    local function cut(path, n) bs.write_file(path, read(path):sub(1, n)) end
    -- {what is damaged, what is said, fn(path of the tensors, path of the config)}
    local cases = {
      { "a bit of a tensor", "has other bits", function(path)
        local text = read(path)
        bs.write_file(path, text:sub(1, -2) .. string.char(text:byte(-1) ~ 1))
      end },
      { "tensors that are cut", "cannot be read back", function(path) cut(path, -5) end },
      { "a config that is cut", "cannot be read back", function(_, path) cut(path, 40) end },
      { "another alpha", "has scale", in_config('"lora_alpha": *8', '"lora_alpha": 9') },
      { "another kind of scale", "has scale", in_config('"use_rslora": *false', '"use_rslora": true') },
      { "no pattern of alphas", "has scale", in_config('"alpha_pattern": *%b{}', '"alpha_pattern": {}') },
      { "no tensors", "cannot be read back", function(path) os.remove(path) end },
      { "tensors without one linear", "is not in it", function(path)
        local f <close>, arrays = assert(bs.safetensors.open(path)), {}
        for _, d in ipairs(f:tensors()) do
          if not d.name:find("layers.0.mlp.up_proj", 1, true) then arrays[d.name] = f:read(d.name) end
        end
        bs.safetensors.write(path, arrays, f:metadata())
      end },
    }
    for _, case in ipairs(cases) do
      local what, text, damage = table.unpack(case)
      it(what, function()
        local ok, err = pcall(save.adapter, j.instance, dir, { tamper = damage })
        assert.is_false(ok)
        assert.equal(6, err.bs_exit, tostring(err))
        assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
        assert.equal(tensors, read(dir .. "/adapter_model.safetensors"))
        assert.equal(config, read(dir .. "/adapter_config.json"))
        assert.same({ "adapter_config.json", "adapter_model.safetensors" }, bs.list_folder(dir))
        assert.equal(before, digest(j))
      end)
    end

    it("the next one, which is whole, takes its place", function()
      j:save(dir)
      assert.not_equal(tensors, read(dir .. "/adapter_model.safetensors"))
    end)
  end)

  describe("is tested by its effect on logits:", function()
    local dir, j, inst, walk = out .. "/effect", nil, nil, nil
    before_each(function()
      j = open { lora = { r = 4 } }
      train(j, 1)
      inst = j.instance
      walk = inst.walk
    end)
    after_each(function() j:close() end)

    -- The save fails its test, says so and leaves nothing.
    local function refused(text)
      local ok, err = pcall(j.save, j, dir)
      assert.is_false(ok)
      assert.equal(6, err.bs_exit)
      assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
      assert.is_nil(bs.list_folder(dir))
    end

    it("an adapter that changes none is refused", function()
      inst.walk = function(self, micros, o) return walk(self, micros, { mode = o.mode }) end -- the variants are not set
      refused "it has no effect"
    end)

    it("one that gives others than the live model is refused", function()
      local calls = 0
      inst.walk = function(...)
        local got = walk(...)
        calls = calls + 1
        if calls == 2 then got[1]:set(1, 0) end
        return got
      end
      refused "differ from the live model's"
    end)

    it("a test that itself fails leaves the parameters as they were, and the job able to save", function()
      local before = digest(j)
      inst.walk = function(self, micros, o)
        walk(self, micros, o)
        error("disk fell out")
      end
      assert.error_matches(function() j:save(dir) end, "disk fell out")
      assert.equal(before, digest(j))
      inst.walk = nil
      j:save(dir)
    end)
  end)

  it("holds one matrix of the adapter in memory at a time", function()
    local script, dir = out .. "/peak.lua", out .. "/peak"
    bs.write_file(script, ([[
      local bs, job = require "bs", require "bs.job"
      local j <close> = job.new { model = "tests/data/qwen3", micro_tokens = 24, lora = { r = 16 } }
      collectgarbage()
      print(bs.host_peak("arrays"))
      j:save("%s")
      local most = 0
      for _, a in ipairs(j.spec.adapters) do most = math.max(most, a.r * (a.inn + a.out) * 4, a.r * a.out * 4 * 2) end
      print(bs.host_peak("arrays"), most, j.model.config.vocab * 4 * 3)]]):format(dir))
    local p <close> = assert(io.popen((os.getenv("BSLUA") or "build/release/bslua") .. " " .. script))
    local before, peak, pair, logits = p:read("n", "n", "n", "n")
    assert.is_true(peak <= math.max(before, 2 * pair + logits), ("%d bytes, %d before"):format(peak, before))
  end)

  it("of a parameter that is not finite is refused by its name, and nothing is written", function()
    for _, bad in ipairs { 0 / 0, math.huge } do
      local j <close> = open { lora = { r = 2 } }
      local params, dir = j.instance.params, out .. "/not-finite"
      local value = params:get(3)
      value:set(5, bad)
      params:set(3, value)
      local ok, err = pcall(j.save, j, dir)
      assert.is_false(ok)
      assert.equal(5, err.bs_exit)
      assert.is_truthy(tostring(err):find("tensor '" .. params:name(3) .. "' holds NaN or infinity", 1, true))
      assert.is_nil(bs.list_folder(dir))
    end
  end)

  it("keeps what is somebody else's in the folder, and the modes of what it replaces", function()
    local dir = out .. "/strangers"
    local j <close> = open { lora = { r = 2 } }
    j:save(dir)
    os.execute(("cd %s && echo mine > README.md && mkdir sub && echo deep > sub/x && ln -s x l && chmod 600 *.json "
      .. "&& chmod 750 . && echo litter > adapter_model.safetensors.tmp.999999999"):format(dir))
    train(j, 1)
    j:save(dir)
    assert.same({ "README.md", "adapter_config.json", "adapter_model.safetensors", "l", "sub" }, bs.list_folder(dir))
    assert.equal("mine\n", read(dir .. "/README.md"))
    assert.equal("deep\n", read(dir .. "/sub/x"))
    local p <close> = assert(io.popen(("stat -c %%a %s %s/adapter_config.json"):format(dir, dir)))
    assert.equal("750\n600\n", p:read("a"))
    local k <close> = open { adapter = dir }
    assert.equal(digest(j), digest(k))
  end)

  it("replaces files only where files are", function()
    local j <close> = open { lora = { r = 2 } }
    local dir = out .. "/taken"
    bs.mkdir(dir .. "/adapter_config.json")
    local ok, err = pcall(j.save, j, dir)
    assert.is_false(ok)
    assert.equal("io", bs.code(err))
    assert.same({ "adapter_config.json" }, bs.list_folder(dir))
  end)
end)

it("adapter.open reads no matrix before it is asked", function()
  local m = model.open("tests/data/llama")
  for _ = 1, 4 do collectgarbage() end -- arrays that earlier tests left
  local before = bs.host_bytes("arrays")
  local a <close> = adapter.open(m, "tests/data/llama/adapter")
  assert.equal(before, bs.host_bytes("arrays"))
  local x, y = a:read(a.list[1].full)
  assert.same({ a.list[1].r, a.list[1].inn }, x:dims())
  assert.same({ a.list[1].out, a.list[1].r }, y:dims())
end)
