-- SPDX-License-Identifier: Apache-2.0
--- Merges an adapter into a checkpoint: W += scale B A for its linears, in f32 and rounded once to the
-- stored dtype; every other tensor is copied as it is, and so are the files that go with it (bs.model.side_files).
-- Tensor by tensor: memory holds one weight with its A and B. The merged model is written beside its place and put
-- there when it is complete: until then out= is what it was.
local bs = require "bs"
local adapter = require "bs.model.adapter"
local checkpoint = require "bs.model.checkpoint"
local model = require "bs.model.model"
local put_folder = require "bs.model.put_folder"
local side_files = require "bs.model.side_files"
local write_model = require "bs.model.write_model"

local merge = {}

local function base_name(path) return path:match("[^/]+$") end

-- ---- where it goes ---------------------------------------------------------------------------------------

-- Is the folder `outer` the folder `inner`, or around it? Of an absent one its nearest parent counts.
local function is_inside(inner, outer)
  local at = inner
  while not bs.same_file(at, at) do at = at:match("^(.*[^/])/+[^/]+/*$") or at:match("^(/)") or "." end
  while not bs.same_file(at, outer) do
    local above = at .. "/.."
    if not bs.same_file(above, above) or bs.same_file(at, above) then return false end -- a file; the root
    at = above
  end
  return true
end

-- Where nothing may be written: in what is read, and around it.
local function check_place(out, dirs)
  for what, dir in pairs(dirs) do
    if bs.same_file(dir, out) then
      bs.fail("usage", "out=%s is the folder of the %s, which must stay as it is; give a folder of its own", out, what)
    elseif is_inside(out, dir) then
      bs.fail("usage", "out=%s is inside the folder of the %s, %s; give a folder of its own", out, what, dir)
    elseif is_inside(dir, out) then
      bs.fail("usage", "out=%s is around the folder of the %s, %s; give a folder of its own", out, what, dir)
    end
  end
end

-- The output folder may be absent or empty, or hold files where they may be replaced.
local function check_out(out, overwrite)
  bs.check_folder(out)
  write_model.recover(out)
  local there = bs.list_folder(out) or {}
  if #there > 0 and not overwrite then
    bs.fail("usage", "out=%s exists and holds %d entries ('%s'); an empty or absent folder, or overwrite=true, is "
      .. "expected", out, #there, there[1])
  elseif bs.is_file(out .. "/adapter_config.json") then
    bs.fail("usage", "out=%s holds an adapter (adapter_config.json), which programs would apply to the merged model "
      .. "once more; give another folder", out)
  end
end

-- ---- what is written -------------------------------------------------------------------------------------

-- Why a merged weight is not finite; raises.
local function refuse(o, file, t, a)
  local w, first, second = file:read(t.name), o.saved:read(a.full)
  local why = ("values pass the largest of %s"):format(t.dtype)
  if not w:is_finite() then
    why = "the model's own weight holds NaN or infinity"
  elseif not first:is_finite() or not second:is_finite() then
    why = ("the adapter's lora_%s of it holds NaN or infinity"):format(first:is_finite() and "B" or "A")
  end
  bs.fail("nonfinite", "tensor '%s' cannot be merged: %s; nothing was written", t.name, why)
end

-- One shard, the targets that the model has there merged. Returns their number and the file's bytes.
local function write_shard(o, path, targets)
  local file <close> = assert(bs.safetensors.open(path))
  local list, n = file:tensors(), 0
  local out <close> = bs.safetensors.writer(o.written .. "/" .. base_name(path), list, file:metadata())
  for _, t in ipairs(list) do
    local a = targets[t.name]
    if a and o.model.checkpoint.tensors[t.name].path == path then
      local w, first, second = file:read(t.name), o.saved:read(a.full)
      bs.array.merge(w, first, second, a.scale, o.threads)
      if not w:is_finite() then refuse(o, file, t, a) end
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

-- What was written opens as the model's checkpoint does.
local function check_written(m, written)
  local again = checkpoint.open(written)
  for name, t in pairs(m.checkpoint.tensors) do
    local other = again.tensors[name]
    if not other or other.dtype ~= t.dtype or other.bytes ~= t.bytes then
      bs.fail("selftest", "the merged model lacks tensor '%s' as the model has it; nothing was put in place", name)
    end
  end
end

-- All files of the merged model into a folder; counts go to the result.
local function fill(o, files, result)
  local m, targets = o.model, {}
  for _, a in ipairs(o.saved.list) do targets[a.full .. ".weight"] = a end
  for _, path in ipairs(m.checkpoint.files) do
    local n, bytes = write_shard(o, path, targets)
    result.tensors, result.bytes = result.tensors + n, result.bytes + bytes
    if o.say then o.say("%s: %d tensors merged", base_name(path), n) end
  end
  if result.tensors ~= #o.saved.list then
    bs.fail("error", "%s: %d linears of the adapter, but %d were found in the model's files", o.adapter, #o.saved.list,
      result.tensors)
  end
  for name, from in pairs(files) do bs.copy_file(from, o.written .. "/" .. name) end
  check_written(m, o.written)
end

--- Merge. o: {model, family, adapter, out, overwrite, ignore, threads, say}; family, ignore: see model.open. Returns
-- {tensors, bytes, seconds, left}; left: names of the model's folder that were not copied.
function merge.run(o)
  local m = model.open(o.model, { family = o.family, ignore = o.ignore, check = "full" })
  local saved <close> = adapter.open(m, o.adapter)
  local start, result = bs.now(), { tensors = 0, bytes = 0 }
  check_place(o.out, { model = m.checkpoint.dir, adapter = o.adapter })
  check_out(o.out, o.overwrite)
  local files
  files, result.left = side_files.of(m.checkpoint.dir)
  put_folder(o.out, write_model.names(side_files.names(files)), function(written)
    fill({
      model = m, saved = saved, adapter = o.adapter, written = written, threads = o.threads, say = o.say,
    }, files, result)
  end)
  result.seconds = bs.now() - start
  return result
end

return merge
