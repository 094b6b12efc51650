-- SPDX-License-Identifier: Apache-2.0
--- What goes wrong in a run: values that are not finite, files that change, stages that are not pure,
-- budgets, adapters, settings, a full disk, a device that fails. Each ends in one message with the right
-- exit status; parameters and files stay what they were, and the process works as before.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"
local tiny = require "tiny"

-- qwen3 whose layer function is fn.
local function family(fn)
  local f = {}
  for key, value in pairs(qwen3) do f[key] = value end
  f.layer = fn
  return f
end

describe("values that are not finite", function()
  after_each(broken.check_usable)

  local cases = {
    { "model.layers.3.mlp.up_proj.weight", "layers.3" }, { "model.layers.0.input_layernorm.weight", "layers.0" },
    { "model.norm.weight", "norm" }, { "lm_head.weight", "head.0" },
  }
  for _, case in ipairs(cases) do
    it("in " .. case[1] .. " are found there", function()
      for _, home in ipairs { "disk", "ram", "gpu" } do
        broken.fails(5, { "loss is not finite", "block '" .. case[2] .. "'", "tensor '" .. case[1] .. "'",
                          "case/model.safetensors", "nothing was changed" },
          broken.train, { model = broken.with_nan(case[1], 7), home = home })
      end
    end)
  end

  it("in the second tile of the head name that tile", function()
    local tiles = job.new(broken.settings {})
    local first = assert(tiles.model.tiles[2], "the head has one tile").first
    tiles:close()
    broken.fails(5, { ("block 'head.%d'"):format(first), "tensor 'lm_head.weight'" }, broken.train,
      { model = broken.with_nan("lm_head.weight", (first + 1) * 32) })
  end)

  it("in a row of the embedding are found there", function()
    local id = broken.micro().ids[3]
    broken.fails(5, { "embedding rows", "model.embed_tokens.weight", "case/model.safetensors" }, broken.train,
      { model = broken.with_nan("model.embed_tokens.weight", id * 32) })
  end)

  it("of the arithmetic leave the parameters unchanged, and the job usable", function()
    local j <close> = job.new(broken.settings {})
    local b = j.instance.adapter[j.spec.adapters[1].full].b
    local value = j.instance.params:get(b)
    local want = j:step({ broken.micro() }, { apply = false }).loss
    local huge = bs.array.new("f32", value:dims())
    for i = 1, huge:count() do huge:set(i, 3e38) end
    j.instance.params:set(b, huge)
    local before = tiny.digest(j:parameters())
    broken.fails(5, { "is not finite, though the weights are", "output of layer 0", "lower lr=" }, j.step, j,
      { broken.micro() }, { next = true })
    assert.equal(before, tiny.digest(j:parameters()))
    assert.equal(0, j.steps_done)
    j.instance.params:set(b, value)
    assert.equal(want, j:step({ broken.micro() }, {}).loss)
    huge:set(1, 0 / 0)
    j.instance.params:set(b, huge)
    broken.fails(5, { "the adapter's '" .. j.instance.params:name(b) .. "' holds NaN" }, j.step, j, { broken.micro() })
  end)

  it("of evaluated rows end with status 5 and the name of the tensor", function()
    local model = broken.with_nan("model.layers.1.mlp.up_proj.weight")
    broken.run_fails(5, { "loss of the evaluated rows is not finite", "tensor 'model.layers.1.mlp.up_proj.weight'" },
      { "recipes/eval.lua", "model=" .. model, "data=tests/data/rows.jsonl", "micro_tokens=40", "home=disk" })
    broken.run_fails(5, { "loss of the evaluated rows is not finite" },
      { "recipes/qwen8b_lora.lua", "model=" .. model, "steps=1", "data=tests/data/rows.jsonl",
        "valid=tests/data/rows.jsonl", "step_tokens=48", "micro_tokens=40", "home=disk", "out=" })
  end)

  it("end the recipe with status 5 and save nothing", function()
    local out = broken.root .. "/nan-out"
    broken.run_fails(5, { "block 'layers.1'", "case/model.safetensors" },
      { "recipes/qwen8b_lora.lua", "model=" .. broken.with_nan("model.layers.1.mlp.up_proj.weight"), "steps=1",
        "data=tests/data/rows.jsonl", "step_tokens=48", "micro_tokens=40", "home=disk", "out=" .. out })
    assert.is_false(bs.is_file(out .. "/adapter_model.safetensors"))
  end)
end)

