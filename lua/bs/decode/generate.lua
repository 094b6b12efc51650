-- SPDX-License-Identifier: Apache-2.0
--- Generation: all rows go through the model together, first their prompts, then one token a row and walk. What
-- a walk cannot hold waits for the next one. A job for it is made with cache = {rows, tokens}.
--
-- Where the frequencies of a rotation depend on the length (longrope), a row's own prompt decides and the tokens that
-- it gets keep the choice: the keys in the cache are rotated by one table, and what a row gets does not depend on its
-- neighbours or on how its prompt is cut.
local bs = require "bs"
local rope = require "bs.nn.rope"

local generate = {}

--- Options of generate.run.
generate.rules = {
  max_new = { type = "integer", least = 1, required = true }, choose = { type = "function", required = true },
  stops = { type = "table", default = {} }, on_token = { type = "function" },
}

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
    rows[i] = { index = i, length = #ids, pending = ids, packed = 0, position = 0, new = {} }
  end
  return rows
end

-- What a walk takes, and the micro-batch that is being filled.
local function packer(batch)
  return { batch = batch, micros = {}, pieces = {}, lengths = {}, room = 0 }
end

-- As much of what a row has waiting as there is room for. False: the walk is full.
local function pack_row(p, row)
  while row.packed < #row.pending do
    local m = p.micros[#p.micros]
    if p.room == 0 or #m.row_len == p.batch.rows then
      if #p.micros == p.batch.micros then return false end
      m, p.room = { row_len = {}, ids = {}, row_id = {}, start = {} }, p.batch.tokens
      p.micros[#p.micros + 1], p.pieces[#p.pieces + 1], p.lengths[#p.lengths + 1] = m, {}, row.length
    end
    local n = math.min(p.room, #row.pending - row.packed)
    table.move(row.pending, row.packed + 1, row.packed + n, #m.ids + 1, m.ids)
    local r = #m.row_len + 1
    m.row_len[r], m.row_id[r], m.start[r] = n, row.index - 1, row.position
    row.packed, row.position, p.room = row.packed + n, row.position + n, p.room - n
    p.pieces[#p.pieces][r] = { row = row, ends = row.packed == #row.pending }
  end
  return true
end

-- Pack what the rows have waiting into at most batch.micros micro-batches, rows of one rotation together. Returns
-- them, for each a list of its rows (`ends`: this piece is the last of what the row has waiting), and the length that
-- its rotation goes by.
local function pack(rows, batch, switch)
  local p = packer(batch)
  for _, long in ipairs { false, true } do
    for _, row in ipairs(rows) do
      if (row.length > switch) == long and not pack_row(p, row) then return p.micros, p.pieces, p.lengths end
    end
    p.room = 0
  end
  return p.micros, p.pieces, p.lengths
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

local function count(rows, fn)
  local n = 0
  for _, row in ipairs(rows) do n = n + (fn(row) and 1 or 0) end
  return n
end

-- Rows that left what the model was made for. position: of the token that comes next.
local function tell_lengths(rows, lengths)
  local most, switch = lengths.positions or math.huge, lengths.switch or math.huge
  local beyond = count(rows, function(row) return row.position > most end)
  local crossed = count(rows, function(row) return row.length <= switch and row.position > switch end)
  if beyond > 0 then
    bs.log("%d of %d rows went beyond the %d positions that the model was made for (max_position_embeddings)", beyond,
      #rows, most)
  end
  if crossed > 0 then
    bs.log("%d of %d rows grew past %d tokens, where this model's rotation changes (longrope); they kept that of their "
      .. "prompt", crossed, #rows, switch)
  end
end

--- Generate on an instance with a cache. prompts: list of lists of ids. o: {max_new, choose (sample.new), stops =
-- {id -> true}, on_token(row, id, reason) or nil}. Returns for each prompt {ids (a stop included), reason = "stop" or
-- "length"}, and the numbers of tokens and walks. Rows that went beyond the model's positions are told (bs.log).
function generate.run(inst, prompts, o)
  local spec = inst.spec
  if not spec.cache then bs.fail("usage", "generate: the job was made without cache=") end
  if type(prompts) ~= "table" or #prompts > spec.cache.rows then
    bs.fail("usage", "generate: %s; a list of up to %d lists of ids is expected (cache.rows)",
      type(prompts) == "table" and ("%d prompts"):format(#prompts) or "no prompts", spec.cache.rows)
  end
  local all, lengths = start_rows(prompts, spec.cache.tokens, o.max_new), rope.lengths(spec.model.config)
  local rows, tokens, walks = all, 0, 0
  while #rows > 0 do
    local micros, pieces, by = pack(rows, spec.batch, lengths.switch or math.huge)
    local logits = inst:decode(micros, { lengths = by, next = goes_on(rows, o.max_new) })
    walks = walks + 1
    for _, m in ipairs(micros) do tokens = tokens + #m.ids end
    rows = choose(rows, logits, pieces, o)
  end
  tell_lengths(all, lengths)
  local out = {}
  for i, row in ipairs(all) do out[i] = { ids = row.new, reason = row.reason } end
  return out, { tokens = tokens, walks = walks }
end

return generate
