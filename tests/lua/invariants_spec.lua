-- SPDX-License-Identifier: Apache-2.0
--- What the program promises whatever the placement: streamed equals resident, the plan's bytes and peak
-- are what happens, accumulation changes nothing, nothing grows.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"
local tiny = require "tiny"

local VOCAB = 300
local folders = {}
local function folder(dtype, over)
  local key = dtype .. (over and over.tie_word_embeddings and "-tied" or "")
  if not folders[key] then
    folders[key] = tiny.folder("invariants-" .. key)
    tiny.checkpoint(folders[key], qwen3,
      tiny.qwen3_config(over), dtype)
  end
  return folders[key]
end

local function open(settings)
  settings.model = settings.model or folder("bf16")
  settings.micro_tokens, settings.micros = settings.micro_tokens or 24, settings.micros or 2
  settings.lora = settings.lora or { r = 4, alpha = 8, dropout = 0.1, top_fraction = 0.6 }
  return job.new(target.settings(settings))
end

local function micros_of(s) return { tiny.micro(s, VOCAB, { 9, 11 }, 2), tiny.micro(s + 50, VOCAB, { 20 }) } end

local function train(settings, steps)
  local j <close> = open(settings)
  local losses, grads = {}, 0
  for s = 1, steps do
    losses[s] = j:step(micros_of(s), { lr = 1e-2, next = s < steps }).loss
    grads = bs.hash(string.pack("<i8", tiny.digest(j:gradients())), grads)
  end
  return losses, tiny.digest(j:parameters()), grads
end

local workspace = target.workspace()
local placements = {
  { home = "ram" }, { home = "disk" }, { home = "disk", dev_slots = 1, host_slots = 1 },
  { home = "disk", dev_slots = 2, host_slots = 1, boundaries = "host" },
  { home = "ram", dev_slots = 3, boundaries = "host" },
  { home = "disk", dev_slots = 2, io = { engine = "pool", threads = 3, request_bytes = 4096 } },
  { home = "disk", io = { no_direct = true } },
  { home = "auto", vram = 700 * 1024 + workspace },
  { home = "auto", vram = 700 * 1024 + workspace, ram = 15 * 512 * 1024 },
  { home = "disk", threads = 1 }, { home = "gpu", threads = 1 },
  { home = "disk", keep = 0 }, { home = "ram", keep = 1, boundaries = "host" }, { home = "gpu", keep = 2 },
}

