-- SPDX-License-Identifier: Apache-2.0
--- Generation: all rows go through the model together, first their prompts, then one token a row and walk. What
-- a walk cannot hold waits for the next one. A job for it is made with cache = {rows, tokens}.
local bs = require "bs"

local generate = {}

-- The most tokens that each row may come to.
function generate.capacity(prompts, max_new)
  local most = 0
  for _, ids in ipairs(prompts) do most = math.max(most, #ids) end
  return most + max_new
end

local function start_rows(prompts, capacity, max_new)
  local rows = {}
  for i, ids in ipairs(prompts) do
    if #ids == 0 then bs.fail("error", "prompt %d has no token", i) end
    if #ids + max_new > capacity then
      bs.fail("error", "prompt %d has %d tokens and may get %d more; there is room for %d", i, #ids, max_new, capacity)
    end
    rows[i] = { index = i, pending = ids, packed = 0, position = 0, new = {} }
  end
  return rows
end

-- Pack what the rows have waiting into at most batch.micros micro-batches. Returns them, and for each a list of
-- its rows; `ends`: this piece is the last of what the row has waiting.
local function pack(rows, batch)
  local micros, pieces, room = {}, {}, 0
  for _, row in ipairs(rows) do
    while row.packed < #row.pending do
      local m = micros[#micros]
      if room == 0 or #m.row_len == batch.rows then
        if #micros == batch.micros then return micros, pieces end
        m, room = { row_len = {}, ids = {}, row_id = {}, start = {} }, batch.tokens
        micros[#micros + 1], pieces[#pieces + 1] = m, {}
      end
      local n = math.min(room, #row.pending - row.packed)
      table.move(row.pending, row.packed + 1, row.packed + n, #m.ids + 1, m.ids)
      local r = #m.row_len + 1
      m.row_len[r], m.row_id[r], m.start[r] = n, row.index - 1, row.position
      row.packed, row.position, room = row.packed + n, row.position + n, room - n
      pieces[#pieces][r] = { row = row, ends = row.packed == #row.pending }
    end
  end
  return micros, pieces
end

-- After a walk: the next token of every row that has none waiting. Returns the rows that go on.
local function choose(rows, logits, pieces, o)
  for j, list in ipairs(pieces) do
    for r, piece in ipairs(list) do
      local row = piece.row
      if piece.ends then
        local id = o.choose(logits[j], r, row.index, #row.new + 1)
        row.new[#row.new + 1] = id
        row.pending, row.packed = { id }, 0
        if o.stops[id] then row.reason = "stop" elseif #row.new == o.max_new then row.reason = "length" end
        if o.on_token then o.on_token(row.index, id, row.reason) end
      end
    end
    logits[j]:close()
  end
  local left = {}
  for _, row in ipairs(rows) do
    if not row.reason then left[#left + 1] = row end
  end
  return left
end

-- Is there certainly a walk after this one? (A row may stop at any token, but not before its last piece.)
local function goes_on(rows, max_new)
  for _, row in ipairs(rows) do
    if row.packed < #row.pending or #row.new + 1 < max_new then return true end
  end
  return false
end

--- Generate on an instance with a cache. prompts: list of lists of ids. o: {max_new, choose (sample.new), stops =
-- {id -> true}, on_token(row, id, reason) or nil}. Returns for each prompt {ids (a stop included), reason = "stop" or
-- "length"}, and the numbers of tokens and walks.
function generate.run(inst, prompts, o)
  local spec = inst.spec
  local all = start_rows(prompts, spec.cache.tokens, o.max_new)
  local rows, tokens, walks = all, 0, 0
  while #rows > 0 do
    local micros, pieces = pack(rows, spec.batch)
    local logits = inst:decode(micros, { next = goes_on(rows, o.max_new) })
    walks = walks + 1
    for _, m in ipairs(micros) do tokens = tokens + #m.ids end
    rows = choose(rows, logits, pieces, o)
  end
  local out = {}
  for i, row in ipairs(all) do out[i] = { ids = row.new, reason = row.reason } end
  return out, { tokens = tokens, walks = walks }
end

return generate
