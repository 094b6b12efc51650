-- SPDX-License-Identifier: Apache-2.0
--- Training rows from JSONL files, in one of the formats of bs.rows.
--
-- Files are read once in full, where every row is checked; what stays in memory is one integer per row
-- (its offset and length). Rows are read and encoded again when a step needs them. Which rows make up a step is a
-- function of (seed, step) and the settings alone, so a resumed run needs no state.
--
--   local rows = assert(data.open("train.jsonl", { decode = bs.json.decode, vocab = 151936,
--     micro_tokens = 2048, step_tokens = 16384, seed = 1 }))
--   for step = 1, steps do job:step(rows:step(step)) end
local formats = require "bs.data.formats"

local data = {}
local loader = { __name = "bs.data" }
loader.__index = loader

-- An index entry: offset in the files laid end to end, and tokens of the row.
local LENGTH_BITS = 24
local MAX_TOKENS = (1 << LENGTH_BITS) - 1
local MAX_BYTES = math.maxinteger >> LENGTH_BITS
local LISTED, TOLD = 20, 5 -- dropped rows that are named per reason, and those with an explanation
local NO_LOSS = formats.NO_LOSS
local REFUSED = 4 -- exit status: refused by the data check

-- ---- settings --------------------------------------------------------------------------------

-- Integer settings: least, most, default (none: it must be given).
local MANY = math.maxinteger
local integer_setting = {
  vocab = { 1, MANY }, micro_tokens = { 1, MAX_TOKENS }, step_tokens = { 0, MANY, 0 },
  micros = { 1, MANY, MANY }, rows = { 1, MANY, MANY }, seed = { math.mininteger, MANY, 0 },
}

local function settings(files, opts)
  local o = { files = type(files) == "string" and { files } or files, decode = opts.decode,
    max_refused = opts.max_refused or 0.05, on_long = opts.on_long or "drop", text = opts.text }
  for key in pairs(opts) do
    if o[key] == nil and not integer_setting[key] then
      error(("bs.data: there is no setting '%s'"):format(key), 3)
    end
  end
  for key, s in pairs(integer_setting) do
    local v = opts[key]
    if v == nil then v = s[3] end
    if math.type(v) ~= "integer" or v < s[1] or v > s[2] then
      error(("bs.data: %s=%s; an integer %d..%d is expected"):format(key, tostring(v), s[1], s[2]), 3)
    end
    o[key] = v
  end
  if type(o.files) ~= "table" or #o.files == 0 then error("bs.data: no file is given", 3) end
  if type(o.decode) ~= "function" then error("bs.data: decode must be a function", 3) end
  if type(o.max_refused) ~= "number" or not (o.max_refused >= 0 and o.max_refused <= 1) then
    error("bs.data: max_refused is a share of the rows, 0 to 1", 3)
  end
  if o.on_long ~= "drop" and o.on_long ~= "refuse" then
    error("bs.data: on_long is drop or refuse", 3)
  end
  if o.step_tokens == 0 then o.step_tokens = o.micro_tokens end
  return o
end

-- ---- one row ---------------------------------------------------------------------------------

-- ids, labels of one line; nil and the reason when it is no row.
local function parse(self, line)
  local ok, row, why = pcall(self.cfg.decode, line)
  if not ok then return nil, "not JSON: " .. tostring(row) end
  if row == nil then return nil, "not JSON: " .. tostring(why or "no value") end
  return self.format:encode(row)
end

-- Label t trains position t-1, so the first one trains nothing.
local function trained(labels)
  local n = 0
  for t = 2, #labels do
    if labels[t] ~= NO_LOSS then n = n + 1 end
  end
  return n
end

-- ---- the first reading -----------------------------------------------------------------------

local function drop(reason, where, most)
  reason.count = reason.count + 1
  if #reason.rows < (most or LISTED) then reason.rows[#reason.rows + 1] = where end
end

