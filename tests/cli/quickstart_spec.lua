-- SPDX-License-Identifier: Apache-2.0
--- recipes/quickstart.lua in few steps: what it prints holds, what it leaves is used by other recipes.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local tiny = require "tiny"

local bslua = os.getenv("BSLUA") or "build/release/bslua"
local out = tiny.folder("quickstart")

local function run(words)
  local ok, _, code = os.execute(("%s recipes/quickstart.lua out=%s/q %s >%s/log 2>&1"):format(bslua, out, words, out))
  local f <close> = assert(io.open(out .. "/log"))
  return ok == true, code, f:read("a")
end

describe("quickstart", function()
  local text

  it("trains, streams, compares and reloads", function()
    local ok, code
    ok, code, text = run "base_steps=2 steps=2"
    assert.is_true(ok, ("exit %s: %s"):format(code, text))
    local a, b = text:match("adapter (%x+) streamed, (%x+) resident: equal")
    assert.equal(16, #a)
    assert.equal(a, b)
    local now, saved = text:match("held%-out loss ([%d.]+), ([%d.]+) when it was saved: equal")
    assert.is_truthy(now)
    assert.equal(saved, now)
    local _, lines = text:gsub("\n", "")
    assert.is_true(lines <= 28, lines .. " lines")
  end)

  it("streams a model larger than both budgets together", function()
    local vram, ram, weights = text:match("vram=([%d.]+) MiB and ram=([%d.]+) MiB for ([%d.]+) MiB")
    assert.is_true(vram + ram < weights + 0, text)
    assert.matches("0 gpu, 0 ram, 9 disk", text, 1, true)
    local read = text:match("([%d.]+) MB read from disk")
    assert.is_true(read * 1e6 > 1.5 * weights * 2 ^ 20, text) -- up and down
  end)

  it("leaves a model, rows and an adapter that other recipes take", function()
    local t = assert(bs.tokenizer.open(out .. "/q/model"))
    local bytes = {}
    for b = 0, 127 do bytes[b + 1] = string.char(b) end
    local ascii = table.concat(bytes) .. "é€"
    assert.same({ ascii:byte(1, -1) }, t:encode(ascii))
    assert.equal(ascii, t:decode(t:encode(ascii)))
    assert.equal(256, t:special "eos")
    local words = ("model=%s/q/model data=%s/q/train.jsonl valid=%s/q/valid.jsonl adapter=%s/q/adapter out=%s/again "
      .. "steps=1 step_tokens=128 micro_tokens=128 home=disk"):format(out, out, out, out, out)
    local ok = os.execute(("%s recipes/qwen8b_lora.lua %s >%s/log 2>&1"):format(bslua, words, out))
    local f <close> = assert(io.open(out .. "/log"))
    local log = f:read("a")
    assert.is_true(ok, log)
    assert.matches("row 1: Q: .*\\nA: %[SELECT .*<|endoftext|>%]", log)
  end)

  it("refuses a device that is none, or not here, in one line", function()
    local ok, code, log = run "device=cdua"
    assert.is_false(ok)
    assert.equal(2, code)
    assert.matches("^bslua: device=cdua: [^\n]+\n$", log)
    ok, code, log = run "device=cuda"
    assert.is_true(ok or code == 1 and log:match("^bslua: device=cuda: [^\n]+\n$") ~= nil, log)
  end)

  it("says which budget would do", function()
    local ok, code, log = run "base_steps=1 steps=1 vram=2MiB"
    assert.is_false(ok)
    assert.equal(3, code)
    assert.matches("the smallest that works is", log, 1, true)
  end)
end)
