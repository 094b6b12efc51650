-- SPDX-License-Identifier: Apache-2.0
--- Prompts, and generation that keeps the logits of each step.
local bs = require "bs"
local sample = require "bs.decode.sample"

local M = {}

M.greedy = sample.new { temperature = 0 }

--- Lists of ids of these lengths, below vocab, the same every time.
function M.prompts(vocab, lengths)
  local out = {}
  for i, n in ipairs(lengths) do
    out[i] = {}
    for t = 1, n do out[i][t] = bs.hash(string.pack("<i8i8", i, t), 5) % vocab end
  end
  return out
end

--- Generate with a choice that also keeps the logits: [row][step] -> array [vocab].
function M.run(j, prompts, max_new, choose)
  local seen = {}
  local results, counts = j:generate(prompts, {
    max_new = max_new, stops = {},
    choose = function(logits, at, row, step)
      seen[row] = seen[row] or {}
      seen[row][step] = logits:slice_rows(at, at)
      return (choose or M.greedy)(logits, at, row, step)
    end,
  })
  return results, seen, counts
end

return M