describe("a file that changes under the run", function()
  after_each(broken.check_usable)
  local good = broken.weights
  local engines = { { engine = "auto" }, { engine = "pool" }, { engine = "pool", no_direct = true } }

  -- change(path) runs in the first layer of a step, when later blocks have not been read.
  local function during(io, change)
    local dir, armed = broken.checkpoint(function() end), false
    local path = dir .. "/model.safetensors"
    local j = job.new(broken.settings {
      model = dir, io = io, dev_slots = 1, host_slots = 1,
      family = family(function(c, w, x, ctx)
        if armed and ctx.layer == 0 then
          armed = false
          change(path)
        end
        return qwen3.layer(c, w, x, ctx)
      end),
    })
    local want = j:step({ broken.micro() }, { apply = false }).loss
    armed = true
    return j, want, tiny.digest(j:parameters())
  end

  it("by getting shorter fails the step with block, file and offset", function()
    for _, io in ipairs(engines) do
      local j <close>, _, before = during(io, function(path) broken.write(path, good:sub(1, 40000)) end)
      broken.fails(1, { "block 'layers.", "case/model.safetensors' at ", "expected ", "got ", "has 40000 now" },
        j.step, j, { broken.micro() })
      assert.equal(before, tiny.digest(j:parameters()))
      broken.fails(1, { "case/model.safetensors' had", "has 40000 now" }, j.step, j, { broken.micro() })
    end
  end)

  it("by being removed or replaced ends with the step that noticed", function()
    local changes = {
      { "was removed", os.remove },
      { "was replaced", function(path)
        broken.write(path .. ".new", good)
        os.rename(path .. ".new", path)
      end },
    }
    for _, c in ipairs(changes) do
      local j <close>, want = during({}, c[2])
      assert.equal(want, j:step({ broken.micro() }, { apply = false }).loss)
      broken.fails(1, { "case/model.safetensors", c[1] }, j.step, j, { broken.micro() })
    end
  end)

  it("by being written to is refused, wherever the blocks are", function()
    for _, home in ipairs { "disk", "ram", "gpu" } do
      local dir = broken.checkpoint(function() end)
      local j <close> = job.new(broken.settings { model = dir, home = home })
      j:step({ broken.micro() }, { apply = false })
      broken.write(dir .. "/model.safetensors", good .. "\n")
      broken.fails(1, { "case/model.safetensors' had", "when it was opened" }, j.step, j, { broken.micro() })
    end
  end)
end)

describe("engines that are refused", function()
  it("leave others that give the same numbers", function()
    local want = broken.train {}
    for _, io in ipairs { { engine = "pool" }, { no_direct = true }, { engine = "pool", no_direct = true } } do
      assert.equal(want, broken.train { io = io })
    end
    broken.fails(1, { "io engine 'aio' is unknown", "auto, uring, pool" }, function()
      local ok, err = pcall(broken.train, { io = { engine = "aio" } })
      error(ok and "accepted" or err, 0)
    end)
  end)
end)

