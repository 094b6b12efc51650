-- SPDX-License-Identifier: Apache-2.0
--- Chat templates of models: which files hold one, and which published ones stand for a layout of bs.chat. A template
-- is a program in Jinja, and this one does not run it. What is known is its text, by a digest; tests/data/chat has
-- what these templates make of conversations, and tests/lua/chat_spec.lua holds the layouts to it.
local bs = require "bs"
local files = require "bs.settings.files"

local templates = {}

local MOST <const> = 16 << 20 -- bytes of a file
local ADDITIONAL <const> = "additional_chat_templates" -- a folder of templates by name

-- The layout of a template by the digest of its text. A name in tests/data/chat/renderings.json stands behind each.
local known = {
  ["9288f1ec56dafcdc"] = "mistral_v1",
  ["a56abef5e88d36ab"] = "chatml", ["f856196f880b3952"] = "chatml", ["2ed627ed7f63510d"] = "chatml",
  ["156404f35a280500"] = "chatml", ["75fa6d6e4f403d56"] = "chatml", ["944c81fd5714f3e0"] = "chatml",
  ["483a0dac8706a15f"] = "gemma",
  ["4cffab4515dec302"] = "gemma2",
  ["ededc67206e6e961"] = "llama2", ["0f4922526cee35cd"] = "llama2",
  ["dc73f2d307d7a7af"] = "llama3",
  ["c121a288d21604f9"] = "llama3_1",
  ["659883a08c6a2ea2"] = "llama3_2",
  ["86e602717068c216"] = "mistral_nemo",
  ["8c49e7ccdc2cfa2d"] = "mixtral",
  ["02ad963e1dc9b695"] = "phi3",
  ["4fd1936d2ee10882"] = "phi3_5",
  ["7b4861106464e30b"] = "phi4",
  ["49b7b418e78dc72a"] = "phi4_mini",
  ["f5c98d7365e09f47"] = "qwen2", ["c869774515b0e889"] = "qwen2",
  ["c28ca71a55973264"] = "qwen2_5",
  ["03891b40cf98b374"] = "qwen3", ["bc214b407c6afc84"] = "qwen3",
  ["4dd7ecba4ed6ccd9"] = "smollm2", ["9307f6cf637f5db1"] = "smollm2",
  ["84f528490820660f"] = "zephyr",
}

--- The digest of a template's text as Jinja reads it: line ends are \n, one at the end is not its own.
function templates.digest(text)
  return bs.hash((text:gsub("\r\n?", "\n"):gsub("\n$", "")))
end

--- The name of the layout that a template is known to make, by its text or by the digest as hexadecimal digits; nil:
-- it is not known.
function templates.layout(text) return known[("%016x"):format(templates.digest(text))] end
function templates.by_digest(digest) return known[digest] end

--- The digests that are known and not in a set.
function templates.without(set)
  local list = {}
  for digest in pairs(known) do
    if not set[digest] then list[#list + 1] = digest end
  end
  return list
end

-- ---- files -----------------------------------------------------------------------------------------------

-- A value of a JSON file: the text of a template, or a list of them by name. Adds {text, name, place} to found.
local function add(found, value, place)
  if value == nil or value == bs.json.null then return end
  if type(value) == "string" then
    found[#found + 1] = { text = value, place = place }
    return
  end
  for _, t in ipairs(type(value) == "table" and value or {}) do
    if type(t) ~= "table" or type(t.name) ~= "string" or type(t.template) ~= "string" then
      bs.fail("error", "%s: a template of a list has a name and a template", place)
    end
    found[#found + 1] = { text = t.template, place = place, name = t.name ~= "default" and t.name or nil }
  end
  if type(value) ~= "table" then bs.fail("error", "%s is a %s, not a text", place, type(value)) end
end

local function field(found, there, dir, name)
  if there[name] then add(found, files.json(dir .. "/" .. name, MOST).chat_template, name .. ": chat_template") end
end

-- Every template of a folder, those that count before others first.
local function all(dir)
  local found, there, jinja = {}, {}, "chat_template.jinja"
  for _, name in ipairs(bs.list_folder(dir) or {}) do there[name] = true end
  if there[jinja] then found[1] = { text = files.read(dir .. "/" .. jinja, MOST), place = jinja } end
  field(found, there, dir, "tokenizer_config.json")
  field(found, there, dir, "chat_template.json")
  for _, name in ipairs(bs.list_folder(dir .. "/" .. ADDITIONAL) or {}) do
    local called = name:match "^(.*)%.jinja$"
    if called then found[#found + 1] = { text = "", place = ADDITIONAL .. "/" .. name, name = called } end
  end
  return found
end

--- The template of a model's folder: {text =, place = the file and field}, or nil where there is none. The order of
-- precedence is that of transformers: chat_template.jinja, tokenizer_config.json, chat_template.json; of a list the
-- one named default. Then what is not used, as texts for the user.
function templates.of(dir)
  local chosen, others, named = nil, {}, {}
  for _, t in ipairs(all(dir)) do
    if t.name then
      named[#named + 1] = ("'%s' (%s)"):format(t.name, t.place)
    elseif not chosen then
      chosen = t
    elseif templates.digest(t.text) ~= templates.digest(chosen.text) then
      others[#others + 1] = ("the template of %s is used; that of %s is another"):format(chosen.place, t.place)
    end
  end
  if not chosen and #named > 0 then chosen = { text = "", place = "templates by name, none of them default" } end
  if #named > 0 then others[#others + 1] = "templates that are not used: " .. table.concat(named, ", ") end
  return chosen, others
end

return templates
