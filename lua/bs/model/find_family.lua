-- SPDX-License-Identifier: Apache-2.0
--- Finds the family of a model. Shipped families are listed here; any other is looked for as the
-- module `bs.family.<model_type>` and then `<model_type>` on package.path, so that a user's file
-- needs no registration.
local bs = require "bs"

local family = {
  shipped = {
    "llama", "qwen3", "qwen2", "mistral", "qwen3_vl", "gemma", "gemma2", "gemma3_text", "phi3", "glm",
    "glm4", "phi",
  },
}

local required = { "config", "tensors", "prefix", "embed", "head", "lora" }

--- A family with all that is required of one.
function family.check(m, name)
  if type(m) ~= "table" or type(m.model_types) ~= "table" then
    bs.fail("error", "family '%s': the module must return a table with model_types", name)
  end
  for _, key in ipairs(required) do
    if m[key] == nil then bs.fail("error", "family '%s' lacks the field '%s'", name, key) end
  end
  if not (m.layer or m.stages) then
    bs.fail("error", "family '%s' needs layer(c, w, x, ctx) or stages", name)
  end
  return m
end

--- The family for a config.json table.
function family.find(hf)
  local kind = hf.model_type
  if type(kind) ~= "string" then
    bs.fail("error", "config.json: 'model_type' is missing; it names the family, e.g. \"qwen3\"")
  end
  for _, name in ipairs(family.shipped) do
    local m = require("bs.family." .. name)
    for _, t in ipairs(m.model_types) do
      if t == kind then return family.check(m, name) end
    end
  end
  if kind:match("^[%w_]+$") then
    for _, name in ipairs { "bs.family." .. kind, kind } do
      if package.loaded[name] or package.searchpath(name, package.path) then
        local m = family.check(require(name), name)
        for _, t in ipairs(m.model_types) do
          if t == kind then return m end
        end
        bs.fail("error", "family '%s' does not list model_type '%s' in its model_types", name, kind)
      end
    end
  end
  bs.fail("error", "config.json: model_type '%s' has no family; there are %s (and any %s.lua on "
    .. "package.path)", kind, table.concat(family.shipped, ", "), kind)
end

return family
