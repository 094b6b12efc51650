-- SPDX-License-Identifier: Apache-2.0
--- Training rows: what is refused and how it is told, packing, order, resume.
local data = require "bs.data"
local formats = require "bs.data.formats"

local path
before_each(function() path = os.tmpname() end)
after_each(function() os.remove(path) end)

local function write(lines, name)
  local f = assert(io.open(name or path, "wb"))
  f:write(lines)
  f:close()
end

local function list(t) return "[" .. table.concat(t, ",") .. "]" end

local function row(ids, labels)
  return ('{"input_ids": %s%s}\n'):format(list(ids), labels and ', "labels": ' .. list(labels) or "")
end

-- n rows whose lengths vary and whose ids tell which row it is.
local function many(n, longest)
  local lines, lens = {}, {}
  for i = 1, n do
    local ids = {}
    for t = 1, 2 + (i * 7919) % (longest - 1) do ids[t] = i end
    lines[i], lens[i] = row(ids), #ids
  end
  write(table.concat(lines))
  return lens
end

local function open(opts, files)
  local o = { vocab = 1000, micro_tokens = 16 }
  for key, v in pairs(opts or {}) do o[key] = v end
  return data.open(files or path, o)
end

local function refused(text, word, opts, files)
  local d, message, status = open(opts, files)
  assert.is_nil(d)
  assert.is_truthy(message:find(text, 1, true), ("'%s' is not in: %s"):format(text, message))
  assert.equal(word, status)
end

