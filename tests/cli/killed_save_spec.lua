-- SPDX-License-Identifier: Apache-2.0
--- Saves of adapters and merges whose process is killed at one of the calls that change files: a reader finds all of
-- the old or all of the new, and the next save leaves nothing else. tests/c/test_io_folder.c does so at every call of
-- every way to replace a folder; here it is the program's own work.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local adapter = require "bs.model.adapter"
local checkpoint = require "bs.model.checkpoint"
local job = require "bs.job"
local merge = require "bs.model.merge"
local model = require "bs.model.model"
local tiny = require "tiny"

local bslua = os.getenv "BSLUA" or "build/release/bslua"
local fake_calls = bs.real_path(bslua):match("^(.*)/[^/]*$") .. "/tests/libfake_calls.so"
local base = "tests/data/llama"
-- In memory where that can be: hundreds of flushes that no disk has to do.
local shared = pcall(bs.check_folder, "/dev/shm") and "/dev/shm/bslua-killed-" .. bs.pid()
if shared then bs.mkdir(shared) end
local root = shared or bs.real_path(tiny.folder("killed-" .. bs.pid()))
local old, new, place = root .. "/old", root .. "/new", root .. "/place"
teardown(function() os.execute("rm -r " .. root) end)

local function read(path)
  local f = io.open(path, "rb")
  if not f then return nil end
  local text = f:read("a")
  f:close()
  return text
end

local function save_adapter(dir, alpha)
  local j <close> = job.new { model = base, lora = { r = 2, alpha = alpha }, seed = alpha, micro_tokens = 24 }
  j:step({ tiny.micro(1, 40, { 9, 6 }) }, { lr = 1e-2 })
  j:save(dir)
end

-- Run the script with arguments, killed at call n of those under `place`, for n = 1, 1 + by, ... until one is not.
-- check(whole) looks at the place after each; `before` are commands that make it.
local function killed(script, arguments, o)
  local count = root .. "/count"
  local path = root .. "/script.lua"
  bs.write_file(path, script)
  for n = 1, 1000, o.by do
    os.remove(count)
    os.execute(("rm -rf %s %s.tmp.*; %s"):format(place, place, o.before))
    local set = ("FAKE_CALLS_UNDER=%s FAKE_CALLS_COUNT=%s FAKE_CALLS_KILL=%d FAKE_CALLS_PLAIN=%d LD_PRELOAD=%s"):format(
      place, count, n, o.plain or 0, fake_calls)
    local how, code = select(2, os.execute(("%s %s %s %s >/dev/null 2>%s/said; exit $?"):format(set, bslua, path,
      arguments, root)))
    local whole = read(count) ~= nil
    assert.equal(whole and 0 or 137, code, how .. ": " .. (read(root .. "/said") or ""))
    o.check(whole)
    if whole then return end
  end
end

local function names_in(dir)
  local list = bs.list_folder(dir)
  return list and table.concat(list, " ")
end

-- Only what was there at the start is beside the place.
local function check_beside()
  for _, name in ipairs(bs.list_folder(root)) do assert.is_nil(name:match("^place%."), name) end
end

