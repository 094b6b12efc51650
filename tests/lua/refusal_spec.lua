-- SPDX-License-Identifier: Apache-2.0
--- Budgets that are refused: every pair that the message names is planned with, as it stands there, and a percent less
-- of both is not.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local budget = require "bs.plan.budget"
local family = require "bs.model.find_family"
local job = require "bs.job"
local models = require "family_models"
local tiny = require "tiny"

local UNBOUNDED <const> = 1 << 60

-- The pairs of a message: texts of vram= and ram=, in the order in which they stand.
local function named(message)
  local list = {}
  for clause in message:gmatch("; (v?ram=[^;]+) works?%f[^%w]") do
    for words in (clause .. ", or "):gmatch("(.-), or ") do
      list[#list + 1] = { words = words, vram = words:match("vram=(%S+)"), ram = words:match("%f[%a]ram=(%S+)") }
    end
  end
  return list
end

local function bytes(text) return text and budget.read({ vram = text }, "vram") or UNBOUNDED end

-- Plan with budgets: true, or false and the message.
local function plan(settings, vram, ram)
  local cfg = { vram = vram, ram = ram }
  for key, value in pairs(settings) do cfg[key] = value end
  local ok, err = pcall(job.new, cfg)
  if ok then
    err:close()
    return true
  end
  assert.equal(3, type(err) == "table" and err.bs_exit, tostring(err))
  return false, err.message
end

-- Every pair that a refusal of these budgets names; how many there are, 0 where the budgets work.
local function check(settings, vram, ram)
  local ok, message = plan(settings, vram, ram)
  if ok then return 0 end
  local list = named(message)
  assert.is_true(#list > 0, message)
  for _, pair in ipairs(list) do
    local v, r = bytes(pair.vram), bytes(pair.ram)
    local works, why = plan(settings, v, r)
    assert.is_true(works, ("%s is refused: %s\nafter: %s"):format(pair.words, why, message))
    assert.is_false((plan(settings, v - v // 100 - 1, r - r // 100 - 1)),
      ("a percent less than %s works, too; after: %s"):format(pair.words, message))
  end
  return #list
end

local folder = tiny.folder("refusal-" .. bs.pid())

-- Settings of a dry job, and its least and its largest budgets.
local function settings_of(dir, over)
  local s = { model = dir, device = "meta", dry = true, micro_tokens = 32, micros = 2 }
  for key, value in pairs(over) do s[key] = value end
  if s.trainable ~= "none" then s.lora = { r = 4, alpha = 8 } end
  local j <close> = job.new(s)
  return s, j.plan.peak, j.plan.host
end

describe("a refusal", function()
  local kinds = {}
  for kind in pairs(models.small) do kinds[#kinds + 1] = kind end
  table.sort(kinds)
  local variants = {
    { home = "auto" }, { home = "disk", micros = 6 }, { home = "gpu" }, { home = "ram", boundaries = "host" },
    { keep = 2, micros = 3 }, { dev_slots = 3, host_slots = 2 },
    { trainable = "none", cache = { rows = 2, tokens = 40 } },
  }
  for number, kind in ipairs(kinds) do
    it("names pairs that work: " .. kind, function()
      local dir = folder .. "/" .. kind
      tiny.checkpoint(dir, family.find(models.small[kind]), models.small[kind], "bf16")
      local pairs_seen = 0
      for v = 0, 1 do
        local over = variants[(number + v) % #variants + 1]
        -- layers with experts keep nothing
        if over.keep and family.find(models.small[kind]).stages then over = { micros = 3 } end
        local s, vram, ram = settings_of(dir, over)
        for _, part in ipairs { 0.3, 0.7, 0.95 } do
          for _, other in ipairs { 0.5, 1 } do
            pairs_seen = pairs_seen + check(s, math.floor(vram * part), math.floor(ram * other))
          end
          pairs_seen = pairs_seen + check(s, math.floor(vram * part), UNBOUNDED)
            + check(s, UNBOUNDED, math.floor(ram * part))
        end
      end
      assert.is_true(pairs_seen > 10, pairs_seen .. " pairs were named")
    end)
  end

  it("names settings of the plan that work instead, and what to make smaller", function()
    local dir = folder .. "/instead"
    tiny.checkpoint(dir, family.find(models.small.qwen3), models.small.qwen3, "bf16")
    local s = settings_of(dir, { home = "gpu" })
    local ok, message = plan(s, 1000, UNBOUNDED)
    assert.is_false(ok)
    assert.is_nil(message:find("home=auto", 1, true), message)
    local less = tonumber(message:match("smallest that works is [^(]*%((%d+) bytes")) - 1
    ok, message = plan(s, less, UNBOUNDED)
    assert.is_false(ok)
    assert.is_truthy(message:find("; home=auto works with these budgets", 1, true), message)
    assert.is_truthy(message:find("; less is needed with a smaller micro_tokens= or micros=", 1, true), message)
    s.home = "auto"
    assert.is_true((plan(s, less, UNBOUNDED)))
    s.knobs = { "width" }
    ok, message = plan(s, 1000, UNBOUNDED)
    assert.is_false(ok)
    assert.is_truthy(message:find("with a smaller width$"), message)
    assert.is_nil(message:find("instead", 1, true))
  end)
end)

describe("a refusal of a recipe", function()
  local model, data = "model=tests/data/qwen3", "data=tests/data/rows.jsonl"
  local programs = {
    { knobs = "micro_tokens= or step_tokens= or r=", "recipes/qwen8b_lora.lua", model, data, "micro_tokens=40",
      "step_tokens=200", "steps=1", "out=" },
    { knobs = "pass_tokens= or micro_tokens=", "recipes/eval.lua", model, data, "micro_tokens=40",
      "pass_tokens=400" },
    { knobs = "max_new= or micro_tokens=", "recipes/generate.lua", model, "ids=1,2,3", "max_new=4" },
  }

  local function with(words, ...)
    local list = table.move(words, 1, #words, 1, {})
    return table.move({ ... }, 1, select("#", ...), #list + 1, list)
  end

  for _, words in ipairs(programs) do
    it("names words that it takes: " .. words[1], function()
      for _, given in ipairs {
        { "vram=100KiB", "ram=4.2MiB" }, { "vram=1KiB", "ram=1KiB" }, { "vram=1", "ram=auto" },
      } do
        local _, err = broken.run_fails(3, { "too small", words.knobs }, with(words, table.unpack(given)))
        local list = named(err:gsub("\n", ""))
        assert.is_true(#list > 0, err)
        for _, pair in ipairs(list) do
          local code, _, said = broken.run(with(words, "vram=" .. pair.vram, "ram=" .. pair.ram))
          assert.equal(0, code, pair.words .. ": " .. said)
        end
      end
    end)
  end
end)