describe("a row", function()
  local good = row { 1, 2, 3 }

  local function bad(line, text)
    write(good .. "\n" .. line .. "\n" .. good)
    refused(path .. ":3: " .. text, "data")
  end

  it("that is malformed is refused with file and line", function()
    bad("{", "not JSON")
    bad("hello", "not JSON")
    bad("7", "not a JSON object")
    bad('[1, 2]', "not a JSON object")
    bad('{"ids": [1, 2]}', "no field 'input_ids'")
    bad('{"input_ids": "text"}', "'input_ids' is a text")
    bad('{"input_ids": {"a": 1}}', "'input_ids' has names or nulls")
    bad('{"input_ids": [1, 2], "labels": [1, 2, 3]}', "2 input_ids and 3 labels")
    bad('{"input_ids": [1, 2], "labels": []}', "2 input_ids and 0 labels")
    bad('{"input_ids": [1, 2.5]}', "input_ids[1] is 2.5, not an integer")
    bad('{"input_ids": [1, "2"]}', "input_ids[1] is '2', not an integer")
    bad('{"input_ids": [1, null, 2]}', "input_ids[1] is null, not an integer")
    bad('{"input_ids": [1, -1]}', "input_ids[1] is -1; 0..999 is expected")
    bad('{"input_ids": [1, 1000]}', "input_ids[1] is 1000; 0..999 is expected")
    bad('{"input_ids": [1, -100]}', "input_ids[1] is -100")
    bad('{"input_ids": [1, 2], "attention_mask": [0, 1]}', "attention_mask[0] is 0")
    bad('{"input_ids": [1, 2], "attention_mask": [1]}', "2 input_ids and 1 in attention_mask")
    bad('{"input_ids": [1, 2], "labels": [1, -5]}', "labels[1] is -5; -100 or 0..999 is expected")
  end)

  it("with a hole where a decoder has dropped nulls is refused", function()
    local ids, why = formats.new(1000):encode { input_ids = { 1, nil, nil, 4 } }
    assert.is_nil(ids)
    assert.matches("names or nulls", why)
  end)

  it("may hold integers written as floats, between blank lines, CRLF and a byte order mark", function()
    write("\xEF\xBB\xBF" .. good:gsub("\n", "\r\n") .. "\r\n  \n" .. '{"input_ids": [4.0, 5e0]}')
    local d = assert(open { step_tokens = 100 })
    assert.equal(2, d.stats.rows)
    local ids = {}
    for _, m in ipairs(d:pass(1)) do table.move(m.ids, 1, #m.ids, #ids + 1, ids) end
    table.sort(ids)
    assert.same({ 1, 2, 3, 4, 5 }, ids)
    for _, v in ipairs(ids) do assert.equal("integer", math.type(v)) end
    d:close()
  end)

  it("that is malformed is counted, and the others are used where few are", function()
    write(good:rep(30) .. '{"input_ids": 3}\n{"ids": [1]}\n' .. good:rep(8))
    refused("2 of 40 rows were dropped; 2 that cannot be used (" .. path .. ":31: 'input_ids' is a number, not a list, "
      .. path .. ":32: no field 'input_ids'); at most 4 %", "data", { max_refused = 0.04 })
    local d = assert(open())
    assert.same({ 40, 38, 2 }, { d.stats.rows, #d.index, d.stats.bad.count })
    assert.matches("^input_ids: 38 rows, 114 tokens, 76 of them trained, longest row 3; 2 of 40", d:describe())
    d:close()
  end)

  it("that is too long refuses the data when asked to", function()
    write(good:rep(40) .. row { 1, 2, 3, 4 })
    assert(open { micro_tokens = 3 }):close()
    local strict = { micro_tokens = 3, on_long = "refuse" }
    refused("1 longer than micro_tokens=3 (" .. path .. ":41); on_long=drop", "data", strict)
  end)

  it("that cannot be trained is dropped, counted and listed", function()
    local long = {}
    for i = 1, 17 do long[i] = i end
    write(good:rep(60) .. row(long) .. row({ 1, 2 }, { 1, -100 }) .. row { 7 } .. row {})
    refused("4 of 64 rows were dropped; 1 longer than micro_tokens=16 (" .. path .. ":61); "
      .. "3 without a trained token (" .. path .. ":62, " .. path .. ":63, " .. path .. ":64)", "data")
    local d = assert(open { max_refused = 0.0625 })
    assert.same({ count = 1, rows = { path .. ":61" } }, d.stats.too_long)
    assert.equal(3, d.stats.untrained.count)
    assert.equal(180, d.stats.tokens)
    assert.equal(120, d.stats.trained)
    assert.is_truthy(d:describe():find("60 rows, 180 tokens, 120 of them trained, longest row 3; 4 of 64", 1, true))
    d:close()
  end)

  it("is not enough when every one is dropped, or when there is none", function()
    write(row { 7 })
    refused("1 of 1 rows", "data", { max_refused = 1 })
    write("\n")
    refused("no row in " .. path, "data")
  end)
end)

it("rows beyond the model's positions are used and told", function()
  many(30, 16)
  local told = assert(open { positions = 14 }):describe()
  assert.matches("30 rows, .*; %d of the rows are longer than the 14 positions that the model was made for %(.*:%d",
    told)
  assert.is_nil((assert(open { positions = 16 }):describe():find("positions", 1, true)))
end)

describe("files", function()
  it("that cannot be read are an error of their own", function()
    write(row { 1, 2 })
    refused("/nowhere", "error", {}, { path, path .. "/nowhere" })
    refused("/", "error", {}, "/")
  end)

  it("that changed after the check stop the step", function()
    write(row { 1, 2 } .. row { 3, 4 })
    local d = assert(open())
    write(row { 1, 2, 3 } .. row { 3 })
    assert.has_error(function() d:step(1) end)
    d:close()
    assert.has_error(function() d:step(1) end)
  end)

  it("are read as if laid end to end", function()
    local other, empty = os.tmpname(), os.tmpname()
    write(row { 1, 1 } .. row { 2, 2 })
    write("", empty)
    write(row { 3, 3 } .. '{"input_ids": [4, 4]}', other)
    local d = assert(open({}, { empty, path, empty, other, empty }))
    local m = d:pass(1)
    assert.equal(1, #m)
    assert.same({ 1, 1, 2, 2, 3, 3, 4, 4 }, m[1].ids)
    assert.same({ 0, 1, 2, 3 }, m[1].row_id)
    d:close()
    os.remove(other)
    os.remove(empty)
  end)
end)

it("settings that are wrong are told", function()
  write(row { 1, 2 })
  local why = {
    ["unknown setting 'shuffle'"] = { shuffle = true }, ["micro_tokens=0"] = { micro_tokens = 0 },
    ["vocab=1.5"] = { vocab = 1.5 }, ["text=1"] = { text = 1 },
    ["max_refused"] = { max_refused = 2 }, ["on_long=split; drop, refuse"] = { on_long = "split" },
    ["seed"] = { seed = "x" },
  }
  for text, opts in pairs(why) do
    local ok, message = pcall(open, opts)
    assert.is_false(ok)
    assert.is_truthy(tostring(message):find(text, 1, true), tostring(message))
  end
  assert.has_error(function() open({}, {}) end)
end)

describe("steps", function()
  -- Every row of an epoch once, whole, with its own labels, within all limits.
  local function walk(d, lens, limits)
    local epochs, seen, step = 0, {}, 0
    while epochs < 3 do
      step = step + 1
      local epoch, i, n = d:position(step)
      local tokens, rows = 0, 0
      local micros = d:step(step)
      assert.is_true(#micros <= limits.micros)
      for _, m in ipairs(micros) do
        local at, switch = 0, limits.switch or 0
        for _, len in ipairs(m.row_len) do assert.equal(m.row_len[1] > switch, len > switch) end
        assert.is_true(#m.row_len <= limits.rows and #m.ids <= limits.micro_tokens)
        assert.equal(#m.ids, #m.labels)
        for k, len in ipairs(m.row_len) do
          local id = m.row_id[k] + 1
          assert.equal(lens[id], len)
          for t = at + 1, at + len do
            assert.equal(id, m.ids[t])
            assert.equal(id, m.labels[t])
          end
          at, rows = at + len, rows + 1
          assert.is_nil(seen[id])
          seen[id] = true
        end
        assert.equal(at, #m.ids)
        tokens = tokens + at
      end
      assert.is_true(tokens <= limits.step_tokens or rows == 1)
      assert.equal(epochs + 1, epoch)
      if i == n then
        for id = 1, #lens do assert.is_true(seen[id]) end
        epochs, seen = epochs + 1, {}
      end
    end
    return step
  end

  it("give every row once an epoch within all limits", function()
    local lens, total = many(201, 16), 0
    for _, n in ipairs(lens) do total = total + n end
    for _, l in ipairs {
      { micro_tokens = 16, step_tokens = 64, micros = 4, rows = 1000 },
      { micro_tokens = 16, step_tokens = 64, micros = 6, rows = 3 },
      { micro_tokens = 40, step_tokens = 10, micros = 1, rows = 2 },
      { micro_tokens = 100, step_tokens = 1000000, micros = 1000, rows = 1000 },
      { micro_tokens = 40, step_tokens = 90, micros = 3, rows = 1000, switch = 7 },
      { micro_tokens = 40, step_tokens = 40, micros = 1, rows = 1000, switch = 7 },
    } do
      l.seed = 5
      local d = assert(open(l))
      local steps = walk(d, lens, l)
      assert.is_true(steps >= 3 * math.min(total // l.step_tokens, 1))
      d:close()
    end
  end)

  it("fill micro-batches well when rows are at most half as long", function()
    many(400, 8)
    local d, used, room = assert(open { step_tokens = 160, micros = 10 }), 0, 0
    local _, _, n = d:position(1)
    for step = 1, n - 1 do
      for _, m in ipairs(d:step(step)) do used, room = used + #m.ids, room + 16 end
    end
    assert.is_true(used / room > 0.9, used / room)
    d:close()
  end)

  it("depend on seed and step only", function()
    many(57, 16)
    local a = assert(open { step_tokens = 48, seed = 3 })
    local b = assert(open { step_tokens = 48, seed = 3 })
    local c = assert(open { step_tokens = 48, seed = 4 })
    local forward, same = {}, 0
    math.randomseed(1)
    for step = 1, 40 do forward[step] = a:step(step) end
    math.randomseed(2)
    for _, step in ipairs { 40, 1, 39, 17, 17, 2, 25 } do
      assert.same(forward[step], b:step(step))
      assert.same(forward[step], a:step(step))
    end
    for step = 1, 12 do
      if forward[step][1].row_id[1] == c:step(step)[1].row_id[1] then same = same + 1 end
    end
    assert.is_true(same < 6)
    assert.has_error(function() a:step(0) end)
    assert.has_error(function() a:step(1.5) end)
    for _, d in ipairs { a, b, c } do d:close() end
  end)

  it("come in the order that was fixed once", function()
    many(9, 4)
    local d, order = assert(open { micro_tokens = 4, step_tokens = 1, seed = 1 }), {}
    for step = 1, 18 do order[step] = d:step(step)[1].row_id[1] end
    assert.same({ 2, 7, 4, 3, 0, 6, 1, 8, 5, 7, 2, 8, 6, 0, 3, 4, 5, 1 }, order)
    d:close()
  end)

  it("shuffle: any row comes at any place about equally often", function()
    many(10, 4)
    local d, first = assert(open { micro_tokens = 4, step_tokens = 1 }), {}
    for epoch = 0, 999 do
      local id = d:step(epoch * 10 + 1)[1].row_id[1]
      first[id] = (first[id] or 0) + 1
    end
    -- Mean 100, standard deviation 9.5: five of them.
    for id = 0, 9 do assert.is_true(math.abs((first[id] or 0) - 100) < 48, first[id]) end
    d:close()
  end)
end)