describe("an adapter that is saved", function()
  local script = [[
    local job = require "bs.job"
    local j <close> = job.new { model = "tests/data/llama", adapter = arg[1], micro_tokens = 24, threads = 1 }
    j:save(arg[2])]]
  local m, state = nil, {}
  setup(function()
    m = model.open(base)
    for i, dir in ipairs { old, new } do
      save_adapter(dir, i == 1 and 8 or 128)
      state[i] = read(dir .. "/adapter_config.json") .. read(dir .. "/adapter_model.safetensors")
    end
  end)

  local make = ("cp -r %s %s; echo mine > %s/note"):format(old, place, place)
  for _, way in ipairs {
    { name = "by an exchange", before = make, by = 3 },
    { name = "without an exchange", before = make, by = 8, plain = 1 },
    { name = "for the first time", before = "true", by = 9, first = true },
  } do
    it(way.name .. " is the old or the new one, wherever the process is killed", function()
      if not bs.is_file(fake_calls) then return pending("there is no " .. fake_calls) end
      local seen = {}
      function way.check(whole)
        if way.first and not bs.is_file(place .. "/adapter_config.json") then
          seen.none = true
          assert.is_nil(bs.list_folder(place))
        else
          local saved <close> = adapter.open(m, place)
          local text = read(place .. "/adapter_config.json") .. read(place .. "/adapter_model.safetensors")
          local which = text == state[1] and "old" or text == state[2] and "new"
          assert.is_truthy(which, "a mixture")
          assert.equal(which == "old" and 4 or 64, saved.list[1].scale)
          seen[which] = true
          assert.is_true(not whole or which == "new")
          if not way.first then assert.equal("mine\n", read(place .. "/note")) end
        end
        local f <close> = bs.folder.begin(place, adapter.files) -- what the next save begins with
        f:close()
        local want = "adapter_config.json adapter_model.safetensors" .. (way.first and "" or " note")
        assert.is_true(names_in(place) == nil or names_in(place) == want, names_in(place))
        check_beside()
      end
      killed(script, new .. " " .. place, way)
      assert.is_true((seen.old or seen.none) and seen.new)
    end)
  end

  it("while others read it is never a mixture", function()
    local path = root .. "/saves.lua"
    bs.write_file(path, [[
      local job = require "bs.job"
      local a <close> = job.new { model = "tests/data/llama", adapter = arg[1], micro_tokens = 24, threads = 1 }
      local b <close> = job.new { model = "tests/data/llama", adapter = arg[2], micro_tokens = 24, threads = 1 }
      for i = 1, 12 do (i % 2 == 1 and a or b):save(arg[3]) end
      print "done"]])
    os.execute(("rm -rf %s; cp -r %s %s"):format(place, old, place))
    local hash = {}
    for _, dir in ipairs { old, new } do
      local saved <close> = adapter.open(m, dir)
      hash[saved.list[1].scale] = saved:read(saved.list[1].full):hash()
    end
    local p <close> = assert(io.popen(("%s %s %s %s %s; touch %s/over"):format(bslua, path, new, old, place, root)))
    local reads = 0
    repeat
      local saved <close> = adapter.open(m, place)
      assert.equal(hash[saved.list[1].scale], saved:read(saved.list[1].full):hash())
      reads = reads + 1
    until bs.is_file(root .. "/over")
    assert.equal("done", p:read())
  end)
end)

describe("a merge", function()
  local script = [[
    local merge = require "bs.model.merge"
    merge.run { model = "tests/data/llama", adapter = arg[1], out = arg[2], overwrite = true, threads = 1 }]]
  local state, dirs = {}, { root .. "/merged-old", root .. "/merged-new" }
  setup(function()
    for i, dir in ipairs { old, new } do
      if not bs.is_file(dir .. "/adapter_config.json") then save_adapter(dir, i == 1 and 8 or 128) end
      merge.run { model = base, adapter = dir, out = dirs[i] }
      state[i] = bs.hash(read(dirs[i] .. "/model.safetensors"))
    end
    assert.not_equal(state[1], state[2])
  end)

  local make = ("cp -r %s %s; echo mine > %s/note.bin"):format(dirs[1], place, place)
  for _, way in ipairs {
    { name = "over another", before = make, by = 13 },
    { name = "over another without an exchange", before = make, by = 19, plain = 1 },
    { name = "into nothing", before = "true", by = 20, first = true },
  } do
    it(way.name .. " is the old or the new one, wherever the process is killed", function()
      if not bs.is_file(fake_calls) then return pending("there is no " .. fake_calls) end
      local seen = {}
      function way.check(whole)
        if way.first and not bs.list_folder(place) then
          seen.none = true
        else
          checkpoint.open(place)
          local hash = bs.hash(read(place .. "/model.safetensors"))
          local which = hash == state[1] and "old" or hash == state[2] and "new"
          assert.is_truthy(which, "a mixture")
          seen[which] = true
          assert.is_true(not whole or which == "new")
        end
        merge.run { model = base, adapter = new, out = place, overwrite = true }
        assert.equal(state[2], bs.hash(read(place .. "/model.safetensors")))
        local want = names_in(dirs[2])
        assert.equal(way.first and want or want:gsub("reference", "note.bin reference"), names_in(place))
        check_beside()
      end
      killed(script, new .. " " .. place, way)
      assert.is_true((seen.old or seen.none) and seen.new)
    end)
  end
end)
