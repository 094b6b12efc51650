-- SPDX-License-Identifier: Apache-2.0
-- Families that are not shipped: which files a model_type leads to, and which it must never run.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local broken = require "broken"
local tiny = require "tiny"

local here = assert(bs.real_path ".")
local recipe <const> = here .. "/recipes/generate.lua"
local root = assert(bs.real_path(tiny.folder "user-family"))
local marker = root .. "/ran"
local models, number = {}, 0

-- A family that is qwen3 under another name, and leaves a mark where it is run.
local function source(kind, fault)
  return ([[
local f <close> = assert(io.open(%q, "a"))
f:write("ran\n")
local own = {}
for key, value in pairs(require "bs.family.qwen3") do own[key] = value end
own.model_types = { %q }
%s
return own]]):format(marker, kind, fault or "")
end

-- A model in a folder of its own with this model_type.
local function model(kind)
  number = number + 1
  local dir = ("%s/model-%d"):format(root, number)
  os.execute(("cp -r '%s' '%s'"):format(broken.with_config { model_type = kind }, dir))
  models[#models + 1] = dir
  return dir
end

local function folder(name)
  bs.mkdir(root .. "/" .. name)
  return root .. "/" .. name
end

local function ran()
  local there = bs.is_file(marker)
  os.remove(marker)
  return there
end

-- Exit status and stderr of a generation, with what the shell does before it.
local function generate(dir, before, more)
  local words = { recipe, "model=" .. dir, "ids=1,2", "max_new=1" }
  if more then words[#words + 1] = more end
  os.remove(marker)
  local code, _, err = broken.run(words, before)
  assert.is_nil(err:find("stack traceback", 1, true), err)
  return code, err
end

-- broken.run takes the program by a relative path.
local program = os.getenv "BSLUA" or "build/release/bslua"
local inside = program:sub(1, 1) == "/" and it or pending

local function refuses(dir, before, shown)
  local code, err = generate(dir, before)
  assert.is_false(ran())
  assert.equal(1, code, err)
  assert.truthy(err:find("has no family", 1, true), err)
  assert.truthy(err:find(shown or "family=./x.lua", 1, true), err)
end

describe("a model_type leads to", function()
  inside("no file of the model's folder, by whatever path", function()
    local dir = model "evil"
    bs.write_file(dir .. "/evil.lua", source "evil")
    bs.mkdir(dir .. "/bs/family")
    bs.write_file(dir .. "/bs/family/evil.lua", source "evil")
    bs.mkdir(dir .. "/evil")
    bs.write_file(dir .. "/evil/init.lua", source "evil")
    refuses(".", ("cd '%s';"):format(dir), "family=./bs/family/evil.lua")
    for _, path in ipairs { "?.lua", "./?.lua", dir .. "/?.lua", root .. "/link/?.lua", dir .. "/../" ..
      dir:match "[^/]+$" .. "/?.lua" } do
      os.execute(("ln -sfn '%s' '%s/link'"):format(dir, root))
      refuses(dir, ("export LUA_PATH='%s;;'; cd '%s';"):format(path, dir), "family=")
      refuses(root .. "/link", ("export LUA_PATH='%s;;'; cd '%s';"):format(path, dir), "family=")
    end
    refuses(dir, ("export BSLUA_HOME='%s';"):format(dir), "family=")
    refuses(".", ("export BSLUA_HOME=.; cd '%s';"):format(dir), "family=")
    -- a file elsewhere that is a link into the folder
    os.execute(("ln -sfn '%s/evil.lua' '%s/evil.lua'"):format(dir, folder "links"))
    refuses(dir, ("export LUA_PATH='%s/?.lua';"):format(root .. "/links"), "family=")
  end)

  inside("no file of the folder that the program is started in", function()
    bs.write_file(folder "cwd" .. "/mine.lua", source "mine")
    refuses(model "mine", ("cd '%s/cwd';"):format(root), "family=./mine.lua")
    local code, err = generate(model "mine", ("cd '%s/cwd';"):format(root), "family=./mine.lua")
    assert.equal(0, code, err)
    assert.is_true(ran())
  end)

  it("no module of the program or of Lua, and no path", function()
    for _, kind in ipairs {
      "string", "_G", "bs", "core", "bs.core", "host", "job", "settings", "..", "../x", "/etc/passwd", "a.b", "a/b",
      "", "x\\0", "bs.family.qwen3", "%s", "?",
    } do
      refuses(model(kind))
    end
  end)

  it("no library for C", function()
    local dir = folder "so"
    bs.write_file(dir .. "/clib.so", "not a library")
    refuses(model "clib", ("export LUA_CPATH='%s/?.so';"):format(dir))
  end)

  it("a file in an absolute entry of package.path, or in BSLUA_HOME", function()
    bs.write_file(folder "path" .. "/mine.lua", source "mine")
    bs.write_file(folder "home/bs/family" .. "/mine.lua", source "mine")
    for _, before in ipairs {
      ("export LUA_PATH='./nothing/?.lua;%s/path/?.lua;;';"):format(root),
      ("export BSLUA_HOME='%s/home';"):format(root),
      ("export BSLUA_HOME='%s/path';"):format(root),
    } do
      local code, err = generate(model "mine", before)
      assert.equal(0, code, err)
      assert.is_true(ran())
    end
    refuses(model "other", ("export LUA_PATH='%s/path/?.lua';"):format(root))
  end)
end)

describe("family=FILE", function()
  it("is run wherever it is, in the model's folder too", function()
    local dir = model "evil"
    bs.write_file(dir .. "/evil.lua", source "evil")
    local code, err = generate(dir, nil, "family=" .. dir .. "/evil.lua")
    assert.equal(0, code, err)
    assert.is_true(ran())
  end)

  it("that is none ends in one line", function()
    local dir = folder "bad"
    bs.write_file(dir .. "/syntax.lua", "return {")
    bs.write_file(dir .. "/number.lua", "return 7")
    bs.write_file(dir .. "/code.lua", string.dump(load "return {}"))
    bs.write_file(dir .. "/half.lua", source("half", "own.lora = nil"))
    os.execute(("rm -f '%s/fifo'; mkfifo '%s/fifo'"):format(dir, dir))
    for name, text in pairs {
      ["none.lua"] = "No such file", ["syntax.lua"] = "syntax.lua:1:", ["number.lua"] = "must return a table",
      ["code.lua"] = "binary chunk", ["half.lua"] = "lacks the field 'lora'", ["fifo"] = "regular file",
      [""] = "a folder",
    } do
      local code, err = generate(broken.good, nil, ("family=%s/%s"):format(dir, name))
      assert.equal(1, code, err)
      assert.truthy(err:find(text, 1, true), err)
      assert.equal(1, select(2, err:gsub("\n", "")), err)
    end
  end)

  it("is a word of every recipe that opens a model, and a setting of a job", function()
    local file = folder "words" .. "/mine.lua"
    bs.write_file(file, source("mine"))
    local dir = model "unknown"
    bs.write_file(root .. "/rows.jsonl", '{"input_ids": [1, 2, 3, 4]}\n')
    local given, out = "family=" .. file, root .. "/adapter"
    local runs = {
      { "recipes/qwen8b_lora.lua", "model=" .. dir, given, "data=" .. root .. "/rows.jsonl", "steps=1", "out=" .. out,
        "step_tokens=8", "micro_tokens=8", "r=2" },
      { "recipes/eval.lua", "model=" .. dir, given, "data=" .. root .. "/rows.jsonl", "adapter=" .. out },
      { "recipes/merge.lua", "model=" .. dir, given, "adapter=" .. out, "out=" .. root .. "/merged" },
    }
    for _, words in ipairs(runs) do
      os.remove(marker)
      local code, _, err = broken.run(words)
      assert.equal(0, code, err)
      assert.is_true(ran(), words[1])
    end
    assert.equal(broken.train {}, broken.train { model = dir, family = file })
    broken.fails(2, { "family=3; a family's table or the path of its file is expected" }, broken.train, { family = 3 })
  end)
end)
