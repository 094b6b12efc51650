-- SPDX-License-Identifier: Apache-2.0
--- Small checkpoints of Llama's layout with something added, taken away or said otherwise, each in a folder of its own
-- (a line about a folder is told once), and what opening one tells or refuses.
local bs = require "bs"
local create = require "bs.model.create"
local model = require "bs.model.model"
local tiny = require "tiny"

local M = { ABSENT = {} } -- a value that takes a key or a tensor away

local root, number = tiny.folder("folders-" .. bs.pid()), 0

--- The name of a folder that is not there yet.
function M.folder()
  number = number + 1
  return ("%s/%d"):format(root, number)
end

--- What is told while fn runs, as one text.
function M.told(fn, ...)
  local lines = {}
  bs.log_to(function(line) lines[#lines + 1] = line end)
  local ok, err = pcall(fn, ...)
  bs.log_to(nil)
  if not ok then error(err, 0) end
  return table.concat(lines, "\n")
end

--- Open a folder as a model; what is told.
function M.open(dir, opts)
  local m
  local text = M.told(function() m = model.open(dir, opts) end)
  m.manifest:close()
  return text
end

--- A copy of a table with keys replaced.
function M.changed(base, over)
  local c = {}
  for _, t in ipairs { base, over or {} } do
    for key, value in pairs(t) do
      if value == M.ABSENT then c[key] = nil else c[key] = value end
    end
  end
  return c
end

--- config.json of the checkpoints.
function M.config(over)
  return M.changed({
    model_type = "llama", architectures = { "LlamaForCausalLM" }, vocab_size = 300, hidden_size = 32,
    intermediate_size = 40, num_hidden_layers = 2, num_attention_heads = 4, num_key_value_heads = 2,
    rms_norm_eps = 1e-5, hidden_act = "silu", tie_word_embeddings = false,
  }, over)
end

--- All tensors of a file: name -> array.
function M.tensors(path)
  local file <close> = assert(bs.safetensors.open(path))
  local arrays = {}
  for _, t in ipairs(file:tensors()) do arrays[t.name] = file:read(t.name) end
  return arrays
end

--- A checkpoint. over: keys of its config.json; more: tensors by name, arrays or the dims of random ones; made: keys
-- that its weights are made with instead.
function M.checkpoint(over, more, made)
  local dir, c = M.folder(), M.config(over)
  create(dir, M.changed(c, made))
  local arrays = M.tensors(dir .. "/model.safetensors")
  for name, a in pairs(more or {}) do
    if a == M.ABSENT then
      arrays[name] = nil
    else
      arrays[name] = type(a) == "table" and tiny.tensor(name, a) or a
    end
  end
  bs.safetensors.write(dir .. "/model.safetensors", arrays)
  bs.write_file(dir .. "/config.json", bs.json.encode(c))
  return dir
end

--- Opening a folder must end with status 1 and one line that holds the texts.
function M.refuses(dir, opts, ...)
  local ok, err = pcall(model.open, dir, opts)
  assert(not ok, "nothing was raised for " .. dir)
  assert(err.bs_exit == 1, tostring(err))
  local message = tostring(err)
  for _, text in ipairs { ... } do assert(message:find(text, 1, true), text .. " is not in: " .. message) end
  assert(not message:find("\n", 1, true), message)
end

return M