local function take(self, line, where, offset)
  local s = self.stats
  s.rows = s.rows + 1
  local ids, labels = parse(self, line)
  if not ids then return drop(s.bad, ("%s: %s"):format(where, labels), TOLD) end
  local n = trained(labels)
  if #ids > self.cfg.micro_tokens then
    return drop(s.too_long, where)
  elseif n == 0 then
    return drop(s.untrained, where)
  end
  self.index[#self.index + 1] = offset << LENGTH_BITS | #ids
  s.tokens, s.trained = s.tokens + #ids, s.trained + n
  s.longest = math.max(s.longest, #ids)
end

local function read_file(self, file)
  local at, number = 0, 0
  while true do
    local line, err = file.handle:read("L")
    if err then return nil, ("%s: line %d: %s"):format(file.path, number + 1, err), 1 end
    if not line then break end
    number = number + 1
    local start, text = at, line
    at = at + #line
    if number == 1 and line:sub(1, 3) == "\xEF\xBB\xBF" then start, text = 3, line:sub(4) end
    if text:find("%S") then
      take(self, text, ("%s:%d"):format(file.path, number), file.base + start)
    end
  end
  file.bytes = at
  return true
end

local function open_files(self)
  local base = 0
  for i, path in ipairs(self.cfg.files) do
    local handle, err = io.open(path, "rb")
    if not handle then return nil, err, 1 end
    self.files[i] = { path = path, handle = handle, base = base }
    local ok, msg, code = read_file(self, self.files[i])
    if not ok then return nil, msg, code end
    base = base + self.files[i].bytes
    if base > MAX_BYTES then return nil, path .. ": the files are too large together", 1 end
  end
  return true
end

local function reason_text(reason, what)
  if reason.count == 0 then return "" end
  return ("; %d %s (%s%s)"):format(reason.count, what, table.concat(reason.rows, ", "),
    reason.count > #reason.rows and ", ..." or "")
end

-- "2 of 40 rows were dropped; 2 longer than micro_tokens=512 (a.jsonl:7, a.jsonl:9)".
local function dropped(self)
  local s = self.stats
  return ("%d of %d rows were dropped%s%s%s"):format(s.rows - #self.index, s.rows,
    reason_text(s.bad, "that cannot be used"),
    reason_text(s.too_long, ("longer than micro_tokens=%d"):format(self.cfg.micro_tokens)),
    reason_text(s.untrained, "without a trained token"))
end

--- One line: format, rows, tokens, and which rows were dropped and why.
function loader:describe()
  local s, unused = self.stats, self.format:ignored()
  local text = ("%s: %d rows, %d tokens, %d of them trained, longest row %d"):format(self.format:name(),
    #self.index, s.tokens, s.trained, s.longest)
  if #self.index ~= s.rows then text = text .. "; " .. dropped(self) end
  return #unused == 0 and text or text .. "; fields not used: " .. table.concat(unused, ", ")
end

local function judge(self)
  local rows, kept = self.stats.rows, #self.index
  if rows == 0 then
    return nil, ("data refused: no row in %s"):format(table.concat(self.cfg.files, ", ")), REFUSED
  end
  if self.cfg.on_long == "refuse" and self.stats.too_long.count > 0 then
    return nil, ("data refused: %s; on_long=drop leaves the long ones out"):format(dropped(self)), REFUSED
  end
  if kept == 0 or rows - kept > self.cfg.max_refused * rows then
    return nil, ("data refused: %s; at most %g %% may be (max_refused=)"):format(dropped(self),
      100 * self.cfg.max_refused), REFUSED
  end
  return true
end

--- Open and check the files (a path or a list). opts: decode (JSON text -> value), vocab, micro_tokens;
-- text (see rows.text; without it rows of input_ids only); step_tokens (of a step at most, default
-- micro_tokens; only a single row may exceed it), micros (of a step) and rows (of a micro-batch) at most;
-- seed; max_refused (share of the rows that may be dropped, default 0.05); on_long ("drop", or "refuse"
-- the data). Returns a loader, or nil, a message and the exit status: 4 when the data is refused, 1 when a
-- file cannot be read. loader.stats: rows; tokens, trained and longest of those kept; bad, too_long,
-- untrained = {count, rows = the first of them as "file:line", with the reason where it is bad}.
function data.open(files, opts)
  local self = setmetatable({ cfg = settings(files, opts), index = {}, files = {} }, loader)
  self.first = { [0] = 1 } -- epoch -> its first step
  self.format = formats.new(self.cfg.vocab, self.cfg.text)
  local function none() return { count = 0, rows = {} } end
  self.stats = { rows = 0, tokens = 0, trained = 0, longest = 0, bad = none(), too_long = none(),
    untrained = none() }
  local ok, msg, code = open_files(self)
  if ok then ok, msg, code = judge(self) end
  if ok then return self end
  self:close()
  return nil, msg, code
end

function loader:close()
  for _, file in ipairs(self.files) do file.handle:close() end
  self.files = {}
end
loader.__close = loader.close

-- ---- order -----------------------------------------------------------------------------------

-- The finaliser of splitmix64.
local function mix(x)
  x = (x ~ (x >> 30)) * 0xBF58476D1CE4E5B9
  x = (x ~ (x >> 27)) * 0x94D049BB133111EB
  return x ~ (x >> 31)
end

local ROUNDS, GOLDEN = 6, 0x9E3779B97F4A7C15

-- A permutation of 0..n-1 without a table: a Feistel network on the smallest even number of bits that
-- holds n, walked until it lands below n (Black and Rogaway 2002).
local function permutation(n, seed, epoch)
  local half = 1
  while 1 << 2 * half < n do half = half + 1 end
  local mask, key = (1 << half) - 1, {}
  for round = 1, ROUNDS do key[round] = mix(mix(seed + GOLDEN) + mix(epoch) + round * GOLDEN) end
  return function(v)
    repeat
      local l, r = v >> half, v & mask
      for round = 1, ROUNDS do l, r = r, l ~ (mix(r + key[round]) & mask) end
      v = l << half | r
    until v < n
    return v
  end
end

-- ---- packing ---------------------------------------------------------------------------------

-- The fullest micro-batch that has room for a row of n tokens (best fit), a new one where none has; nil
-- when none may be added.
local function place(self, bins, n)
  local best
  for _, b in ipairs(bins) do
    if b.left >= n and #b < self.cfg.rows and (not best or b.left < best.left) then best = b end
  end
  if not best then
    if #bins >= self.cfg.micros then return nil end
    best = { left = self.cfg.micro_tokens }
    bins[#bins + 1] = best
  end
  best.left = best.left - n
  return best
end

local function pack(self, rows)
  local bins = {}
  for _, row in ipairs(rows) do
    local b = place(self, bins, row.n)
    if not b then return nil end
    b[#b + 1] = row
  end
  return bins
end

-- Longest rows first needs the fewest micro-batches almost always; the order of arrival always fits.
local function pack_best(self, rows)
  local sorted = table.move(rows, 1, #rows, 1, {})
  table.sort(sorted, function(a, b)
    if a.n ~= b.n then return a.n > b.n end
    return a.at < b.at
  end)
  local by_length, by_arrival = pack(self, sorted), pack(self, rows)
  return by_length and #by_length <= #by_arrival and by_length or by_arrival
end

-- Cut rows in an order (position -> row) into parts: a part ends where the next row exceeds
-- step_tokens or fits no micro-batch. start: position of each part's first row, then their number.
local function cut(self, order)
  local start, bins, used = { 0 }, {}, 0
  for at = 0, #self.index - 1 do
    local tokens = self.index[order(at) + 1] & MAX_TOKENS
    local fits = used == 0 or used + tokens <= self.cfg.step_tokens
    local bin = fits and place(self, bins, tokens)
    if not bin then
      start[#start + 1] = at
      bins, used = {}, 0
      bin = place(self, bins, tokens)
    end
    bin[#bin + 1] = true
    used = used + tokens
  end
  start[#start + 1] = #self.index
  return { order = order, start = start }
end

local function cut_epoch(self, epoch)
  if not self.cut or self.cut.epoch ~= epoch then
    self.cut = cut(self, permutation(#self.index, self.cfg.seed, epoch))
    self.cut.epoch = epoch
    self.first[epoch + 1] = self.first[epoch] + #self.cut.start - 1
  end
  return self.cut
end

local function locate(self, step)
  local epoch = 0
  while true do
    if not self.first[epoch + 1] then cut_epoch(self, epoch) end
    if step < self.first[epoch + 1] then return cut_epoch(self, epoch), step - self.first[epoch] + 1 end
    epoch = epoch + 1
  end
end

--- The epoch (1, 2, ...) of a step, the step's number in it and the number of steps in it.
function loader:position(step)
  local c, i = locate(self, step)
  return c.epoch + 1, i, #c.start - 1
end

-- ---- a step ----------------------------------------------------------------------------------

local function fetch(self, row)
  local entry = self.index[row + 1]
  local offset, i = entry >> LENGTH_BITS, #self.files
  while self.files[i].base > offset do i = i - 1 end
  local file = self.files[i]
  local line = file.handle:seek("set", offset - file.base) and file.handle:read("L")
  local ids, labels = parse(self, line or "")
  if not ids or #ids ~= entry & MAX_TOKENS then
    error(("%s: the row at byte %d is not what it was when the file was checked (%s)"):format(
      file.path, offset - file.base, ids and "another length" or labels), 0)
  end
  return ids, labels
end

local function micro_batch(self, bin)
  local m = { row_len = {}, ids = {}, labels = {}, row_id = {} }
  for i, row in ipairs(bin) do
    local ids, labels = fetch(self, row.id)
    table.move(ids, 1, #ids, #m.ids + 1, m.ids)
    table.move(labels, 1, #labels, #m.labels + 1, m.labels)
    m.row_len[i], m.row_id[i] = #ids, row.id
  end
  return m
end

-- Part i of a cut as packed micro-batches.
local function part(self, c, i)
  if #self.files == 0 then error("bs.data: the loader is closed", 3) end
  local rows, micros = {}, {}
  for at = c.start[i], c.start[i + 1] - 1 do
    local id = c.order(at)
    rows[#rows + 1] = { id = id, at = at, n = self.index[id + 1] & MAX_TOKENS }
  end
  for j, bin in ipairs(pack_best(self, rows)) do micros[j] = micro_batch(self, bin) end
  return micros
end

--- The micro-batches of step 1, 2, ...: a list of {row_len, ids, labels, row_id}, plain arrays. Raises
-- when a file has changed since it was checked.
function loader:step(step)
  if math.type(step) ~= "integer" or step < 1 then
    error(("bs.data: step %s; steps are counted from 1"):format(tostring(step)), 2)
  end
  local c, i = locate(self, step)
  return part(self, c, i)
end

--- The first usable row as text or ids, with what is trained in [brackets]; how many tokens are, and of how
-- many.
function loader:preview()
  local ids, labels = fetch(self, 0)
  local text, n = formats.preview(ids, labels, self.format.tokenizer)
  return text, n, #ids
end

local function in_order(self)
  self.plain = self.plain or cut(self, function(at) return at end)
  return self.plain
end

--- Evaluation reads every row once, in file order: the number of parts of at most step_tokens tokens
-- that this takes, and the micro-batches of part 1, 2, ...
function loader:passes() return #in_order(self).start - 1 end

function loader:pass(i)
  local c = in_order(self)
  if math.type(i) ~= "integer" or i < 1 or i >= #c.start then
    error(("bs.data: part %s of %d"):format(tostring(i), #c.start - 1), 2)
  end
  return part(self, c, i)
end

return data
