-- SPDX-License-Identifier: Apache-2.0
--- Generation: a walk with the cache gives the logits of a whole forward, whatever the rows, pieces and homes;
-- choosing follows its definition.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local generation = require "generation"
local job = require "bs.job"
local models = require "family_models"
local sample = require "bs.decode.sample"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

local root = tiny.folder("generate")
local greedy = generation.greedy

local prompts_of, run = generation.prompts, generation.run

-- Every step's logits against a forward of all the tokens before it.
local function check_against_forward(settings, prompts, results, seen, bound)
  settings.micro_tokens, settings.rows = 64, 1
  settings.trainable = "none"
  local j <close> = job.new(settings)
  local worst = 0
  for i, prompt in ipairs(prompts) do
    local ids = table.move(prompt, 1, #prompt, 1, {})
    for step, id in ipairs(results[i].ids) do
      local want = j:walk({ { row_len = { #ids }, ids = ids } }, { mode = "last" })[1]
      local err = bs.array.rel_err(seen[i][step], want)
      worst = math.max(worst, err)
      assert.is_true(err <= bound, ("prompt %d, step %d: %.2e"):format(i, step, err))
      ids[#ids + 1] = id
    end
    assert.equal(#prompt + #results[i].ids, #ids)
  end
  return worst
end

local function checkpoint(kind)
  local dir, config = root .. "/" .. kind, models.small[kind] or tiny.soft_gate_config()
  tiny.checkpoint(dir, models.small[kind] and family.find(config) or soft_gate, config, "bf16")
  return dir, models.small[kind] and models.VOCAB or 200
end

describe("a walk with the cache gives the logits of a whole forward:", function()
  for kind in pairs(models.small) do
    it(kind, function()
      local dir, vocab = checkpoint(kind)
      local prompts = prompts_of(vocab, { 3, 8, 1 })
      local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 5, micros = 2, rows = 3,
                                  cache = { rows = 3, tokens = 14 } }
      local results, seen, counts = run(j, prompts, 6)
      check_against_forward({ model = dir }, prompts, results, seen, 1e-5)
      assert.equal(12 + 3 * 5, counts.tokens)
    end)
  end

  it("a staged family", function()
    local dir, vocab = checkpoint("soft_gate")
    local prompts = prompts_of(vocab, { 4, 2 })
    local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 6, cache = { rows = 2, tokens = 9 } }
    local results, seen = run(j, prompts, 5)
    check_against_forward({ model = dir }, prompts, results, seen, 1e-5)
  end)

  it("streamed from disk, on the checking device, with an adapter, and long enough for many blocks of keys", function()
    local dir = root .. "/adapter"
    local trainer <close> = job.new { model = "tests/data/qwen3", micro_tokens = 24, lora = { r = 4 } }
    for _ = 1, 3 do trainer:step({ tiny.micro(1, 300, { 20 }) }, { lr = 2e-2 }) end
    trainer:save(dir)
    local prompts = prompts_of(300, { 40, 3, 29, 1, 17 })
    local want
    for _, settings in ipairs {
      { home = "gpu", micro_tokens = 90, rows = 5 },
      { home = "disk", dev_slots = 1, micro_tokens = 7, micros = 3, rows = 2, device = "check:cpu" },
      { home = "ram", micro_tokens = 16, rows = 16 },
    } do
      settings.model, settings.adapter, settings.trainable = "tests/data/qwen3", dir, "none"
      settings.cache = { rows = 5, tokens = 52 }
      local j <close> = job.new(settings)
      local results, seen = run(j, prompts, 12)
      check_against_forward({ model = "tests/data/qwen3", adapter = dir }, prompts, results, seen, 1e-5)
      want = want or results
      assert.same(want, results)
      assert.is_true(j.instance.engine:stats().peak_bytes <= j.plan.peak)
      assert.equal(j.instance.engine:stats().pool_bytes, j.plan.peak)
      assert.equal(0, (j.device:violations()))
    end
  end)

  it("a prompt of several hundred tokens in pieces", function()
    local dir = root .. "/qwen3-long"
    tiny.checkpoint(dir, family.find(models.small.qwen3), models.small.qwen3, "f32")
    local prompts = prompts_of(models.VOCAB, { 700 })
    local last = {}
    for i, settings in ipairs { { micro_tokens = 700 }, { micro_tokens = 96, micros = 3 } } do
      settings.model, settings.trainable, settings.cache = dir, "none", { rows = 1, tokens = 704 }
      local j <close> = job.new(settings)
      local results, seen = run(j, prompts, 4)
      last[i] = { results[1].ids, seen[1][4] }
    end
    assert.same(last[1][1], last[2][1])
    assert.is_true(bs.array.rel_err(last[1][2], last[2][2]) < 1e-5)
  end)
end)

describe("greedy generation", function()
  for _, name in ipairs { "llama", "llama_bias", "qwen3", "qwen3_f16", "qwen3_yarn", "phi3_longrope" } do
    it("writes the reference's tokens: " .. name, function()
      local dir = "tests/data/" .. name
      local ref <close> = assert(bs.safetensors.open(dir .. "/reference.safetensors"))
      local want, ids, mask = ref:read("greedy"):table(), ref:read("input_ids"), ref:read("attention_mask"):table()
      local n = 0
      while n < ids:dims()[2] and mask[n + 1] == 1 do n = n + 1 end
      local prompt = table.move(ids:table(), 1, n, 1, {})
      local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 64,
                                  cache = { rows = 1, tokens = n + #want } }
      local got, seen = run(j, { prompt }, #want, function(logits, at, _, step) -- follow the reference over ties
        local best, gap = logits:slice_rows(at, at):argmax_rows()
        assert.is_true(best[1] - 1 == want[step] or gap[1] <= 1e-4, ("step %d"):format(step))
        return want[step]
      end)
      assert.same(want, got[1].ids)
      assert.equal(#want, #seen[1])
    end)
  end
end)

describe("a job with a cache", function()
  local dir, vocab = checkpoint("llama")
  local function settings(over)
    local s = { model = dir, trainable = "none", micro_tokens = 8, cache = { rows = 4, tokens = 100 } }
    for key, value in pairs(over or {}) do s[key] = value end
    return s
  end

  it("counts it in the plan to the byte, and refuses a budget that it does not fit", function()
    local peaks = {}
    for i, tokens in ipairs { 300, 400 } do
      local j <close> = job.new(settings { cache = { rows = 4, tokens = tokens } })
      run(j, prompts_of(vocab, { 5, 2 }), 3)
      peaks[i] = j.plan.peak
      assert.is_true(j.instance.engine:stats().peak_bytes <= peaks[i])
      j:walk({ tiny.micro(1, vocab, { 8 }) }, { mode = "loss" }) -- what needs most
      assert.equal(peaks[i], j.instance.engine:stats().peak_bytes)
      assert.is_true(bs.host_bytes("device") >= peaks[i])
    end
    local layer = 4 * 100 * 2 * 8 * 4 -- rows, tokens, kv_heads, head_dim, bytes
    assert.equal(3 * 2 * layer, peaks[2] - peaks[1])
    local ok, err = pcall(job.new, settings { vram = peaks[1] // 4 })
    assert.is_false(ok)
    assert.equal(3, err.bs_exit)
    local least = tonumber(err.message:match("smallest that works is [^(]*%((%d+) bytes"))
    local j <close> = job.new(settings { vram = least })
    run(j, prompts_of(vocab, { 5, 2 }), 3)
    assert.is_true(j.instance.engine:stats().peak_bytes <= least)
  end)

  it("refuses rows and positions that it has no room for", function()
    local j <close> = job.new(settings { cache = { rows = 2, tokens = 6 } })
    local function refused(micro, text)
      local ok, err = pcall(j.decode, j, { micro })
      assert.is_false(ok)
      assert.is_truthy(tostring(err):find(text, 1, true), tostring(err))
    end
    refused({ row_len = { 1 }, ids = { 1 }, row_id = { 2 } }, "rows 2..2; the cache has rows 0..1")
    refused({ row_len = { 7 }, ids = { 1, 2, 3, 4, 5, 6, 7 } }, "position 6; the cache has room for 6")
    refused({ row_len = { 1 }, ids = { 1 }, start = { -1 } }, "starts at position -1")
  end)

  it("refuses prompts whose answers it has no room for, and goes on with shorter ones", function()
    local j <close> = job.new(settings { cache = { rows = 2, tokens = 6 } })
    local prompts = prompts_of(vocab, { 4, 2 })
    local ok, err = pcall(run, j, prompts, 3)
    assert.is_false(ok)
    assert.matches("prompt 1 has 4 tokens and may get 3 more; there is room for 6", tostring(err), 1, true)
    local results = run(j, prompts, 2)
    assert.equal(2, #results[1].ids)
  end)

  it("needs cache= to decode", function()
    local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 8 }
    local ok, err = pcall(j.decode, j, { { row_len = { 1 }, ids = { 1 } } })
    assert.is_false(ok)
    assert.matches("without cache=", tostring(err), 1, true)
  end)

  it("has a number of rows and of tokens, or is refused with status 2", function()
    for _, cache in ipairs { {}, { rows = 0, tokens = 1 }, { rows = 1, tokens = "x" } } do
      local ok, err = pcall(job.new, settings { cache = cache })
      assert.is_false(ok)
      assert.equal(2, err.bs_exit)
    end
  end)

  it("reads the weights once a walk", function()
    local j <close> = job.new(settings { home = "disk", dev_slots = 2 })
    local _, _, counts = run(j, prompts_of(vocab, { 5, 2, 3 }), 6)
    assert.equal(7, counts.walks) -- 10 tokens in micro-batches of 8, then 5 more tokens a row
    local s, cold, warm = j.instance.stream:stats(), j.instance.placement:bytes(false), j.instance.placement:bytes(true)
    assert.equal(cold.disk_read + 6 * warm.disk_read, s.disk_read - s.disk_reread)
  end)

  it("stops rows at their stop ids and tells every token", function()
    local j <close> = job.new(settings())
    local prompts, told = prompts_of(vocab, { 3, 2 }), {}
    local free = run(j, prompts, 5)
    local results = j:generate(prompts, {
      max_new = 5, choose = greedy, stops = { [free[1].ids[3]] = true },
      on_token = function(row, id, reason) told[#told + 1] = { row, id, reason } end,
    })
    assert.equal("stop", results[1].reason)
    assert.is_true(#results[1].ids <= 3)
    assert.equal(results[1].ids[#results[1].ids], free[1].ids[3])
    assert.equal("length", results[2].reason)
    local n = 0
    for _, t in ipairs(told) do n = n + (t[3] and 1 or 0) end
    assert.equal(2, n)
    assert.equal(#results[1].ids + #results[2].ids, #told)
  end)
end)

-- ---- choosing ----------------------------------------------------------------------------------------

-- The definitions, each step over a fully sorted list.
local function plain_filter(v, o)
  local list, max = {}, math.max(table.unpack(v))
  for i, x in ipairs(v) do list[i] = { id = i - 1, x = x, p = math.exp((x - max) / o.temperature) } end
  local function by_p(a, b) return a.p > b.p or a.p == b.p and a.id < b.id end
  table.sort(list, by_p)
  if o.top_k > 0 and o.top_k < #list then
    local least, kept = list[o.top_k].x, {}
    for _, e in ipairs(list) do kept[#kept + 1] = e.x >= least and e or nil end
    list = kept
  end
  local total, sum, kept = 0, 0, {}
  for _, e in ipairs(list) do total = total + e.p end
  for _, e in ipairs(list) do
    if o.top_p < 1 and sum >= o.top_p * total then break end
    kept[#kept + 1], sum = e, sum + e.p
  end
  list = {}
  for _, e in ipairs(kept) do list[#list + 1] = e.p >= o.min_p and e or nil end
  table.sort(list, function(a, b) return a.id < b.id end)
  return list
end

describe("choosing", function()
  local function logits(seed, n, steps) -- steps: few different values, so that there are ties
    local v = {}
    for i = 1, n do
      local u = (bs.hash(string.pack("<i8i8", seed, i), 1) & 0xFFFFF) / 0x100000
      v[i] = steps and math.floor(u * steps) or 12 * u - 6
    end
    return v
  end

  it("follows the definitions of temperature, top-k, top-p and min-p", function()
    local cases = 0
    for seed = 1, 12 do
      local v = logits(seed, 50 + 37 * seed, seed % 3 == 0 and 7 or nil)
      for _, temperature in ipairs { 0.3, 1.0, 1.7 } do
        for _, top_k in ipairs { 0, 1, 5, 60, 10000 } do
          for _, top_p in ipairs { 1.0, 0.95, 0.4, 0.0 } do
            for _, min_p in ipairs { 0.0, 0.05, 1.0 } do
              local o = { temperature = temperature, top_k = top_k, top_p = top_p, min_p = min_p }
              if not (top_p == 0 and min_p == 1.0) then
                local got, total = sample.filter(v, o)
                local want, sum = plain_filter(v, o), 0
                if #want == 0 then want = { got[1] } end -- top_p = 0 keeps the most probable
                assert.equal(#want, #got)
                for i, e in ipairs(want) do
                  assert.equal(e.id, got[i].id)
                  assert.equal(e.p, got[i].p)
                  sum = sum + e.p
                end
                assert.is_true(math.abs(sum - total) <= 1e-12 * sum)
                cases = cases + 1
              end
            end
          end
        end
      end
    end
    assert.is_true(cases > 500)
  end)

  it("draws by probability, and the same for the same seed", function()
    local v = { 0.0, 1.0, -1.0, 2.0, -30.0 }
    local array = bs.array.new("f32", { 1, 5 }, v)
    local function draws(seed, n)
      local choose, out = sample.new { temperature = 1, top_k = 0, top_p = 1, min_p = 0, seed = seed }, {}
      for i = 1, n do out[i] = choose(array, 1, 3, i) end
      return out
    end
    assert.same(draws(1, 200), draws(1, 200))
    assert.not_same(draws(1, 200), draws(2, 200))
    local n, count, total = 20000, {}, 0
    for _, id in ipairs(draws(7, n)) do count[id] = (count[id] or 0) + 1 end
    for _, x in ipairs(v) do total = total + math.exp(x) end
    for i, x in ipairs(v) do
      local p = math.exp(x) / total
      local sigma = math.sqrt(n * p * (1 - p))
      assert.is_true(math.abs((count[i - 1] or 0) - n * p) <= 5 * sigma + 1e-6, ("id %d"):format(i - 1))
    end
  end)

  it("refuses logits that are not finite", function()
    for _, bad in ipairs { 0 / 0, math.huge } do
      local ok, err = pcall(sample.filter, { 1, bad, 2 }, { temperature = 1, top_k = 0, top_p = 1, min_p = 0 })
      assert.is_false(ok)
      assert.equal(5, err.bs_exit)
    end
    local nan = bs.array.new("f32", { 1, 2 }, { 0 / 0, 0 / 0 })
    local ok, err = pcall(greedy, nan, 1, 1, 1)
    assert.is_false(ok)
    assert.equal(5, err.bs_exit)
  end)

  it("does not depend on which rows go together", function()
    local dir, vocab = checkpoint("llama")
    local prompts = prompts_of(vocab, { 4, 9, 2 })
    local choose = sample.new { temperature = 0.9, top_k = 20, top_p = 0.9, min_p = 0.01, seed = 11 }
    local j <close> = job.new { model = dir, trainable = "none", micro_tokens = 6, micros = 2,
                                cache = { rows = 3, tokens = 20 } }
    local together = run(j, prompts, 8, choose)
    for i, prompt in ipairs(prompts) do
      local alone = run(j, { prompt }, 8, function(l, at, _, step) return choose(l, at, i, step) end)
      assert.same(together[i].ids, alone[1].ids)
    end
    assert.same(together, (run(j, prompts, 8, choose)))
  end)
end)