local function name_of(p)
  local parts = {}
  for key, value in pairs(p) do
    parts[#parts + 1] = key .. "=" .. (type(value) == "table" and "set" or tostring(value))
  end
  table.sort(parts)
  return table.concat(parts, " ")
end

describe("streamed equals resident, three steps, every byte:", function()
  for _, kind in ipairs { "bf16", "f32" } do
    local losses, values, grads
    setup(function() losses, values, grads = train({ home = "gpu", keep = 0, model = folder(kind) }, 3) end)
    for _, p in ipairs(placements) do
      it(kind .. " " .. name_of(p), function()
        local settings = { model = folder(kind) }
        for key, value in pairs(p) do settings[key] = value end
        local l, v, g = train(settings, 3)
        assert.same(losses, l)
        assert.equal(values, v)
        assert.equal(grads, g)
      end)
    end
  end

  it("with a tied head and trainable base, gradients of every home", function()
    local model = folder("f32", { tie_word_embeddings = true })
    local want
    for _, home in ipairs { "gpu", "ram", "disk" } do
      local j <close> = open { model = model, trainable = "base", home = home }
      j:step(micros_of(1), { apply = false })
      local got = tiny.digest(j:gradients())
      want = want or got
      assert.equal(want, got, home)
    end
  end)
end)

describe("the plan", function()
  for _, p in ipairs(placements) do
    it("moves the bytes it predicts and reaches its peak: " .. name_of(p), function()
      local settings = {}
      for key, value in pairs(p) do settings[key] = value end
      local j <close> = open(settings)
      for s = 1, 4 do j:step(micros_of(s), { lr = 1e-2, next = s < 4 }) end
      local s, placed = j.instance.stream:stats(), j.instance.placement
      local cold, warm = placed:bytes(false), placed:bytes(true)
      local moved = { disk_payload = s.disk_payload, disk_read = s.disk_read - s.disk_reread,
                      link = s.link_bytes, loads = s.loads, reads = s.reads }
      for edge, bytes in pairs(moved) do assert.equal(cold[edge] + 3 * warm[edge], bytes, edge) end
      local e = j.instance.engine:stats()
      assert.equal(j.plan.peak, e.peak_bytes)
      assert.equal(e.pool_bytes, e.peak_bytes)
    end)
  end

  -- Of a program that ends far from where it begins, slots given without a next program would settle differently.
  it("moves the bytes it predicts in steps that do not say what follows", function()
    local j <close> = open { home = "disk", dev_slots = 3, lora = { r = 2, top_fraction = 0.2 } }
    local warm, before = j.instance.placement:bytes(true), nil
    for s = 1, 5 do
      j:step(micros_of(s), { lr = 1e-2 })
      local stats = j.instance.stream:stats()
      local moved = { stats.disk_read - stats.disk_reread, stats.link_bytes, stats.loads }
      if s > 1 then
        assert.same({ warm.disk_read, warm.link, warm.loads },
          { moved[1] - before[1], moved[2] - before[2], moved[3] - before[3] }, "step " .. s)
      end
      before = moved
    end
  end)

  it("keeps activations of upper layers where that fits and pays", function()
    local kept <close> = open { home = "gpu" }
    assert.equal(kept.spec.keepable, kept.plan.keep)
    local bare <close> = open { home = "gpu", keep = 0 }
    assert.is_true(kept.plan.peak > bare.plan.peak)
    local tight <close> = open { home = "gpu", vram = bare.plan.peak }
    assert.equal(0, tight.plan.keep)
    local ok, err = pcall(open, { keep = kept.spec.keepable + 1 })
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
    assert.matches("keep=" .. kept.spec.keepable + 1 .. "; at most " .. kept.spec.keepable, err.message, 1, true)
  end)

  it("predicts the embedding rows once the batch is known", function()
    local j <close> = open { home = "disk" }
    local want = 0
    local before = j.instance.embedding:stats().read
    j:step(micros_of(1), {})
    for m = 0, 1 do
      local _, read = j.instance.embedding:predict(m)
      want = want + read
    end
    assert.equal(want, j.instance.embedding:stats().read - before)
  end)

  it("honours budgets to the byte and says the smallest that works", function()
    local ok, err = pcall(open, { vram = 1000 })
    assert.is_false(ok)
    assert.equal(3, err.bs_exit)
    local least = tonumber(err.message:match("smallest that works is [^(]*%((%d+) bytes"))
    assert.is_number(least)
    local refused, again = pcall(open, { vram = least - 1 })
    assert.is_false(refused)
    assert.equal(3, again.bs_exit)
    local j <close> = open { vram = least }
    assert.is_true(j.plan.peak <= least)
    j:step(micros_of(1), {})
    assert.is_true(j.instance.engine:stats().peak_bytes <= least)
    assert.is_true(bs.host_bytes("device") <= least)
  end)

  it("counts what kernels need for themselves as a part of the pool", function()
    local function peak(bytes, vram)
      local j <close> = open { home = "auto", vram = vram, device_options = { workspace_bytes = bytes } }
      j:step(micros_of(1), {})
      assert.equal(j.plan.peak, j.instance.engine:stats().peak_bytes)
      return j.plan.peak
    end
    local bare, more = peak(0, 64 << 20), peak(1 << 20, 64 << 20)
    assert.equal(1 << 20, more - bare)
    assert.is_true(peak(1 << 20, more - 1) < more) -- budgets hold with it
  end)

  it("keeps accounted host bytes within ram=", function()
    local ok, err = pcall(open, { ram = 1000 })
    assert.is_false(ok)
    assert.equal(3, err.bs_exit)
    collectgarbage()
    local ram = 8 * 1024 * 1024
    local j <close> = open { ram = ram, vram = 700 * 1024 + workspace }
    for s = 1, 2 do j:step(micros_of(s), {}) end
    local sum = 0
    for _, tag in ipairs(bs.tags()) do
      if tag ~= "device" and tag ~= "arrays" then sum = sum + bs.host_bytes(tag) end
    end
    assert.is_true(sum <= ram, sum .. " bytes in use")
  end)

  it("reads less when more is resident", function()
    local last
    for _, vram in ipairs { 620, 700, 800, 2000 } do
      local j <close> = open { vram = vram * 1024 + workspace, ram = 15 * 512 * 1024, dev_slots = 2, keep = 0 }
      local link = j.instance.placement:bytes(true).link
      assert.is_true(last == nil or link <= last)
      last = link
    end
    assert.equal(0, last)
  end)
end)

describe("accumulation", function()
  it("of m micro-batches equals one of m times the size, and reads the same bytes", function()
    local split, whole
    local a, b = tiny.micro(1, VOCAB, { 9, 11 }, 2), tiny.micro(2, VOCAB, { 20 })
    local both = { row_len = {}, ids = {}, labels = {}, row_id = {} }
    for _, m in ipairs { a, b } do
      for key, list in pairs(both) do
        for _, v in ipairs(m[key]) do list[#list + 1] = v end
      end
    end
    local bytes = {}
    local function gradients(settings, micros)
      settings.home, settings.lora = "disk", { r = 4, alpha = 8, top_fraction = 0.6 }
      local j <close> = open(settings)
      for _ = 1, 2 do j:step(micros, { apply = false }) end
      bytes[#bytes + 1] = j.instance.stream:stats().disk_read
      return j:gradients()
    end
    split = gradients({ micro_tokens = 40, micros = 2 }, { a, b })
    whole = gradients({ micro_tokens = 40, micros = 1 }, { both })
    for name, g in pairs(whole) do
      assert.is_true(bs.array.rel_err(split[name], g) < 1e-5, name)
    end
    assert.equal(bytes[1], bytes[2])
  end)

  it("isolates the rows of a micro-batch", function()
    local j <close> = open { trainable = "none", logits = true }
    local a, b = tiny.micro(1, VOCAB, { 9 }), tiny.micro(2, VOCAB, { 13 })
    local both = { row_len = { 9, 13 }, ids = table.move(b.ids, 1, 13, 10, table.move(a.ids, 1, 9, 1, {})) }
    local together = j:walk({ both }, { mode = "logits" })[1]
    local alone = j:walk({ a, b }, { mode = "logits" })
    assert.is_true(bs.array.rel_err(together:slice_rows(1, 9), alone[1]) < 1e-5)
    assert.is_true(bs.array.rel_err(together:slice_rows(10, 22), alone[2]) < 1e-5)
  end)
end)

describe("a long run", function()
  it("keeps memory and descriptors flat after step 2", function()
    for _ = 1, 4 do collectgarbage() end -- what earlier tests left to the collector closes its files now
    local j <close> = open { home = "disk" }
    local function descriptors() -- but for the pipe of popen itself, which may have one or two ends
      local p = assert(io.popen("ls -l /proc/" .. bs.pid() .. "/fd | grep -vc pipe:"))
      local n = p:read("n")
      p:close()
      return n
    end
    local function snapshot()
      collectgarbage()
      collectgarbage()
      local s = { fd = descriptors(), arena = j.instance.engine:stats().arena_now }
      for _, tag in ipairs(bs.tags()) do s[tag] = bs.host_bytes(tag) end
      return s
    end
    local first
    for s = 1, 12 do
      local n = 5 + s
      j:step({ tiny.micro(s, VOCAB, { n }, 1) }, { next = s < 12 })
      if s == 3 then first = snapshot() end
    end
    assert.same(first, snapshot())
  end)

  it("is repeatable after a step that was not applied", function()
    local j <close> = open { home = "disk" }
    local a = j:step(micros_of(1), { apply = false })
    local g = tiny.digest(j:gradients())
    local b = j:step(micros_of(1), { apply = false })
    assert.equal(a.loss, b.loss)
    assert.equal(g, tiny.digest(j:gradients()))
  end)
end)