describe("a stage", function()
  after_each(broken.check_usable)

  it("that keeps a tensor for a later visit is told the scope and the layer", function()
    local kept
    local f = family(function(c, w, x, ctx)
      local y = qwen3.layer(c, w, x, ctx)
      if ctx.layer == 2 then y = y + kept end
      kept = x
      return y
    end)
    local ok, err = pcall(broken.train, { family = f })
    assert.is_false(ok)
    assert.matches("tensor of scope 'layer 1 forward, micro%-batch 0', which has ended", err)
    assert.matches("bad_run_spec.lua:%d+:", err)
  end)

  it("whose recompute differs from its forward is told so, in any visit, and the job stays usable", function()
    for visit = 6, 10 do -- five layers forward, then five backward from the top
      local count = -100
      local j <close> = job.new(broken.settings {
        family = family(function(c, w, x, ctx)
          count = count + 1
          local y = qwen3.layer(c, w, x, ctx)
          return count == visit and bs.op.scale(y, 1.0) or y
        end),
      })
      count = -100
      local want = j:step({ broken.micro() }, { apply = false }).loss
      local before = tiny.digest(j:parameters())
      count = 0
      broken.fails(1, { ("layer %d: the recompute"):format(10 - visit), "pure function" }, j.step, j,
        { broken.micro() }, { next = true })
      assert.equal(before, tiny.digest(j:parameters()))
      count = -100
      for _ = 1, 2 do assert.equal(want, j:step({ broken.micro() }, { apply = false }).loss) end
    end
  end)

  it("that raises, or gives no tensor, fails the job where it stands", function()
    for text, fn in pairs {
      ["bad_run_spec.lua:%d+: out of ideas"] = function() error "out of ideas" end,
      ["bs.tensor expected, got nil"] = function() end,
      [("takes %s rows of 32 channels, given %s rows of 48"):format(target.dtype, target.dtype)] = function(_, w, x)
        return w.mlp.up_proj(x)
      end,
    } do
      local ok, err = pcall(broken.train, { family = family(fn) })
      assert.is_false(ok)
      assert.matches(text, err)
    end
  end)

  it("whose family lacks a part is refused by name", function()
    for _, part in ipairs { "config", "tensors", "embed", "layer" } do
      local f = family(qwen3.layer)
      f[part] = nil
      broken.fails(1, { "family", part }, broken.train, { family = f })
    end
  end)
end)

describe("a budget that is too small", function()
  after_each(broken.check_usable)

  for _, budget in ipairs { "vram", "ram" } do
    it("of " .. budget .. " says the smallest that works, and that one works", function()
      local message = broken.fails(3, { budget .. "=", "is too small", "smallest that works" }, broken.train,
        { home = "auto", dev_slots = "auto", [budget] = 1000 })
      local least = tonumber(message:match("smallest that works is [^(]*%((%d+) bytes"))
      broken.train { home = "auto", dev_slots = "auto", [budget] = least }
      broken.fails(3, { budget .. "=" }, broken.train, { home = "auto", dev_slots = "auto", [budget] = least - 1 })
    end)
  end

  it("ends the recipe with status 3", function()
    local words = { "recipes/qwen8b_lora.lua", "model=" .. broken.good, "data=tests/data/rows.jsonl", "micro_tokens=40",
                    "out=" .. broken.root .. "/none" }
    words[#words + 1] = "vram=100KiB"
    broken.run_fails(3, { "vram=0.1 MiB is too small", "smallest that works" }, words)
    words[#words] = "ram=1MiB"
    broken.run_fails(3, { "ram=1.0 MiB is too small", "smallest that works" }, words)
  end)
end)

describe("a device that fails", function()
  it("gives a clear error wherever it does, closes, and leaves nothing", function()
    local n, finished = 1, false
    repeat
      local stage = "new"
      local ok, err = pcall(function()
        local j <close> = job.new(broken.settings { device = target.check, device_options = { fail_call = n } })
        stage = "step"
        for s = 1, 2 do j:step({ broken.micro(s) }, { next = s < 2 }) end
        j:parameters()
        finished = true
      end)
      if not ok then
        assert.equal("device", bs.code(err), err)
        assert.is_truthy(err:find("(injected)", 1, true), err)
      end
      n = n + (stage == "new" and 5 or 37)
    until finished or n > 100000
    assert.is_true(finished)
    broken.check_usable()
  end)

  it("stays lost until the job is closed", function()
    local j <close> = job.new(broken.settings { device = target.check, device_options = { fail_call = 400 } })
    for _ = 1, 3 do broken.fails(1, { "(injected)" }, j.step, j, { broken.micro() }) end
  end)
end)
