-- SPDX-License-Identifier: Apache-2.0
--- Row formats: from one decoded JSON object to token ids and labels (-100: no loss on that token).
--
--   {"text": T}                        every token is trained, the end-of-text token too
--   {"prompt": T, "completion": T}     the completion and the end-of-text token are trained
--   {"messages": [{"role": R, "content": T}, ...]}   every answer and the end of its turn (bs.chat)
--   {"input_ids": [...], "labels": [...]}            as they are; without labels every token is trained
--
-- The first row that fits a format decides for all; a row that fits two is refused.
local bs = require "bs"
local chats = require "bs.data.chat"
local texts = require "bs.data.texts"

local formats = { NO_LOSS = -100 }
local NO_LOSS <const> = formats.NO_LOSS

-- Fields that change what a row means and that no format here has.
local foreign = {
  tools = true, images = true, image = true, videos = true, conversations = true, instruction = true,
  segments = true, chosen = true, rejected = true,
}
local roles = { system = true, user = true, assistant = true }

local function null(v) return v == nil or v == bs.json.null end

-- What a value is: "null", "a text", "an object"; and the value where it is short.
local function kind(v)
  local t = null(v) and "null" or type(v)
  if t == "string" then return "a text" end
  return t == "table" and (v[1] ~= nil and "a list" or "an object") or t == "null" and t or "a " .. t
end

local function shown(v)
  if type(v) == "string" and #v <= 40 then return ("'%s'"):format(v) end
  return math.type(v) and tostring(v) or kind(v)
end

local function quoted(names)
  local out = {}
  for i, name in ipairs(names) do out[i] = ("'%s'"):format(name) end
  return table.concat(out, ", ")
end

