-- SPDX-License-Identifier: Apache-2.0
--- The tensors of an adapter's file by the linears that they belong to, and what any other tensor in it is: each is
-- refused by name, since an adapter of which a part is left out gives other results.
local bs = require "bs"
local lora = require "bs.model.lora"
local model = require "bs.model.model"

local adapter_tensors = {}

-- Names that PEFT gives to what plain LoRA of a linear does not have.
local strangers = {
  { "%.lora_embedding_[AB]", "is of an adapter of an embedding, which is not supported" },
  { "%.lora_magnitude_vector", "is a length of DoRA, which is not supported" },
  { "%.lora_[AB]%.bias$", "is a bias of an adapter (lora_bias), which is not supported" },
  { "%.lora_[AB]%.bias%.", "is a bias of an adapter (lora_bias), which is not supported" },
  { "trainable_tokens", "holds trained rows of the embedding (trainable_token_indices), which are not supported" },
  { "%.modules_to_save%.", "is of a module that was trained whole (modules_to_save), which is not supported" },
  { "%.base_layer%.weight$", "is a weight of the base model (PEFT's save_pretrained writes none)" },
  { "%.experts%.base_layer%.lora_", "is of fused experts (target_parameters), which is not supported" },
  { "%.experts%.lora_", "is of fused experts (target_parameters), which is not supported" },
  { "visual%.", "is of a vision tower, which is not computed" },
  { "vision_", "is of a vision tower, which is not computed" },
  { "%.lora_[^AB]", "is nothing that plain LoRA has" },
  { "%.lora_", nil }, -- of some linear; the rest is told by its name
  { "%.bias$", "is a bias that was trained beside the adapter (bias), which is not supported" },
  { "%.weight$", "is of a module that was trained whole (modules_to_save), which is not supported" },
}

local function what_is(name)
  for _, s in ipairs(strangers) do
    if name:find(s[1]) then return s[2] end
  end
end

-- The linear that the name of a module ends with, whatever wraps the model or stands between its parts.
local function similar(linears, name)
  local plain = ("." .. name):gsub("%._orig_mod", ""):gsub("%.inner", ""):gsub("%.module", ""):gsub("%.base_layer", "")
  local tail = plain:match("%.(%a+%.%d+%..*)$")
  for full in pairs(linears) do
    if tail and lora.ends_with(full, tail) then return full end
  end
end

-- End the script: a tensor that is none of an adapter for these linears.
local function refuse(m, path, linears, name)
  local module, ab, rest = name:match("^(.*)%.lora_([AB])(.*)$")
  local prefix = lora.prefix(m)
  for _, outer in ipairs(lora.outer(m)) do
    if name:find(prefix .. outer.name .. ".", 1, true) == 1 then
      bs.fail("error", "%s: tensor '%s' belongs to no linear of the layers: it is of the %s, which is not supported "
        .. "in an adapter", path, name, outer.what)
    end
  end
  local what = what_is(name)
  local full = not what and module and similar(linears, module)
  if what then
    bs.fail("error", "%s: tensor '%s' belongs to no linear of this model: it %s", path, name, what)
  elseif full and prefix .. full == module then
    bs.fail("error", "%s: tensor '%s' belongs to no linear by this name: '%s' is expected after the linear's, and it "
      .. "has '%s' (an adapter's own name is no part of it; PEFT's save_pretrained writes none)", path, name,
      ".lora_" .. ab .. ".weight", ".lora_" .. ab .. rest)
  elseif full then
    bs.fail("error", "%s: tensor '%s' belongs to no linear by this name: '%s' is expected; it was saved from a model "
      .. "that was wrapped or of another class (save the adapter from the plain one)", path, name,
      prefix .. full .. ".lora_" .. ab .. ".weight")
  end
  bs.fail("error", "%s: tensor '%s' belongs to no linear of this model; is the adapter of another model?", path, name)
end

--- The tensors of a file by linear: name of the linear -> {a, b}, as the file describes them.
function adapter_tensors.find(m, file)
  local prefix, linears, found = lora.prefix(m), {}, {}
  model.each_linear(m, function(l) linears[l.full] = l end)
  for _, t in ipairs(file:tensors()) do
    local full, ab = t.name:match("^(.*)%.lora_([AB])%.weight$")
    local name = full and full:sub(1, #prefix) == prefix and full:sub(#prefix + 1)
    if not name or not linears[name] then refuse(m, file:path(), linears, t.name) end
    if t.dtype ~= "f32" and t.dtype ~= "bf16" and t.dtype ~= "f16" then
      bs.fail("error", "%s: tensor '%s' is stored as %s; f32, bf16 and f16 are supported", file:path(), t.name, t.dtype)
    end
    found[name] = found[name] or {}
    found[name][ab == "A" and "a" or "b"] = t
  end
  return found
end

return adapter_tensors
