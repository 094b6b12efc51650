-- SPDX-License-Identifier: Apache-2.0
-- `bslua --doctor` as a shell sees it, on machines with and without a GPU.
local bs = require "bs"

local bslua = assert(os.getenv "BSLUA" or arg and arg[-1], "BSLUA is not set")
local tmp = os.tmpname()
os.remove(tmp)

local function slurp(path)
  local f <close> = assert(io.open(path))
  return f:read "a"
end

-- Exit status, stdout, stderr.
local function doctor(words, env)
  bs.mkdir(tmp .. "/disk")
  local line = ("%s '%s' --doctor %s >%s/out 2>%s/err"):format(env or "", bslua, words, tmp, tmp)
  local _, _, code = os.execute(line)
  return code, slurp(tmp .. "/out"), slurp(tmp .. "/err")
end

describe("--doctor", function()
  teardown(function() os.execute("rm -rf '" .. tmp .. "'") end)

  it("says what there is, how fast it is, and what is missing", function()
    local code, out, err = doctor(("dir=%s/disk size=4MiB json=%s/out.json"):format(tmp, tmp))
    assert.same({ 0, "" }, { code, err })
    assert.matches("^bslua %d+%.%d+%.%d+ %(Lua 5%.4", out)
    for _, name in ipairs { "cpu", "memory", "kernel", "disk", "gpu", "built" } do
      assert.matches("\n  " .. name .. " +%S", out)
    end
    assert.matches("products [%d.]+ %uFLOP/s f32", out)
    assert.matches("[%d.]+ GB/s %(%w+%+%w+, 4 MB of files made for it%)", out)
    local r = bs.json.decode(slurp(tmp .. "/out.json"))
    assert.is_true(r.ok)
    assert.equal(bs.version, r.version)
    assert.is_true(r.rates.cpu > 0 and r.rates.disk.rate > 0 and r.machine.cores >= 1)
    assert.equal(4 << 20, r.rates.disk.bytes)
    assert.is_string(r.machine.kernel)
    assert.is_true(r.machine.memory_bytes >= r.machine.memory_available)
    for _, n in ipairs(r.notes) do
      assert.is_true(#n.what > 0 and #n.costs > 0 and #n.todo > 0)
      assert.is_truthy(out:find("- " .. n.what .. "\n    costs: " .. n.costs .. "\n    to do: " .. n.todo, 1, true))
    end
    if r.gpu.usable then
      assert.is_true(r.rates.gpu.copies_in > 0 and r.rates.gpu.copies_out > 0 and r.rates.gpu.product_bf16 > 0)
    else
      assert.is_string(r.gpu.problem)
      assert.matches("\n  gpu +none: %S", out)
      assert.matches("- no GPU is used: ", out)
    end
    assert.same({}, bs.list_folder(tmp .. "/disk"))
  end)

  it("reads a checkpoint where there is one", function()
    local f = assert(io.open(tmp .. "/disk/model.safetensors", "wb"))
    f:write(("x"):rep(70001))
    f:close()
    finally(function() os.remove(tmp .. "/disk/model.safetensors") end)
    local code, out = doctor(("dir=%s/disk json=%s/out.json"):format(tmp, tmp))
    assert.equal(0, code)
    assert.matches("of its safetensors%)", out)
    local disk = bs.json.decode(slurp(tmp .. "/out.json")).rates.disk
    assert.is_true(disk.bytes >= 70000 and not disk.made)
  end)

  it("tells what cannot be measured, and goes on", function()
    -- No file may be as large as one that is made.
    local code, out = doctor(("dir=%s/disk size=4MiB"):format(tmp), "ulimit -f 1024;")
    assert.equal(0, code)
    assert.matches("- the disk of %S+ was not measured: ", out)
    assert.matches("\n  gpu +%S", out)
    assert.same({}, bs.list_folder(tmp .. "/disk"))
  end)

  it("refuses bad words with status 2", function()
    for words, text in pairs {
      nonsense = "not of the form key=value", ["jsom=x"] = "did you mean json", ["size=3"] = "at least",
      ["dir=/nowhere"] = "dir=/nowhere: not a folder", ["-x"] = "not of the form",
    } do
      local code, out, err = doctor(words)
      assert.same({ 2, "" }, { code, out })
      assert.is_truthy(err:find(text, 1, true), err)
    end
  end)

  it("is in the help, and has its own", function()
    local code, out = doctor "help"
    assert.equal(0, code)
    assert.matches("dir +folder whose disk is read", out)
  end)
end)
