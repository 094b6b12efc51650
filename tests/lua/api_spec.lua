-- SPDX-License-Identifier: Apache-2.0
--- docs/lua.md names every function and method of the running program, and none that does not exist.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local args = require "bs.args"
local chat = require "bs.chat"
local data = require "bs.data"
local family = require "bs.model.find_family"
local host = require "bs.host"
local job = require "bs.job"
local machine = require "machine"
local nn = require "bs.nn"
local settings = require "bs.train.job_settings"
local soft_gate = require "soft_gate"
local sources = require "sources"

-- The code spans of the page by the heading that they stand under.
local page_text, sections, heading = sources.read "docs/lua.md", {}, ""
for line in (page_text .. "\n"):gmatch "([^\n]*)\n" do
  heading = line:match "^##+ (.*)$" or heading
  sections[heading] = (sections[heading] or "") .. line .. "\n"
end
for name, text in pairs(sections) do
  local spans = {}
  for span in text:gmatch "`([^`]+)`" do spans[#spans + 1] = span end
  sections[name] = spans
end

-- What spans begin with, as a set: names after `pattern`, under one heading or under all.
local function named(pattern, under)
  local set = {}
  for name, spans in pairs(sections) do
    for _, span in ipairs((under == nil or under == name) and spans or {}) do
      local found = span:match("^" .. pattern)
      if found then set[found] = true end
    end
  end
  return set
end

local function keys(t)
  local set = {}
  for key in pairs(t) do set[key] = true end
  return set
end

local function agree(where, there, page)
  local faults = {}
  for name in pairs(there) do
    if not page[name] then faults[#faults + 1] = ("%s has %s, which the page does not name"):format(where, name) end
  end
  for name in pairs(page) do
    if not there[name] then faults[#faults + 1] = ("%s has no %s, which the page names"):format(where, name) end
  end
  table.sort(faults)
  assert.is_true(#faults == 0, "\n" .. table.concat(faults, "\n"))
end

describe("docs/lua.md names what there is:", function()
  it("functions and values of bs", function()
    local there = {}
    for name, v in pairs(bs) do
      if type(v) ~= "table" then there[name] = true end
      for inner in pairs(type(v) == "table" and v or {}) do there[name .. "." .. inner] = true end
    end
    local page = named "bs%.([%w_.]+)%f[^%w_.]"
    for name in pairs(page) do -- a whole module
      if type(bs[name]) == "table" or package.loaded["bs." .. name] or name == "family.NAME" then page[name] = nil end
    end
    agree("bs", there, page)
  end)

  it("fields of the Lua modules", function()
    agree("bs.nn", keys(nn), named "nn%.([%w_]+)")
    agree("bs.chat", keys(chat), named "chat%.([%w_]+)")
    agree("bs.job", keys(job), named "job%.([%w_]+)")
    agree("bs.data", keys(data), named "data%.([%w_]+)")
    agree("bs.args", keys(args), named "args%.([%w_]+)")
    agree("bs.host", keys(host), named "host%.([%w_]+)")
  end)

  it("the reader that families read their config with", function()
    agree("nn.reader", keys(nn.reader({}, "test")), named("r%.([%w_]+)", "Module bs.nn"))
  end)

  it("methods of a job and of its instance", function()
    local j <close> = job.new { model = "tests/data/llama" }
    agree("a job", keys(getmetatable(j).__index), named("j:([%w_]+)", "Object bs.job"))
    agree("an instance", keys(getmetatable(j.instance).__index), named("i:([%w_]+)", "Object bs.instance"))
  end)

  it("methods of a loader", function()
    local rows <close> = assert(data.open("tests/data/rows.jsonl", { vocab = 300, micro_tokens = 512, max_refused = 1,
      text = require("bs.data.formats").text("tests/data/qwen3") }))
    local methods = keys(getmetatable(rows))
    for _, name in ipairs { "__index", "__name", "__close" } do methods[name] = nil end
    agree("a loader", methods, named("d:([%w_]+)", "Object bs.data"))
  end)

  it("settings of a job", function()
    local words = named("([%w_]+)$", "Module bs.job")
    for name in pairs(settings.rules) do assert.is_true(words[name], "setting " .. name) end
  end)

  it("fields and stages of a family", function()
    local page, list = named("([%w_]+)", "A family"), { soft_gate, soft_gate.stages }
    local inner = table.concat(sections["A family"], " ")
    for _, name in ipairs(family.shipped) do list[#list + 1] = require("bs.family." .. name) end
    for _, f in ipairs(list) do
      for field in pairs(f) do assert.is_true(page[field], "field " .. field) end
      for field in pairs(f.head or {}) do assert.is_truthy(inner:find(field .. " =", 1, true), "head." .. field) end
    end
  end)
end)

describe("docs/lua.md names the methods of", function()
  -- Objects that no script gets hold of.
  local internal = { ["bs.tokenizer.work"] = true, ["bs.text"] = true, ["bs.json"] = true, ["bs.host.hold"] = true }
  local types = {}
  for key, v in pairs(debug.getregistry()) do
    local methods = type(key) == "string" and key:find "^bs%." and type(v) == "table" and rawget(v, "__index")
    if type(methods) == "table" and not internal[key] then types[key] = methods end
  end

  it("no object that does not exist", function()
    local in_lua = { ["bs.job"] = true, ["bs.instance"] = true, ["bs.data"] = true }
    assert.is_truthy(types["bs.tensor"])
    for name in pairs(sections) do
      local object = name:match "^Object (.*)$"
      assert.is_truthy(not object or types[object] or in_lua[object], name)
    end
  end)

  for name, methods in pairs(types) do
    it(name, function()
      assert.is_truthy(sections["Object " .. name], "the page has no section on " .. name)
      agree(name, keys(methods), named("%a+:([%w_]+)", "Object " .. name))
    end)
  end
end)

describe("docs/lua.md names the options of", function()
  local t
  setup(function() t = machine.new() end)
  teardown(function() t.engine:close() t.device:close() end)

  -- What an option table with an unknown key is answered, by the beginning of the item on the page.
  local calls = {
    ["bs.device.open("] = function(o) bs.device.open("cpu", o) end,
    ["bs.engine.open {"] = bs.engine.open,
    ["bs.batch.open("] = function(o) bs.batch.open(t.engine, o) end,
    ["bs.placement.new {"] = bs.placement.new,
    ["bs.stream.open {"] = bs.stream.open,
    ["bs.store.open("] = function(o) bs.store.open(t.engine, t.batch, { o }) end,
    ["bs.embedding.open("] = function(o) bs.embedding.open(t.engine, o) end,
    ["bs.head.open("] = function(o) bs.head.open(t.engine, o) end,
    ["bs.linear.new("] = function(o) bs.linear.new(t.engine, o) end,
    ["bs.cache.open("] = function(o) bs.cache.open(t.engine, o) end,
    ["bs.rates.copy("] = function(o) bs.rates.copy(t.device, o) end,
    ["bs.rates.gemm("] = function(o) bs.rates.gemm(t.device, o) end,
    ["bs.json.encode("] = function(o) bs.json.encode({}, o) end,
    ["e:scope {"] = function(o) t.engine:scope(o) end,
    ["b:set("] = function(o) t.batch:set(0, o) end,
    ["p:apply("] = function(o) t.params:apply(o, 1) end,
    ["j:step("] = function(o)
      local j <close> = job.new { model = "tests/data/llama" }
      j:step({}, o)
    end,
  }
  for item, call in pairs(calls) do
    it(item, function()
      local ok, err = pcall(call, { no_such_key = true })
      local message = tostring(err)
      local valid = not ok and (message:match "valid: ([^)]*)" or message:match "did you mean ([^?]*)")
      assert.is_truthy(valid, message)
      local first = assert(page_text:find("`" .. item, 1, true), item .. " is not on the page")
      local text = page_text:sub(first, (page_text:find("\n[-#\n]", first) or 0) - 1)
      for key in valid:gmatch "[%w_]+" do
        assert.is_truthy(text:find("%f[%w_]" .. key .. "%f[^%w_]"), ("%s: option %s"):format(item, key))
      end
    end)
  end
end)
