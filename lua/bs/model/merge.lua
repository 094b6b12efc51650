-- SPDX-License-Identifier: Apache-2.0
--- Merges an adapter into a checkpoint: W += scale B A for its linears, in f32 and rounded once to the
-- stored dtype; every other tensor and file is copied as it is. Tensor by tensor: memory holds one weight
-- with its A and B. config.json comes last, so that a folder that has one is complete.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local model = require "bs.model.model"

local merge = {}
local INDEX <const> = "model.safetensors.index.json"

-- Files of a model folder that are not copied: weights in any other form, which would stay unmerged.
local weights = {
  safetensors = true, bin = true, pt = true, pth = true, ckpt = true, gguf = true, h5 = true, msgpack = true,
  onnx = true, onnx_data = true, npz = true,
}

local function base_name(path) return path:match("[^/]+$") end

-- The output folder, made if absent. One with files is refused unless they may be replaced.
local function prepare(m, out, overwrite)
  bs.check_folder(out)
  bs.mkdir(out)
  if bs.same_file(m.checkpoint.dir, out) then
    bs.fail("usage", "out=%s is the model's own folder; the base must stay as it is", out)
  end
  local there = assert(bs.list_folder(out))
  if #there > 0 and not overwrite then
    bs.fail("usage", "out=%s exists and holds %d entries ('%s'); an empty or absent folder, or overwrite=true, is "
      .. "expected", out, #there, there[1])
  end
  os.remove(out .. "/config.json")
end

-- One shard, the targets that the model has there merged. Returns their number and the file's bytes.
local function write_shard(o, path, targets)
  local file <close> = assert(bs.safetensors.open(path))
  local list, n = file:tensors(), 0
  local out <close> = bs.safetensors.writer(o.out .. "/" .. base_name(path), list, file:metadata())
  for _, t in ipairs(list) do
    local a = targets[t.name]
    if a and o.model.checkpoint.tensors[t.name].path == path then
      local w, first, second = file:read(t.name), o.saved:read(a.full)
      bs.array.merge(w, first, second, a.scale, o.threads)
      out:add(t.name, w)
      for _, array in ipairs { w, first, second } do array:close() end
      n = n + 1
    else
      out:copy(t.name, file)
    end
  end
  out:finish()
  return n, file:bytes()
end

local function copy(from, to)
  local f <close> = assert(io.open(from, "rb"))
  bs.write_file(to, assert(f:read("a"), from .. " cannot be read"))
end

-- Everything of the model folder but weights; config.json last. Returns the names that were left out.
local function copy_files(m, out)
  local left, dir = {}, m.checkpoint.dir
  for _, name in ipairs(assert(bs.list_folder(dir))) do
    local from = dir .. "/" .. name
    if not bs.is_file(from) or weights[name:match("%.([^.]*)$") or ""] or name:match("%.index%.json$") and name ~= INDEX
      or name:sub(1, 1) == "." then
      left[#left + 1] = name
    elseif name ~= "config.json" then
      copy(from, out .. "/" .. name)
    end
  end
  copy(dir .. "/config.json", out .. "/config.json")
  return left
end

-- Weights of an earlier content of the folder would be found before ours, or beside them.
local function remove_stale(m, out)
  local ours = {}
  for _, path in ipairs(m.checkpoint.files) do ours[base_name(path)] = true end
  for _, name in ipairs(assert(bs.list_folder(out))) do
    if not ours[name] and (name == INDEX or weights[name:match("%.([^.]*)$") or ""]) then
      assert(os.remove(out .. "/" .. name))
    end
  end
end

--- Merge. o: {model, adapter, out, overwrite, ignore, threads, say}; ignore: see model.open. Returns {tensors, bytes,
-- seconds, left}.
function merge.run(o)
  local m = model.open(o.model, { ignore = o.ignore, check = "full" })
  local saved <close> = adapter.open(m, o.adapter)
  local targets, start, result = {}, bs.now(), { tensors = 0, bytes = 0 }
  for _, a in ipairs(saved.list) do targets[a.full .. ".weight"] = a end
  prepare(m, o.out, o.overwrite)
  for _, path in ipairs(m.checkpoint.files) do
    local n, bytes = write_shard({ model = m, out = o.out, saved = saved, threads = o.threads }, path, targets)
    result.tensors, result.bytes = result.tensors + n, result.bytes + bytes
    if o.say then o.say("%s: %d tensors merged", base_name(path), n) end
  end
  if result.tensors ~= #saved.list then
    bs.fail("error", "%s: %d linears of the adapter, but %d were found in the model's files", o.adapter, #saved.list,
      result.tensors)
  end
  remove_stale(m, o.out)
  result.left = copy_files(m, o.out)
  result.seconds = bs.now() - start
  return result
end

return merge
