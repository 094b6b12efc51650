-- SPDX-License-Identifier: Apache-2.0
--- Writing the files of a model folder, which is put in place as a whole (bs.model.put_folder): the weights and
-- config.json of a new model take the place of all weights and the config.json of an earlier one.
local bs = require "bs"

local write_model = {}

write_model.INDEX = "model.safetensors.index.json"
local WEIGHTS <const> = "model.safetensors"

-- The first name is the file that a reader opens first: a folder without it is no model.
local own = { "config.json", WEIGHTS, "model-*-of-*.safetensors", write_model.INDEX }

--- The own names of a model folder for bs.folder. more: a list of names that are written besides, and replaced too.
function write_model.names(more)
  local names = table.move(own, 1, #own, 1, {})
  return table.move(more or {}, 1, #(more or {}), #names + 1, names)
end

--- Put a model folder in order whose config.json is missing because a process ended while it moved files there.
function write_model.recover(dir) bs.folder.recover(dir, own) end

local dtype_names = { f32 = "float32", bf16 = "bfloat16", f16 = "float16" }

--- Write config.json into a folder; dtype: how most arrays are stored.
function write_model.config(dir, config, dtype)
  local c = {}
  for key, value in pairs(config) do c[key] = value end
  c[c.dtype and "dtype" or "torch_dtype"] = dtype_names[dtype]
  bs.write_file(dir .. "/config.json", bs.json.encode(c, { pretty = true }) .. "\n")
end

--- A writer (bs.safetensors.writer) of the one file of weights in a folder; list: what it takes.
function write_model.writer(dir, list) return bs.safetensors.writer(dir .. "/" .. WEIGHTS, list, { format = "pt" }) end

--- The value of a tensor, finite and as it is stored, or an error that names it. The caller closes both.
function write_model.stored(name, value, dtype)
  if not value:is_finite() then
    bs.fail("nonfinite", "the model cannot be saved: tensor '%s' holds NaN or infinity; nothing was written", name)
  end
  local stored = dtype == value:dtype() and value or value:cast(dtype)
  if not stored:is_finite() then
    bs.fail("nonfinite", "the model cannot be saved as %s: tensor '%s' has values that are too large for it (f32 "
      .. "holds them); nothing was written", dtype, name)
  end
  return stored
end

return write_model