local function keys_of(row)
  local names = {}
  for key in pairs(row) do names[#names + 1] = tostring(key) end
  table.sort(names)
  return names
end

local function is_list(t)
  if type(t) ~= "table" then return false end
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n == #t
end

-- ---- input_ids ---------------------------------------------------------------------------------------

-- t as a list of integers 0 <= v < vocab (or -100, for labels); nil and the reason otherwise.
local function integers(t, name, vocab, no_loss)
  if type(t) ~= "table" then return nil, ("'%s' is %s, not a list"):format(name, kind(t)) end
  if not is_list(t) then return nil, ("'%s' has names or nulls; it must be a list"):format(name) end
  for i = 1, #t do
    local v = t[i]
    local int = math.type(v) and math.tointeger(v)
    if not int then return nil, ("%s[%d] is %s, not an integer"):format(name, i - 1, shown(v)) end
    if (int < 0 or int >= vocab) and int ~= no_loss then
      return nil, ("%s[%d] is %d; %s0..%d is expected (the vocabulary)"):format(name, i - 1, int,
        no_loss and "-100 or " or "", vocab - 1)
    end
    t[i] = int
  end
  return t
end

local function encode_ids(self, row)
  local ids, bad = integers(row.input_ids, "input_ids", self.vocab)
  if not ids then return nil, bad end
  if not null(row.attention_mask) then
    local mask, reason = integers(row.attention_mask, "attention_mask", 2)
    if not mask then return nil, reason end
    if #mask ~= #ids then return nil, ("%d input_ids and %d in attention_mask"):format(#ids, #mask) end
    for i, v in ipairs(mask) do
      if v == 0 then
        return nil, ("attention_mask[%d] is 0; rows are without padding here"):format(i - 1)
      end
    end
  end
  if null(row.labels) then return ids, ids end
  local labels, reason = integers(row.labels, "labels", self.vocab, NO_LOSS)
  if not labels then return nil, reason end
  if #labels ~= #ids then
    return nil, ("%d input_ids and %d labels; they must be as many"):format(#ids, #labels)
  end
  return ids, labels
end

-- ---- text ----------------------------------------------------------------------------------------------

local function add_end(self, ids)
  if ids[#ids] ~= self.eos then ids[#ids + 1] = self.eos end
end

local function encode_text(self, row)
  local ids = self.texts:start(row.text)
  add_end(self, ids)
  return ids, ids
end

local function encode_prompt(self, row)
  local ids, prompt, border = self.texts:answer(row.prompt, row.completion)
  local labels = {}
  if #ids == prompt or ids[#ids] ~= self.eos then ids[#ids + 1] = self.eos end
  for t = 1, #ids do labels[t] = t > prompt and ids[t] or NO_LOSS end
  return ids, labels, { border = border or nil }
end

local function check_messages(list)
  if type(list) ~= "table" then return ("'messages' is %s, not a list"):format(kind(list)) end
  if #list == 0 or not is_list(list) then return "'messages' must be a list of messages" end
  for i, m in ipairs(list) do
    local where = ("messages[%d]"):format(i - 1)
    if type(m) ~= "table" then return ("%s is %s, not an object"):format(where, kind(m)) end
    if not roles[m.role] then
      return ("%s: role %s; system, user or assistant is expected"):format(where, shown(m.role))
    end
    for _, key in ipairs(keys_of(m)) do
      if key ~= "role" and key ~= "content" and not null(m[key]) then
        return ("%s has '%s', which is not supported here"):format(where, key)
      end
    end
    if type(m.content) ~= "string" then
      return ("%s: content is %s, not a text"):format(where, kind(m.content))
    end
    local bad = texts.bad_byte(m.content)
    if bad then return ("%s: byte %d of its content is not UTF-8"):format(where, bad) end
    if m.role == "system" and i > 1 then return where .. ": a system message must be the first" end
  end
end

local function encode_messages(self, row)
  local bad = check_messages(row.messages)
  if bad then return nil, bad end
  local segments, reason = self.texts:layout(self.text.chat)(row.messages, self.context)
  if not segments then return nil, "messages: " .. reason end
  return self.texts:segments(segments, NO_LOSS)
end

--- What rows may be marked with, in the order of telling: {mark, what such rows have}.
formats.marks = {
  { "border", "whose border is inside a token of the whole text" },
  { "special", "with the text of a special token in a message, which is plain text there" },
}

-- ---- formats ---------------------------------------------------------------------------------------------

local kinds = {
  { name = "messages", needs = { "messages" }, encode = encode_messages },
  { name = "prompt and completion", needs = { "prompt", "completion" }, texts = true, encode = encode_prompt },
  { name = "input_ids", needs = { "input_ids" }, also = { "labels", "attention_mask" }, encode = encode_ids },
  { name = "text", needs = { "text" }, texts = true, encode = encode_text },
}
local by_ids <const> = kinds[3]
local fields, choices = {}, {} -- every field of any format -> the formats that have it; their names
for i, f in ipairs(kinds) do
  f.has = {}
  for _, list in ipairs { f.needs, f.also or {} } do
    for _, key in ipairs(list) do f.has[key], fields[key] = true, true end
  end
  choices[i] = table.concat(f.needs, " + ")
end

local function fits(f, row)
  for _, key in ipairs(f.needs) do
    if null(row[key]) then return false end
  end
  return true
end

-- The format of a row: the only one that it fits; or nil, the reason, and whether there were two.
local function detect(row)
  local found
  for _, f in ipairs(kinds) do
    if fits(f, row) then
      if found then
        return nil, ("fits two formats, '%s' and '%s'; a row must have one"):format(found.name, f.name), true
      end
      found = f
    end
  end
  if found then return found end
  for key in pairs(fields) do
    if row[key] == bs.json.null then return nil, ("'%s' is null"):format(key) end
  end
  local names = keys_of(row)
  return nil, ("no format fits its fields (%s); expected are %s"):format(#names > 0 and quoted(names) or "none",
    table.concat(choices, ", or "))
end

-- What is wrong with a row for this format, or nil.
local function check_fields(self, f, row)
  for _, key in ipairs(f.needs) do
    if row[key] == nil then return ("no field '%s'"):format(key) end
    if f.texts and type(row[key]) ~= "string" then
      return ("'%s' is %s, not a text"):format(key, kind(row[key]))
    end
    local bad = f.texts and texts.bad_byte(row[key])
    if bad then return ("byte %d of '%s' is not UTF-8"):format(bad, key) end
  end
  for key, value in pairs(row) do
    if not f.has[key] and not null(value) then
      if fields[key] then return ("field '%s' does not belong to rows of %s"):format(key, f.name) end
      if foreign[key] then return ("field '%s' is not supported here"):format(key) end
      self.unused[key] = true
    end
  end
end

-- ---- objects ---------------------------------------------------------------------------------------------

local methods = {}
local mt = { __index = methods, __name = "bs.formats" }

-- Open the tokenizer for the first row that needs it.
local function need_tokenizer(self)
  if self.tokenizer then return end
  if not self.text then
    bs.fail("error", "rows of %s need a tokenizer, and none is given; rows of input_ids need none", self.format.name)
  end
  local t = self.text.open(self.format.name)
  self.texts, self.tokenizer, self.context, self.eos = t, t.tokenizer, t.context, t.eos
  self.may_exceed = t.tokenizer:vocab_size() > self.vocab
  if not self.eos then
    bs.fail("error", "%s: none of tokenizer_config.json, special_tokens_map.json, generation_config.json and "
      .. "config.json names the token that ends a text (eos)", t.source)
  end
end

local function first_beyond(ids, vocab)
  for _, id in ipairs(ids) do
    if id >= vocab then return id end
  end
end

--- ids and labels of a row (a decoded JSON value); nil and the reason when it is none. Then what is worth telling of
-- it, as a set of formats.marks.
function methods:encode(row)
  if type(row) ~= "table" or row[1] ~= nil then return nil, "not a JSON object" end
  local f, reason, ambiguous = detect(row)
  if self.format and not ambiguous then f = self.format end
  if not f then return nil, reason end
  local bad = check_fields(self, f, row)
  if bad then return nil, bad end
  if not self.format and f.name ~= "messages" and self.text and self.text.layout then
    bs.log("layout=%s is for rows of messages; these are rows of %s", self.text.layout, f.name)
  end
  self.format = f
  if f ~= by_ids then need_tokenizer(self) end
  local ids, labels, marks = f.encode(self, row)
  if not ids then return nil, labels end
  local beyond = self.may_exceed and f ~= by_ids and first_beyond(ids, self.vocab)
  if beyond then
    return nil, ("token '%s' (%d) is outside the model's vocabulary of %d"):format(
      self.tokenizer:piece(beyond) or "?", beyond, self.vocab)
  end
  return ids, labels, marks or {}
end

--- The name of the format, "" before the first row.
function methods:name() return self.format and self.format.name or "" end

--- Fields that rows had and that are not used, sorted.
function methods:ignored() return keys_of(self.unused) end

--- What turns rows of one data set into ids. vocab: of the model; text: see formats.text, nil for input_ids only.
function formats.new(vocab, text) return setmetatable({ vocab = vocab, text = text, unused = {} }, mt) end

local is_layout = {}
for _, name in ipairs(chats.layouts) do is_layout[name] = true end

--- Where text rows get their tokenizer and layout: a model's folder, opened at the first need. chat: the layout of the
-- model's family; layout: the name of one of bs.chat that is asked for; nil or "auto": none is.
function formats.text(dir, chat, layout)
  local opened
  if layout == "auto" then layout = nil end
  if layout and not is_layout[layout] then
    bs.fail("usage", "layout=%s; one of auto, %s is expected", layout, table.concat(chats.layouts, ", "))
  end
  return { chat = chat, layout = layout, open = function(what)
    local message
    if not opened then opened, message = texts.open(dir, layout) end
    return opened or bs.fail("error", "rows of %s need the model's tokenizer: %s", what, message)
  end }
end

-- ---- preview ---------------------------------------------------------------------------------------------

local escapes = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

--- A row as text with what has labels in [brackets], and how many tokens are trained (the first one of a row
-- never is, nothing comes before it). tokenizer: nil shows ids. The text is that of all ids together, so that a space
-- at a border is seen. The middle of what is longer than `most` bytes is left out.
function formats.preview(ids, labels, tokenizer, most)
  local parts, trained, last = {}, 0, false
  local stream <close> = tokenizer and tokenizer:stream()
  for t, id in ipairs(ids) do
    local now = labels[t] ~= NO_LOSS
    local text = stream and stream:push(id) or not stream and (t > 1 and " " or "") .. id or ""
    local space = not stream and t > 1 and now ~= last and " " or ""
    if now ~= last then
      parts[#parts + 1] = now and space .. "[" or "]" .. space
      if space ~= "" then text = text:sub(2) end
    end
    parts[#parts + 1] = text
    last = now
    trained = trained + (now and t > 1 and 1 or 0)
  end
  parts[#parts + 1] = stream and stream:finish() or ""
  if last then parts[#parts + 1] = "]" end
  local text = table.concat(parts):gsub("%c", function(c)
    return escapes[c] or ("\\x%02x"):format(c:byte())
  end)
  most = most or 800
  if #text > most then
    local head = utf8.offset(text, 0, most // 2) - 1
    local tail = utf8.offset(text, 0, #text - most // 2)
    text = ("%s ... %s"):format(text:sub(1, head), text:sub(tail))
  end
  return text, trained
end

return formats
