-- SPDX-License-Identifier: Apache-2.0
--- A model's texts: its tokenizer, how a text begins and ends, which layout chats have, and ids of texts that are cut
-- where training begins. Training and generation begin a text with the same function.
--
-- A row is the text that its parts make together, and its ids are those of that text. Where a part ends inside a token
-- of the whole text, each side is encoded for itself instead (nothing is put before the second), as a model sees a
-- prompt whose answer it writes; such a row is marked `border`.
local bs = require "bs"
local chat = require "bs.data.chat"
local files = require "bs.settings.files"
local spaces = require "bs.data.spaces"
local templates = require "bs.data.templates"

local texts = {}
local methods = {}
local mt = { __index = methods, __name = "bs.texts" }

local PLAIN <const>, INSIDE <const> = { literal = true }, { literal = true, inside = true }
local CONTINUED <const>, PLAIN_CONTINUED <const> = { continued = true }, { literal = true, continued = true }

local function begins(ids, with)
  for i, id in ipairs(with) do
    if ids[i] ~= id then return false end
  end
  return true
end

local function append(ids, more) return table.move(more, 1, #more, #ids + 1, ids) end

--- Where the first byte is that is not UTF-8, counted from 1; nil: all of it is.
function texts.bad_byte(text)
  local n, at = utf8.len(text)
  return not n and at or nil
end

-- ---- texts and their parts ---------------------------------------------------------------------------------

--- Ids of a text as the model expects a text to begin: with what the tokenizer puts there (BOS), once, also where the
-- text has it itself.
function methods:start(text)
  local ids = self.tokenizer:encode(text)
  return begins(ids, self.before) and ids or append(table.move(self.before, 1, #self.before, 1, {}), ids)
end

-- Ids of parts put together, the number of ids up to the end of each, and whether some border is inside a token.
-- whole(text): ids of a text from its beginning; continued(text): of a part alone.
local function join(parts, whole, continued)
  local text, ids, border = parts[1], whole(parts[1]), false
  local ends = { #ids }
  for i = 2, #parts do
    text = text .. parts[i]
    local all = whole(text)
    if begins(all, ids) then
      ids = all
    else
      border = true
      append(ids, continued(parts[i]))
    end
    ends[i] = #ids
  end
  return ids, ends, border
end

--- Ids of prompt and completion, how many of them are the prompt's, and whether the border is inside a token.
function methods:answer(prompt, completion)
  local ids, ends, border = join({ prompt, completion }, function(text) return self:start(text) end,
    function(text) return self.tokenizer:encode(text, CONTINUED) end)
  return ids, ends[1], border
end

-- Does the token take the white space that follows or precedes it?
local function strips(self, piece, id)
  if not self.strip[piece] then
    local after, before = self.tokenizer:encode(piece .. "\n"), self.tokenizer:encode("\n" .. piece)
    self.strip[piece] = {
      after = #after == 1 and after[1] == id, before = #before == 1 and before[1] == id,
    }
  end
  return self.strip[piece]
end

local function need_token(self, piece)
  local id = self.tokenizer:id(piece)
  if not id then
    bs.fail("error", "%s: this chat layout needs the token '%s', which the tokenizer lacks; another one is chosen with "
      .. "layout= (%s), and rows of prompt and completion need none", self.source, piece,
      table.concat(chat.layouts, ", "))
  end
  return id
end

-- The texts of segments first..last without the white space that the tokens beside them take.
local function run_of(self, list, first, last)
  local parts, before, after = {}, list[first - 1], list[last + 1]
  for i = first, last do parts[#parts + 1] = list[i].text end
  if before and strips(self, before.text, need_token(self, before.text)).after then
    local i = 1
    while parts[i] do
      parts[i] = parts[i]:sub(spaces.before(parts[i]) + 1)
      if parts[i] ~= "" then break end
      i = i + 1
    end
  end
  if after and strips(self, after.text, need_token(self, after.text)).before then
    for i = #parts, 1, -1 do
      parts[i] = parts[i]:sub(1, #parts[i] - spaces.after(parts[i]))
      if parts[i] ~= "" then break end
    end
  end
  return parts
end

-- Ids and labels of a chat's segments (bs.chat). marks: border, and special where plain text holds a special token's.
function methods:segments(list, no_loss)
  local ids, labels, marks, at = {}, {}, {}, 1
  local function put(id, trained) ids[#ids + 1], labels[#labels + 1] = id, trained and id or no_loss end
  while list[at] do
    local first = at
    if list[first].special then
      put(need_token(self, list[first].text), list[first].trained)
    else
      while list[at + 1] and not list[at + 1].special do at = at + 1 end
      local parts, options = run_of(self, list, first, at), first > 1 and INSIDE or PLAIN
      local function whole(text) return self.tokenizer:encode(text, options) end
      local run, ends, border = join(parts, whole, function(text)
        return self.tokenizer:encode(text, PLAIN_CONTINUED)
      end)
      local text, part = table.concat(parts), 1
      local tokens = self.tokenizer:encode(text, first > 1 and { inside = true } or nil)
      if not border and (#tokens ~= #run or not begins(tokens, run)) then marks.special = true end
      marks.border = marks.border or border or nil
      for i, id in ipairs(run) do
        while i > ends[part] do part = part + 1 end
        put(id, list[first + part - 1].trained)
      end
    end
    at = at + 1
  end
  return ids, labels, marks
end

-- ---- the layout of chats -------------------------------------------------------------------------------------

local function choose(self, family_chat)
  local template, others = templates.of(self.source)
  local ctx, asked = self.context, self.asked
  for _, line in ipairs(others) do bs.log("%s: %s", self.source, line) end
  local own = template and templates.layout(template.text)
  if template and not ctx.bos then ctx.bos, ctx.eos = ctx.bos or "", ctx.eos or "" end
  if asked then
    bs.log("%s: rows of messages stand in layout=%s%s", self.source, asked, own and own ~= asked and
      (", while the model's own template makes %s"):format(own) or "")
    return chat[asked]
  end
  if own then
    bs.log("%s: rows of messages stand in the layout %s of the model's own template", self.source, own)
    return chat[own]
  end
  local rest <const> = ("; give layout= (%s), or rows of prompt and completion, which need none"):format(
    table.concat(chat.layouts, ", "))
  if template then
    bs.fail("error", "%s: %s is a chat template that is not known here, and templates are not run%s", self.source,
      template.place, rest)
  elseif not family_chat then
    bs.fail("error", "%s: the model has no chat template, and its family no chat layout%s", self.source, rest)
  end
  local name, reason = chat.name(family_chat, ctx)
  if not name then bs.fail("error", "%s: the model has no chat template, and %s%s", self.source, reason, rest) end
  bs.log("%s: the model has no chat template; rows of messages stand in its family's layout%s", self.source,
    name ~= "" and ", " .. name or "")
  return family_chat
end

--- The layout of rows of messages: the one that was asked for, that of the model's template where it is known, or
-- family_chat (nil: none) where there is no template; told once. Ends the run where none of them is.
function methods:layout(family_chat)
  self.chosen = self.chosen or choose(self, family_chat)
  return self.chosen
end

-- The tokens that end an answer in the layout that chats of this model have, where that is known without asking;
-- whether it is.
local function turn_ends(self, family_chat)
  local template = templates.of(self.source)
  local name = self.asked or template and templates.layout(template.text)
  local layout = name and chat[name] or not template and family_chat or nil
  local list = layout and layout({ { role = "user", content = "a" }, { role = "assistant", content = "b" } },
    self.context)
  local ids = {}
  for _, s in ipairs(list or {}) do
    local id = s.special and s.trained and self.tokenizer:id(s.text)
    if id then ids[#ids + 1] = id end
  end
  return ids, layout ~= nil
end

--- The ids that end an answer, as a set and as a list: those that the model's files name, and the end of a turn in its
-- layout of chats (its family's, where it has no template). Then whether that layout is known.
function methods:stops(family_chat)
  local set, list = {}, {}
  local turn, known = turn_ends(self, family_chat)
  for _, ids in ipairs { self.tokenizer:stops(), turn } do
    for _, id in ipairs(ids) do
      if not set[id] then set[id], list[#list + 1] = true, id end
    end
  end
  return set, list, known
end

-- ---- opening ---------------------------------------------------------------------------------------------------

local function piece_of(t, name)
  local id = t:special(name)
  return id and t:piece(id)
end

--- The texts of a model's folder; nil and the reason where its tokenizer cannot be opened. layout: the name of the one
-- of bs.chat that is asked for; nil: none is. What files of the tokenizer contradict each other in is told.
function texts.open(dir, layout)
  local t, message = bs.tokenizer.open(dir)
  if not t then return nil, message end
  for _, line in ipairs(t:notes()) do bs.log("%s: %s", dir, line) end
  return setmetatable({
    tokenizer = t, source = dir, asked = layout, strip = {}, before = (t:around()),
    eos = t:special "eos",
    context = {
      has = function(piece) return t:id(piece) ~= nil end, bos = piece_of(t, "bos"), eos = piece_of(t, "eos"),
      today = os.date "%d %b %Y",
    },
  }, mt)
end

--- The ids that end an answer where there is no tokenizer: every eos_token_id of generation_config.json and
-- config.json.
function texts.config_stops(dir)
  local list = {}
  for _, name in ipairs { "generation_config.json", "config.json" } do
    local path = dir .. "/" .. name
    local eos = bs.is_file(path) and files.json(path).eos_token_id
    for _, id in ipairs(type(eos) == "table" and eos or { eos or nil }) do
      if math.type(id) == "integer" and id >= 0 then list[#list + 1] = id end
    end
  end
  return list
end

return texts
