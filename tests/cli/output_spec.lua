-- SPDX-License-Identifier: Apache-2.0
-- Standard output that cannot be written: a result that is lost is an error, a line of a log no reason to lose a run.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"

local MODEL <const>, DATA <const> = "model=tests/data/qwen3", "data=tests/data/rows.jsonl"

-- Through a shell with standard output as `to` says. Returns the status and what was said on standard error.
local function run(words, to)
  local line = {}
  for i, w in ipairs(words) do line[i] = "'" .. w .. "'" end
  local script = ("exec '%s' %s %s"):format(os.getenv("BSLUA") or "build/release/bslua", table.concat(line, " "), to)
  local code, _, err = broken.run({ "-e", ("os.exit(select(3, os.execute(%q)))"):format(script) })
  return code, err
end

describe("a result that cannot be written", function()
  local results = {
    { "recipes/eval.lua", MODEL, DATA, "micro_tokens=40" },
    { "recipes/generate.lua", MODEL, "ids=1,2,3", "max_new=3" },
  }
  for _, words in ipairs(results) do
    it("ends the recipe with status 1: " .. words[1], function()
      for _, to in ipairs { ">/dev/full", ">&-" } do
        local code, err = run(words, to)
        assert.equal(1, code, err)
        assert.matches("\nbslua: standard output cannot be written: [^\n]+\n$", "\n" .. err)
      end
    end)
  end
end)

describe("a log that cannot be written", function()
  it("is told once, and the run goes on to its end", function()
    for number, to in ipairs { ">/dev/full", ">&-" } do
      local out = ("%s/log-%d"):format(broken.root, number)
      local code, err = run({ "recipes/qwen8b_lora.lua", MODEL, DATA, "micro_tokens=40", "step_tokens=80", "r=4",
                              "steps=2", "out=" .. out }, to)
      assert.equal(0, code, err)
      assert.matches("^bslua: standard output cannot be written: [^\n]+; lines are lost\n$", err)
      assert.is_true(bs.is_file(out .. "/adapter_model.safetensors"))
    end
  end)
end)
