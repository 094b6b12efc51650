-- SPDX-License-Identifier: Apache-2.0
--- Generation of rows whose length matters: rotations that depend on it, and more positions than a model was made for.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local family = require "bs.model.find_family"
local generation = require "generation"
local job = require "bs.job"
local models = require "family_models"
local tiny = require "tiny"

local root = tiny.folder("row-lengths")
local prompts_of, run = generation.prompts, generation.run

describe("where the rotation depends on the length", function()
  local short, long = { 1.0, 1.1, 1.2, 1.3 }, models.long_factors
  local dirs = {}
  setup(function()
    for name, factors in pairs { both = { short, long }, short = { short, short }, long = { long, long } } do
      local config = models.config("phi3", {
        max_position_embeddings = 64, original_max_position_embeddings = 16,
        rope_scaling = { type = "longrope", short_factor = factors[1], long_factor = factors[2] },
      })
      dirs[name] = root .. "/longrope-" .. name
      tiny.checkpoint(dirs[name], family.find(config), config, "f32")
    end
  end)

  -- Logits of every row and step, with the lines that were told.
  local function logits(dir, prompts, settings, max_new)
    local lines = {}
    local all = { model = dir, trainable = "none", micro_tokens = 64, cache = { rows = #prompts, tokens = 70 } }
    for key, value in pairs(settings or {}) do all[key] = value end
    local j <close> = job.new(all)
    bs.log_to(function(line) lines[#lines + 1] = line end)
    local ok, results, seen = pcall(run, j, prompts, max_new or 6)
    bs.log_to(nil)
    assert.is_true(ok, results)
    return seen, table.concat(lines, "\n")
  end

  local function same(a, b)
    for step, x in ipairs(a) do
      assert.is_true(bs.array.rel_err(x, b[step]) < 1e-5, "step " .. step)
    end
    assert.equal(#a, #b)
  end

  it("each row's prompt decides, whatever its neighbours and its pieces", function()
    local prompts = prompts_of(models.VOCAB, { 5, 20, 16, 40 })
    local whole = logits(dirs.both, prompts)
    local by_short, by_long = logits(dirs.short, prompts), logits(dirs.long, prompts)
    for row, want in ipairs { by_short, by_long, by_short, by_long } do same(whole[row], want[row]) end
    assert.is_true(bs.array.rel_err(by_short[2][1], by_long[2][1]) > 1e-3)
    for _, settings in ipairs {
      { micro_tokens = 6 }, { micro_tokens = 7, micros = 4 }, { micro_tokens = 30, rows = 1 },
    } do
      local cut = logits(dirs.both, prompts, settings)
      for row = 1, #prompts do same(whole[row], cut[row]) end
    end
  end)

  it("a row that grows past the original length keeps its rotation, and is told", function()
    local prompts = prompts_of(models.VOCAB, { 12, 3, 20 })
    local seen, told = logits(dirs.both, prompts, nil, 9)
    same(seen[1], logits(dirs.short, prompts, nil, 9)[1])
    assert.matches("1 of 3 rows grew past 16 tokens, where this model's rotation changes", told, 1, true)
    assert.is_nil(told:find("positions", 1, true))
  end)

  it("rows beyond the model's positions are told", function()
    local prompts = prompts_of(models.VOCAB, { 60, 3, 65 })
    local _, told = logits(dirs.both, prompts, { micro_tokens = 130 }, 5)
    assert.matches("1 of 3 rows went beyond the 64 positions that the model was made for", told, 1, true)
    _, told = logits(dirs.both, { prompts[1] }, nil, 6)
    assert.matches("1 of 1 rows went beyond", told, 1, true)
  end)
end)
