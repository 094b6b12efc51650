-- SPDX-License-Identifier: Apache-2.0
--- What becomes of the tensors of a checkpoint that no block holds. Buffers that are computed again pass; parts of a
-- model that are left out on purpose are told; all else is refused, unless a pattern of `ignore` names it: a tensor
-- that was trained and is not computed with makes another model.
local bs = require "bs"
local config = require "bs.nn.config"
local quantised = require "bs.model.quantised"
local tell = require "bs.model.tell"

local unread = {}

-- ---- patterns -------------------------------------------------------------------------------------------------------

local STAR <const>, ANY <const> = ("*"):byte(), ("?"):byte()

-- Does a name match a pattern, * any text, ? one character? In time of their product: names come from a file.
local function matches(name, pattern)
  local i, j, star, from = 1, 1, nil, nil
  while i <= #name do
    local p = pattern:byte(j)
    if p == STAR then
      star, from, j = j, i, j + 1
    elseif p == ANY or p == name:byte(i) then
      i, j = i + 1, j + 1
    elseif star then -- the last star takes one character more
      from = from + 1
      i, j = from, star + 1
    else
      return false
    end
  end
  return pattern:find("^%**$", j) ~= nil
end

--- The patterns of `ignore`: a list of {text, used}.
function unread.patterns(patterns)
  local list = {}
  for i, text in ipairs(type(patterns) == "string" and { patterns } or patterns or {}) do
    if type(text) ~= "string" or text == "" then
      bs.fail("usage", "ignore=%s; names of tensors are expected, or patterns of them such as *.bias", tostring(text))
    end
    list[i] = { text = text, used = 0 }
  end
  return list
end

--- Does one of the patterns match a name that would be refused? Counts it.
function unread.ignored(list, name)
  local found = false
  for _, p in ipairs(list) do
    if matches(name, p.text) then
      p.used, found = p.used + 1, true
    end
  end
  return found
end

-- ---- kinds ----------------------------------------------------------------------------------------------------------

-- Computed again from config.json, whatever is stored.
local buffers = { "rotary_emb%.[^.]*$", "%.masked_bias$", "%.position_ids$", "^position_ids$" }

-- Causal masks of older programs are stored under the name of a bias.
local function is_buffer(name, t)
  for _, pattern in ipairs(buffers) do
    if name:find(pattern) then return true end
  end
  local n = #t.dims
  return n >= 2 and t.dims[n] == t.dims[n - 1] and (name:find("attn%.bias$") or name:find("attention%.bias$")) ~= nil
end

local towers = {
  "visual", "vision", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "multi_modal_projector",
  "mm_projector", "vision_projector", "image_newline", "img_processor", "embed_vision", "audio_tower", "audio_model",
  "audio_projector", "embed_audio", "image_projection", "img_projection",
}

local function in_tower(name)
  for _, word in ipairs(towers) do
    if name:find("^" .. word .. "%f[.\0]") or name:find("^model%." .. word .. "%f[.\0]") then return true end
  end
  return false
end

local heads = {
  "^score%.", "^classifier%.", "^classification_head%.", "^v_head%.", "^value_head%.", "^reward_head%.",
  "^regression_head%.",
  "^qa_outputs%.", "^multiple_choice_head%.", "^pooler%.", "^rm_head%.", "^logit_scale$", "^summary%.",
}

local function is_other_head(name)
  for _, pattern in ipairs(heads) do
    if name:find(pattern) then return true end
  end
  return false
end

local function is_adapter(name) return name:find("lora_", 1, true) ~= nil or name:find("base_layer", 1, true) ~= nil end

