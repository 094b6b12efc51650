-- SPDX-License-Identifier: Apache-2.0
--- Training rows from JSONL files, in one of the formats of bs.data.formats.
--
-- Files are read once in full, where every row is checked; what stays in memory is one integer per row
-- (its offset and length). Rows are read and encoded again when a step needs them. Which rows make up a step is a
-- function of (seed, step) and the settings alone, so a resumed run needs no state.
--
--   local rows = assert(data.open("train.jsonl", { vocab = 151936,
--     micro_tokens = 2048, step_tokens = 16384, seed = 1 }))
--   for step = 1, steps do job:step(rows:step(step)) end
local bs = require "bs"
local formats = require "bs.data.formats"
local lines = require "bs.data.lines"
local options = require "bs.settings.options"
local packing = require "bs.data.packing"
local texts = require "bs.data.texts"

local data = {}
local loader = { __name = "bs.data" }
loader.__index = loader

-- An index entry: offset in the files laid end to end, and tokens of the row.
local LENGTH_BITS = 24
local MAX_TOKENS = (1 << LENGTH_BITS) - 1
local MAX_BYTES = math.maxinteger >> LENGTH_BITS
local LISTED, TOLD = 20, 5 -- dropped rows that are named per reason, and those with an explanation
local NO_LOSS = formats.NO_LOSS
local REFUSED <const>, FAILED <const> = "data", "error" -- words of bs.fail

-- ---- settings --------------------------------------------------------------------------------

local MANY <const> = math.maxinteger

-- See data.open.
local rules = {
  vocab = { type = "integer", least = 1, most = MANY, required = true },
  micro_tokens = { type = "integer", least = 1, most = MAX_TOKENS, required = true },
  step_tokens = { type = "integer", least = 0, most = MANY, default = 0 },
  micros = { type = "integer", least = 1, most = MANY, default = MANY },
  rows = { type = "integer", least = 1, most = MANY, default = MANY },
  seed = { type = "integer", least = math.mininteger, most = MANY, default = 0 },
  max_refused = { type = "number", least = 0, most = 1, default = 0.05 },
  on_long = { words = { "drop", "refuse" }, default = "drop" },
  text = { type = "table" },
  switch = { type = "integer", least = 1 },
  positions = { type = "integer", least = 1 },
}

local function settings(files, given)
  local o = options.read("data: ", given, rules)
  o.files = type(files) == "string" and { files } or files
  if type(o.files) ~= "table" or #o.files == 0 then bs.fail("usage", "data: no file is given") end
  if o.step_tokens == 0 then o.step_tokens = o.micro_tokens end
  return o
end

-- ---- one row ---------------------------------------------------------------------------------

-- Bytes that a row may have, and its value in memory: what is far longer than a micro-batch must not cost what it
-- weighs. The first part is for fields that are not used; the second leaves each token an entry in each of three lists.
local function most_bytes(self) return (8 << 20) + 256 * self.cfg.micro_tokens end

local SURELY <const>, FIRST <const> = 256 << 10, 64 << 10 -- bytes of text that need no second look; of the first part

