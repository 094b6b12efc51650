-- SPDX-License-Identifier: Apache-2.0
--- device=cuda where it cannot be had: a build without it, a machine without driver or GPU, a driver that is too
-- old. Each is one line and status 1, and nothing is made. Drivers are pretended by libraries of their name.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"

local build = select(2, broken.run { "--version" })
local built = build:match "cuda: yes"
local there = built and pcall(function() bs.device.open("cuda"):close() end)
local drivers = os.getenv "BS_FAKE_DRIVERS" -- folders with a libcuda.so.1

-- Every program that takes device= ends so.
local function refused(texts, before)
  local out = broken.root .. "/never"
  local reference = "tests/data/qwen3"
  local programs = {
    { "recipes/qwen8b_lora.lua", "model=" .. broken.good, "data=tests/data/rows.jsonl", "out=" .. out },
    { "recipes/parity.lua", "model=" .. reference, "reference=" .. reference .. "/reference.safetensors" },
    { "recipes/generate.lua", "model=" .. reference, "ids=1,2,3" },
    { "-e", ('require "bs.job".new { model = "%s", device = "check:cuda" }'):format(broken.good) },
  }
  for _, words in ipairs(programs) do
    if words[1] ~= "-e" then words[#words + 1] = "device=cuda" end
    broken.run_fails(1, texts, words, before)
  end
  assert.is_false(bs.is_file(out .. "/adapter_config.json"))
end

describe("device=cuda", function()
  it("in a build without CUDA says so", function()
    if not built then refused { "device 'cuda' is not in this build", "BS_CUDA=ON" } end
  end)

  it("on a machine without a driver says what to install", function()
    if built and not there and not os.execute("ldconfig -p | grep -q libcuda.so.1") then
      refused { "no NVIDIA driver (libcuda.so.1) was found", "install" }
    end
  end)

  it("with a driver that is too old says which one is needed", function()
    if drivers then
      refused({ "the NVIDIA driver supports CUDA 11.4, this program needs", "install a newer driver" },
        "export LD_LIBRARY_PATH='" .. drivers .. "/old';")
    end
  end)

  it("with a driver and no GPU says where to look", function()
    if drivers then
      refused({ "no GPU can be used", "CUDA_VISIBLE_DEVICES" }, "export LD_LIBRARY_PATH='" .. drivers .. "/empty';")
    end
  end)
end)
