-- SPDX-License-Identifier: Apache-2.0
--- Finds the family of a model. Shipped families are listed here; any other is looked for as the module
-- `bs.family.<model_type>` and then `<model_type>`, so that a user's file needs no registration.
--
-- model_type is the checkpoint's word, and a checkpoint must never run code: only files in absolute entries of
-- package.path and in BSLUA_HOME count, none inside the model's folder, and no module that a program has loaded or
-- preloaded. A file that the user names (family=) is run wherever it is.
local bs = require "bs"
local files = require "bs.settings.files"

local family = {
  shipped = {
    "llama", "qwen3", "qwen2", "mistral", "qwen3_vl", "gemma", "gemma2", "gemma3_text", "phi3", "glm",
    "glm4", "phi", "qwen3_moe", "mixtral", "glm4_moe", "qwen3_vl_moe", "gpt_oss",
  },
}

local required = { "config", "tensors", "prefix", "embed", "head", "lora" }
local MOST_BYTES <const> = 16 << 20 -- of a family's file
local of_experts = { "routing", "expert_tensors", "expert_prefix" }
local of_stages = { "mix", "expert", "join" }

local function lacks(m, name, fields, of)
  for _, key in ipairs(fields) do
    if m[key] == nil then bs.fail("error", "family '%s' lacks the field '%s%s'", name, of or "", key) end
  end
end

--- A family with all that is required of one.
function family.check(m, name)
  if type(m) ~= "table" or type(m.model_types) ~= "table" then
    bs.fail("error", "family '%s': the module must return a table with model_types", name)
  end
  lacks(m, name, required)
  if not (m.layer or m.stages) then
    bs.fail("error", "family '%s' needs layer(c, w, x, ctx) or stages", name)
  end
  if m.stages then
    lacks(m, name, of_experts)
    lacks(m.stages, name, of_stages, "stages.")
    if m.staged then lacks(m, name, { "layer" }) end
  end
  return m
end

local function has(list, word)
  for _, v in ipairs(list) do
    if v == word then return true end
  end
  return false
end

-- What the file of a family returns. Text only: nothing checks compiled chunks.
local function run(path)
  local chunk, message = load(files.read(path, MOST_BYTES), "@" .. path, "t")
  if not chunk then bs.fail("error", "%s", message) end
  return family.check(chunk(), path)
end

--- The family that a user names: its table, or the path of its file.
function family.given(value)
  if type(value) == "string" then return run(value) end
  return family.check(value, "family=")
end

-- ---- the user's files -----------------------------------------------------------------------------------

-- BSLUA_HOME first, as require has it.
local function entries()
  local home = rawget(package, "home") -- set by the program
  local path = (home and home .. "/?.lua;" .. home .. "/?/init.lua;" or "") .. package.path
  local list = {}
  for entry in path:gmatch "[^;]+" do list[#list + 1] = entry end
  return list
end

local function is_inside(path, dir)
  local at, folder = bs.real_path(path), bs.real_path(dir)
  return at and folder and at:sub(1, #folder + 1) == folder:gsub("/$", "") .. "/"
end

-- The user's file for a model_type, or nil and one that is there and not run. package.searchpath would open what is
-- there, and wait where it is a pipe.
local function search(kind, dir)
  local skipped
  for _, name in ipairs { "bs/family/" .. kind, kind } do
    for _, entry in ipairs(entries()) do
      local path = entry:gsub("%?", name)
      if bs.is_file(path) then
        if path:sub(1, 1) == "/" and not (dir and is_inside(path, dir)) then return path end
        skipped = skipped or path
      end
    end
  end
  return nil, skipped
end

local found = {} -- path -> family

local function users(kind, dir)
  local path, skipped = search(kind, dir)
  if not path then return nil, skipped end
  found[path] = found[path] or run(path)
  if has(found[path].model_types, kind) then return found[path] end
  bs.fail("error", "family '%s' does not list model_type '%s' in its model_types", path, kind)
end

--- The family for a config.json table. dir: the model's folder, nothing in which is run.
function family.find(hf, dir)
  local kind = hf.model_type
  if type(kind) ~= "string" then
    bs.fail("error", "config.json: 'model_type' is missing; it names the family, e.g. \"qwen3\"")
  end
  for _, shipped in ipairs(family.shipped) do
    local m = require("bs.family." .. shipped)
    if has(m.model_types, kind) then return family.check(m, shipped) end
  end
  local m, skipped
  local name = kind:match "^[%a_][%w_]*$"
  if name then m, skipped = users(kind, dir) end
  if m then return m end
  bs.fail("error", "config.json: model_type '%s' has no family; there are %s. Name the file of another: family=%s%s",
    kind, table.concat(family.shipped, ", "), skipped or "./x.lua", skipped
    and " (it is not run by itself: it is in the model's folder or in a relative entry of package.path)"
    or (", or have it as %s.lua in an absolute entry of package.path"):format(name and kind or "MODEL_TYPE"))
end

return family
