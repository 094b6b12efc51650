-- SPDX-License-Identifier: Apache-2.0
--- What becomes of the keys of config.json that a family has not read. One that some published family computes with
-- (key_rules.lua) is refused unless its value does nothing; so are a quantisation and an architecture that is no
-- language model. Any other key is told.
local bs = require "bs"
local config = require "bs.nn.config"
local quantised = require "bs.model.quantised"
local reads = require "bs.nn.reads"
local rules = require "bs.model.key_rules"
local tell = require "bs.model.tell"

local keys = {}

local language_model = { "ForCausalLM$", "ForConditionalGeneration$", "LMHeadModel$" }

-- Does the name of a class say that the model is something else than a language model, or a part of one?
local function other_model(name)
  for _, pattern in ipairs(language_model) do
    if name:find(pattern) then return false end
  end
  return name:find("For%u") ~= nil
end

--- End unless `architectures` names language models, or nothing.
function keys.check_architectures(hf, dir)
  local list = hf.architectures
  if not config.present(list) then return end
  if type(list) == "string" then list = { list } end
  if type(list) ~= "table" or next(list) ~= nil and list[1] == nil then
    config.wrong("architectures", list, "a list of names")
  end
  for _, name in ipairs(list) do
    if type(name) ~= "string" then config.wrong("architectures", name, "a list of names") end
    if other_model(name) then
      bs.fail("error", "%s: config.json: 'architectures' says %s, which is no language model: what its head computes "
        .. "is not supported; a *ForCausalLM checkpoint is expected", dir, name)
    end
  end
end

-- What the rules ask of a model: the family's numbers, and the names of its tensors.
local function described(self)
  local fam, c = self.family, self.config
  local specs
  return {
    c = c, head_bias = fam.head.bias ~= nil,
    has = function(pattern)
      specs = specs or fam.tensors(c, 0)
      for _, spec in ipairs(specs) do
        if spec.name:find(pattern) then return true end
      end
      return false
    end,
  }
end

local function alike(key)
  for _, pattern in ipairs(rules.alike) do
    if tostring(key):find(pattern) then return true end
  end
  return false
end

local WIDTH <const>, KEYS <const> = 60, 10 -- of a value, and how many keys, are shown

local function short(text) return #text > WIDTH and text:sub(1, WIDTH) .. "..." or text end

local function listed(list)
  if #list <= KEYS then return table.concat(list, ", ") end
  return table.concat(list, ", ", 1, KEYS) .. (" and %d more"):format(#list - KEYS)
end

local function refuse(self, hf, list)
  local out = {}
  for i, u in ipairs(list) do out[i] = ("'%s' (%s)"):format(short(u.path), short(config.shown(u.value))) end
  bs.fail("error", "%s: config.json: a %s model does not compute with %s; what was trained with it would give other "
    .. "numbers here. Where that is known not to matter, take the key out of config.json", self.dir, hf.model_type,
    listed(out))
end

-- A multimodal file says twice whether the head is tied; the top level decides.
local function tell_tied(self, hf)
  local text = hf.text_config
  if type(text) ~= "table" or self.config.tied == nil then return end
  local inner = text.tie_word_embeddings
  if type(inner) == "boolean" and inner ~= self.config.tied then
    tell.once("%s: config.json: 'tie_word_embeddings' is %s in text_config; the top level decides: %s", self.dir, inner,
      self.config.tied)
  end
end

--- Account for the keys of a model's config.json that its family has not read.
function keys.check(self)
  local hf, model = self.checkpoint.config, described(self)
  local refused, told = {}, {}
  for _, u in ipairs(reads.unread(hf)) do
    local rule = rules.computed[u.key]
    if quantised.is_key(u.key) then
      local what = quantised.of_key(u.key, u.value)
      if what then
        bs.fail("error", "%s: config.json: %s; such weights are not read: give the original checkpoint (or take the "
          .. "key out of config.json where the weights are plain)", self.dir, what)
      end
    elseif rule or alike(u.key) then
      local nothing = rules.does_nothing(rule, u.value, u.table, model)
      if nothing == "tell" then told[#told + 1] = short(u.path) end
      if not nothing then refused[#refused + 1] = u end
    elseif not rules.quiet[u.key] and not rules.empty(u.value) and u.value ~= 0 then
      told[#told + 1] = short(u.path)
    end
  end
  if #refused > 0 then refuse(self, hf, refused) end
  if #told > 0 then
    tell.once("%s: config.json: not read: %s", self.dir, listed(told))
  end
  tell_tied(self, hf)
end

return keys