-- The texts of a row, whatever its format, and their bytes.
local function texts_of(row)
  local list, sum = {}, 0
  local function add(text)
    if type(text) == "string" then list[#list + 1], sum = text, sum + #text end
  end
  for _, key in ipairs { "text", "prompt", "completion" } do add(row[key]) end
  for _, m in ipairs(type(row.messages) == "table" and row.messages or {}) do
    if type(m) == "table" then add(m.content) end
  end
  return list, sum
end

-- Has the beginning of a text twice as many tokens as are wanted? Where it is cut changes only the last of them.
-- Encoding takes many times a text's memory, so parts are tried, each twice the one before.
local function far_longer(tokenizer, text, most)
  local n = FIRST
  while n < #text do
    local cut = n
    while cut > n - 4 and text:byte(cut + 1) & 0xC0 == 0x80 do cut = cut - 1 end -- not inside a character
    local ok, ids = pcall(tokenizer.encode, tokenizer, text:sub(1, cut))
    if not ok then return false end -- told when all of it is encoded
    if #ids > 2 * most + 64 then return true end
    n = 2 * n
  end
  return false
end

local function surely_longer(self, row)
  if type(row) ~= "table" or not self.cfg.text then return false end
  local list, bytes = texts_of(row)
  if bytes < SURELY then return false end
  local tokenizer = self.cfg.text.open("text").tokenizer
  for _, text in ipairs(list) do
    if far_longer(tokenizer, text, self.cfg.micro_tokens) then return true end
  end
  return false
end

-- ids, labels and marks of one line (formats); nil and the reason when it is no row; nil alone when it is too long for
-- one.
local function parse(self, line)
  local bad = texts.bad_byte(line)
  if bad then return nil, ("byte %d of the line is not UTF-8"):format(bad) end
  local ok, row, message = pcall(bs.json.decode, line, most_bytes(self))
  if not ok and bs.code(row) == "nomem" then error(row, 0) end
  if not ok then return nil, "not JSON: " .. tostring(row) end
  if message or surely_longer(self, row) then return nil end
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

local function note(reason, where, most)
  reason.count = reason.count + 1
  if #reason.rows < (most or LISTED) then reason.rows[#reason.rows + 1] = where end
end

local function take(self, line, where, offset)
  local s = self.stats
  s.rows = s.rows + 1
  local ids, labels, marks
  if line then ids, labels, marks = parse(self, line) end
  if not ids and not labels then return note(s.too_long, where) end
  if not ids then return note(s.bad, ("%s: %s"):format(where, labels), TOLD) end
  local n = trained(labels)
  if #ids > self.cfg.micro_tokens then
    return note(s.too_long, where)
  elseif n == 0 then
    return note(s.untrained, where)
  end
  if #ids > (self.cfg.positions or MANY) then note(s.beyond, where) end
  self.index[#self.index + 1] = offset << LENGTH_BITS | #ids
  s.tokens, s.trained = s.tokens + #ids, s.trained + n
  s.longest = math.max(s.longest, #ids)
  for mark in pairs(marks) do note(s[mark], where) end
end

local function read_file(self, file)
  local number, most = 0, most_bytes(self)
  while true do
    local line, start, bytes = file.lines:next(most)
    if not start then break end
    number, file.bytes = number + 1, start + bytes
    if number == 1 and line and line:sub(1, 3) == "\xEF\xBB\xBF" then start, line = 3, line:sub(4) end
    if not line or line:find("%S") then
      take(self, line, ("%s:%d"):format(file.path, number), file.base + start)
    end
  end
end

local function open_files(self)
  local base = 0
  for i, path in ipairs(self.cfg.files) do
    local reader, message = lines.open(path)
    if not reader then return nil, message, FAILED end
    self.files[i] = { path = path, lines = reader, base = base, bytes = 0 }
    read_file(self, self.files[i])
    base = base + self.files[i].bytes
    if base > MAX_BYTES then return nil, path .. ": the files are too large together", FAILED end
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
  local beyond <const> = "of the rows are longer than the %s positions that the model was made for"
  text = text .. reason_text(s.beyond, beyond:format(self.cfg.positions))
  for _, mark in ipairs(formats.marks) do text = text .. reason_text(s[mark[1]], "rows " .. mark[2]) end
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

--- Open and check the files (a path or a list). opts: vocab, micro_tokens;
-- text (see formats.text; without it rows of input_ids only); step_tokens (of a step at most, default
-- micro_tokens; only a single row may exceed it), micros (of a step) and rows (of a micro-batch) at most;
-- seed; max_refused (share of the rows that may be dropped, default 0.05); on_long ("drop", or "refuse"
-- the data); switch (rows that are longer and those that are not never share a micro-batch) and positions (longer rows
-- are told), see bs.nn.rope. Returns a loader, or nil, a message and the word for bs.fail: "data" when the rows are
-- refused, "error" when a file cannot be read. loader.stats: rows; tokens, trained and longest of those kept; bad,
-- too_long, untrained, beyond and every mark of formats.marks = {count, rows = the first of them as "file:line", with
-- the reason where it is bad}.
function data.open(files, opts)
  local self = setmetatable({ cfg = settings(files, opts), index = {}, files = {} }, loader)
  self.first = { [0] = 1 } -- epoch -> its first step
  self.format = formats.new(self.cfg.vocab, self.cfg.text)
  local function none() return { count = 0, rows = {} } end
  self.stats = { rows = 0, tokens = 0, trained = 0, longest = 0, bad = none(), too_long = none(),
    untrained = none(), beyond = none() }
  for _, mark in ipairs(formats.marks) do self.stats[mark[1]] = none() end
  local ok, message, status = open_files(self)
  if ok then ok, message, status = judge(self) end
  if ok then return self end
  self:close()
  return nil, message, status
end

function loader:close()
  for _, file in ipairs(self.files) do file.lines:close() end
  self.files = {}
end
loader.__close = loader.close

-- ---- epochs --------------------------------------------------------------------------------

-- The kept rows: n, how many; tokens(row), of row 0, 1, ...
local function tokens_of(self)
  return { n = #self.index, tokens = function(row) return self.index[row + 1] & MAX_TOKENS end }
end

local function cut_epoch(self, epoch)
  if not self.cut or self.cut.epoch ~= epoch then
    self.cut = packing.cut(self.cfg, tokens_of(self), packing.permutation(#self.index, self.cfg.seed, epoch))
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
  local line, ids, labels = (file.lines:line_at(offset - file.base, most_bytes(self)))
  if line then ids, labels = parse(self, line) end
  if not ids or #ids ~= entry & MAX_TOKENS then
    bs.fail("error", "%s: the row at byte %d is not what it was when the file was checked (%s)", file.path,
      offset - file.base, ids and "another length" or labels or "too long")
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
  for position = c.start[i], c.start[i + 1] - 1 do
    local id = c.order(position)
    rows[#rows + 1] = { id = id, arrival = position, n = self.index[id + 1] & MAX_TOKENS }
  end
  for j, bin in ipairs(packing.pack(self.cfg, rows)) do micros[j] = micro_batch(self, bin) end
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
  self.plain = self.plain or packing.cut(self.cfg, tokens_of(self), function(at) return at end)
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
