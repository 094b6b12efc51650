-- SPDX-License-Identifier: Apache-2.0
--- Runs spec files where there is no busted: bslua tests/support/specs.lua FILE... [--match=PATTERN]. It knows the
-- parts of busted that the specs of jobs use. One line for each failure and file; exit status 1 if any failed.
-- luacheck: globals assert describe it setup teardown before_each after_each finally
local list, patterns = {}, {}
for _, word in ipairs(arg) do
  local pattern = word:match "^%-%-match=(.*)$"
  if pattern then patterns[#patterns + 1] = pattern else list[#list + 1] = word end
end

local function same(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for key, value in pairs(a) do
    if not same(value, b[key]) then return false end
  end
  for key in pairs(b) do
    if a[key] == nil then return false end
  end
  return true
end

local function show(v)
  if type(v) ~= "table" then return type(v) == "number" and ("%.17g"):format(v) or tostring(v) end
  local parts = {}
  for key, value in pairs(v) do parts[#parts + 1] = ("%s = %s"):format(tostring(key), show(value)) end
  table.sort(parts)
  return "{" .. table.concat(parts, ", ") .. "}"
end

local function claim(ok, note, fmt, ...)
  if ok then return end
  local values = table.pack(...)
  for i = 1, values.n do values[i] = show(values[i]) end
  error(fmt:format(table.unpack(values, 1, values.n)) .. (note and " (" .. tostring(note) .. ")" or ""), 3)
end

local plain_assert = assert
local assertions = {
  same = function(a, b, note) claim(same(a, b), note, "expected %s, got %s", a, b) end,
  equal = function(a, b, note) claim(a == b, note, "expected %s, got %s", a, b) end,
  is_true = function(v, note) claim(v == true, note, "true expected, got %s", v) end,
  is_false = function(v, note) claim(v == false, note, "false expected, got %s", v) end,
  is_truthy = function(v, note) claim(v, note, "a value expected, got %s", tostring(v)) end,
  is_nil = function(v, note) claim(v == nil, note, "nil expected, got %s", v) end,
  is_number = function(v, note) claim(type(v) == "number", note, "a number expected, got %s", tostring(v)) end,
  matches = function(pattern, text, note)
    claim(tostring(text):find(pattern), note, "%s is not in: %s", pattern, tostring(text))
  end,
}

local block -- being described: {name, above, setup, teardown, before, after = lists of functions, tests}
local passed, failed, endings = 0, 0, nil

local function globals()
  local function hook(kind)
    return function(fn) table.insert(block[kind], fn) end
  end
  assert = setmetatable(assertions, {
    __call = function(_, ...) return plain_assert(...) end,
    __index = function(_, name) error(("this runner has no assert.%s"):format(name), 2) end,
  })
  describe = function(name, fn)
    local above = block
    block = { name = above and above.name .. name .. " " or name .. " ", above = above, setup = {}, teardown = {},
              before = {}, after = {}, tests = {} }
    if above then table.insert(above.tests, block) end
    fn()
    local done = block
    block = above or done
  end
  it = function(name, fn) table.insert(block.tests, { name = block.name .. name, fn = fn }) end
  setup, teardown, before_each, after_each = hook "setup", hook "teardown", hook "before", hook "after"
  finally = function(fn) endings[#endings + 1] = fn end
end

local function wanted(name)
  for _, pattern in ipairs(patterns) do
    if name:find(pattern) then return true end
  end
  return #patterns == 0
end

local function protected(name, fn)
  local ok, err = xpcall(fn, function(e) return debug.traceback(tostring(e), 2) end)
  if not ok then io.stdout:write("FAIL ", name, ": ", err, "\n") end
  return ok
end

local function each(b, kind)
  if not b then return end
  if kind == "before" then each(b.above, kind) end
  for _, fn in ipairs(b[kind]) do fn() end
  if kind == "after" then each(b.above, kind) end
end

local function run_test(b, t)
  if not wanted(t.name) then return end
  endings = {}
  local ok = protected(t.name, function()
    each(b, "before")
    t.fn()
  end)
  for _, fn in ipairs(endings) do ok = protected(t.name, fn) and ok end
  ok = protected(t.name, function() each(b, "after") end) and ok
  if ok then passed = passed + 1 else failed = failed + 1 end
end

local function run_block(b)
  local ok = protected(b.name .. "(setup)", function()
    for _, fn in ipairs(b.setup) do fn() end
  end)
  if not ok then failed = failed + 1 end
  for _, t in ipairs(ok and b.tests or {}) do
    if t.tests then run_block(t) else run_test(b, t) end
  end
  if not protected(b.name .. "(teardown)", function() each({ teardown = b.teardown }, "teardown") end) then
    failed = failed + 1
  end
end

for _, path in ipairs(list) do
  local start, before_passed, before_failed = os.time(), passed, failed
  block = { name = "", setup = {}, teardown = {}, before = {}, after = {}, tests = {} }
  local root = block
  globals()
  if protected(path, function() plain_assert(loadfile(path))() end) then run_block(root) else failed = failed + 1 end
  print(("%s: %d passed, %d failed, %d s"):format(path, passed - before_passed, failed - before_failed,
    os.difftime(os.time(), start)))
  assert = plain_assert
  collectgarbage()
end
os.exit(failed == 0 and passed > 0 and 0 or 1, true)
