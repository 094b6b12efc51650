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

  describe("on this machine", function()
    local code, out, err, report, left
    setup(function()
      code, out, err = doctor(("dir=%s/disk size=4MiB json=%s/out.json"):format(tmp, tmp))
      report, left = bs.json.decode(slurp(tmp .. "/out.json")), bs.list_folder(tmp .. "/disk")
    end)

    it("says what there is, and how fast it is", function()
      assert.same({ 0, "" }, { code, err })
      assert.matches("^bslua %d+%.%d+%.%d+ %(Lua 5%.4", out)
      for _, name in ipairs { "cpu", "memory", "kernel", "disk", "gpu", "built" } do
        assert.matches("\n  " .. name .. " +%S", out)
      end
      assert.matches("products [%d.]+ %uFLOP/s f32", out)
      assert.matches("[%d.]+ GB/s %(%w+%+%w+, 4 MB of files made for it%)", out)
    end)

    it("writes the same as JSON", function()
      local machine, rates = report.machine, report.rates
      assert.is_true(report.ok)
      assert.equal(bs.version, report.version)
      assert.is_true(rates.cpu > 0 and rates.disk.rate > 0 and machine.cores >= 1)
      assert.equal(4 << 20, rates.disk.bytes)
      assert.is_string(machine.kernel)
      assert.is_true(machine.memory_bytes >= machine.memory_available)
    end)

    it("says of all that is missing what it costs and what to do", function()
      for _, n in ipairs(report.notes) do
        assert.is_true(#n.what > 0 and #n.costs > 0 and #n.todo > 0)
        assert.is_truthy(out:find("- " .. n.what .. "\n    costs: " .. n.costs .. "\n    to do: " .. n.todo, 1, true))
      end
    end)

    it("measures a GPU that can be used, or says why there is none", function()
      local gpu = report.rates.gpu
      if report.gpu.usable then
        assert.is_true(gpu.copies_in > 0 and gpu.copies_out > 0 and gpu.product_bf16 > 0)
      else
        assert.is_string(report.gpu.problem)
        assert.matches("\n  gpu +none: %S", out)
        assert.matches("- no GPU is used: ", out)
      end
    end)

    it("leaves nothing in the folder whose disk it read", function() assert.same({}, left) end)
  end)

  it("tells that OpenBLAS is not there", function()
    bs.mkdir(tmp .. "/lib")
    assert(io.open(tmp .. "/lib/libopenblas.so.0", "w")):close() -- which no program can load
    local code, out = doctor(("dir=%s/disk size=4MiB"):format(tmp), ("LD_LIBRARY_PATH='%s/lib'"):format(tmp))
    assert.equal(0, code)
    assert.matches("\n%- OpenBLAS was not found\n", out)
    assert.matches("gemm: plain loops", out)
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
      nonsense = "not of the form key=value", ["jsom=x"] = "did you mean json", ["size=3"] = "1.04858e+06 to",
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