-- The layer that a name belongs to, or nil: what stands between the parts of the family's prefix.
local function layer_of(fam)
  local SOME <const> = 908172635
  local before, after = fam.prefix(SOME):match("^(.-)" .. SOME .. "(.*)$")
  return function(name)
    if not before or name:sub(1, #before) ~= before then return nil end
    local digits = name:match("^%d+", #before + 1)
    if not digits or name:sub(#before + #digits + 1, #before + #digits + #after) ~= after then return nil end
    return math.tointeger(tonumber(digits))
  end
end

local MAX_PREDICT <const> = 1024

-- Layers behind the last that predict further tokens, and are not run (multi-token prediction).
local function predict_layers(hf)
  local text = type(hf.text_config) == "table" and hf.text_config or {}
  local n = text.num_nextn_predict_layers or hf.num_nextn_predict_layers
  if not config.present(n) then return 0 end
  if math.type(n) ~= "integer" or n < 0 or n > MAX_PREDICT then
    config.wrong("num_nextn_predict_layers", n, "an integer 0.." .. MAX_PREDICT)
  end
  return n
end

local LONGEST <const> = 500 -- characters of a name that programs write
local TOWER <const>, PREDICT <const> = "of a part for images or sound", "of layers that predict further tokens"

-- Kind of an unread tensor: what is left out, or what is refused.
local function kind_of(self, name, t, layer, last)
  if #name > LONGEST then return ("with names of more than %d characters"):format(LONGEST) end
  if is_buffer(name, t) then return nil end
  if in_tower(name) then return nil, TOWER end
  local i, layers = layer(name), self.config.layers
  if i and i >= layers and i < last or name:find("^mtp%.") or name:find("^model%.mtp%.") then return nil, PREDICT end
  local method = quantised.of_tensor(name)
  if method then return ("that quantisation by %s leaves"):format(method) end
  if is_adapter(name) then return "of an adapter that is not merged" end
  if is_other_head(name) then return "of a head that is not a language model's" end
  if i and i >= layers then return ("of layers beyond the %d that config.json says"):format(layers) end
  if i then return "in layers that it has" end
  return "outside its layers"
end

-- ---- the account ----------------------------------------------------------------------------------------------------

-- Names of all tensors that nothing reads, and what each is.
local function remaining(self)
  local names, found = {}, {}
  for _, set in ipairs { self.checkpoint.tensors, self.checkpoint.unlisted } do
    for name, t in pairs(set) do
      if not self.read[name] then names[#names + 1], found[name] = name, t end
    end
  end
  table.sort(names)
  return names, found
end

local function add(groups, kind, name)
  if not groups[kind] then
    groups[kind] = {}
    groups[#groups + 1] = kind
  end
  table.insert(groups[kind], name)
end

-- A pattern that names all of a list: by how all of them end where that says what they are, else by how they begin.
local function pattern_of(list)
  local first = list[1]
  if #list == 1 or #first > LONGEST then return first:sub(1, LONGEST) .. (#first > LONGEST and "*" or "") end
  local last, common, same = first:match("[^.]*$"), #first, true
  for _, name in ipairs(list) do
    same = same and name:sub(-#last - 1) == "." .. last
    while name:sub(1, common) ~= first:sub(1, common) do common = common - 1 end
  end
  return same and last ~= "weight" and "*." .. last or first:sub(1, common) .. "*"
end

local function refuse(self, refused)
  local parts, n = {}, 0
  for i, kind in ipairs(refused) do
    n = n + #refused[kind]
    parts[i] = ("%d %s (%s)"):format(#refused[kind], kind, tell.names(refused[kind]))
  end
  bs.fail("error", "%s: a %s model with this config.json does not read %d of the tensors: %s; a model without them is "
    .. "another one. ignore=PATTERN goes on without them, such as ignore='%s'", self.dir,
    self.checkpoint.config.model_type, n, table.concat(parts, "; "), pattern_of(refused[refused[1]]))
end

local function tell_left_out(self, left, skipped, patterns)
  for _, kind in ipairs(left) do
    tell.once("%s: left out: %d tensors %s (%s)", self.dir, #left[kind], kind, tell.names(left[kind]))
  end
  if #skipped > 0 then
    tell.once("%s: ignore= leaves out %d tensors: %s", self.dir, #skipped, tell.names(skipped))
  end
  for _, p in ipairs(patterns) do
    if p.used == 0 then
      tell.once("%s: ignore=%s names no tensor that would be refused", self.dir, p.text)
    end
  end
end

--- Account for every tensor of a model that is cut into blocks. self.read: name -> true, tensors that something reads.
-- patterns: of unread.patterns, names to go on without.
function unread.check(self, patterns)
  local layer, last = layer_of(self.family), self.config.layers + predict_layers(self.checkpoint.config)
  local refused, left, skipped = {}, {}, {}
  local names, found = remaining(self)
  for _, name in ipairs(names) do
    local bad, leave = kind_of(self, name, found[name], layer, last)
    if leave then
      add(left, leave, name)
    elseif bad and unread.ignored(patterns, name) then
      skipped[#skipped + 1] = name
    elseif bad then
      add(refused, bad, name)
    end
  end
  if #refused > 0 then refuse(self, refused) end
  tell_left_out(self, left, skipped, patterns)
end

return unread
