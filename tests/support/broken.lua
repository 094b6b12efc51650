-- SPDX-License-Identifier: Apache-2.0
--- For tests of bad input: copies of a small checkpoint with something wrong in them, the program as a
-- shell sees it, and what must hold after any refusal.
local bs = require "bs"
local job = require "bs.job"
local qwen3 = require "bs.family.qwen3"
local target = require "target"
local tiny = require "tiny"

local broken = { VOCAB = 400 } -- more than one tile of the head

function broken.read(path)
  local f <close> = assert(io.open(path, "rb"))
  return f:read("a")
end

--- In place, as an editor or a download does it: the file keeps its inode.
function broken.write(path, text)
  local f <close> = assert(io.open(path, "wb"))
  assert(f:write(text))
end

local root = tiny.folder("broken-" .. bs.pid())
local good = root .. "/good"
tiny.checkpoint(good, qwen3, tiny.qwen3_config { vocab_size = broken.VOCAB }, "bf16")
broken.root, broken.good = root, good
broken.weights = broken.read(good .. "/model.safetensors")
broken.config = bs.json.decode(broken.read(good .. "/config.json"))

--- A copy of the good checkpoint, changed by fn(folder).
function broken.checkpoint(fn)
  local dir = root .. "/case"
  os.execute(("rm -rf '%s' && cp -r '%s' '%s'"):format(dir, good, dir))
  fn(dir)
  return dir
end

function broken.with_weights(text)
  return broken.checkpoint(function(dir) broken.write(dir .. "/model.safetensors", text) end)
end

--- Keys of config.json replaced; broken.ABSENT removes one.
broken.ABSENT = {}
function broken.with_config(over)
  return broken.checkpoint(function(dir)
    local c = {}
    for key, value in pairs(broken.config) do c[key] = value end
    for key, value in pairs(over) do
      if value == broken.ABSENT then c[key] = nil else c[key] = value end
    end
    broken.write(dir .. "/config.json", bs.json.encode(c))
  end)
end

--- Header table and data of the good weights, and a file made of such.
function broken.parts()
  local n = string.unpack("<i8", broken.weights)
  return bs.json.decode(broken.weights:sub(9, 8 + n)), broken.weights:sub(9 + n)
end

function broken.file_of(header, data)
  local text = bs.json.encode(header)
  return string.pack("<i8", #text) .. text .. data
end

--- The weights with fn(header, data) applied; what fn returns replaces the data.
function broken.with_header(fn)
  local header, data = broken.parts()
  data = fn(header, data) or data
  return broken.with_weights(broken.file_of(header, data))
end

--- The weights with element `at` (0-based) of a bf16 tensor replaced by NaN.
function broken.with_nan(name, at)
  local header, data = broken.parts()
  local from = header[name].data_offsets[1] + 2 * (at or 0)
  return broken.with_weights(broken.file_of(header, data:sub(1, from) .. "\xC0\x7F" .. data:sub(from + 3)))
end

--- A copy of an adapter's folder with keys of its config replaced, or fn(folder) applied.
function broken.adapter(from, change)
  local dir = root .. "/adapter-case"
  os.execute(("rm -rf '%s' && cp -r '%s' '%s'"):format(dir, from, dir))
  if type(change) == "function" then
    change(dir)
  else
    local config = bs.json.decode(broken.read(from .. "/adapter_config.json"))
    for key, value in pairs(change) do config[key] = value end
    broken.write(dir .. "/adapter_config.json", bs.json.encode(config))
  end
  return dir
end

--- A file of tensors with fn(name -> array) applied.
function broken.change_tensors(path, fn)
  local arrays = {}
  local file <close> = assert(bs.safetensors.open(path))
  for _, t in ipairs(file:tensors()) do arrays[t.name] = file:read(t.name) end
  fn(arrays)
  bs.safetensors.write(path, arrays)
end

function broken.micro(seed) return tiny.micro(seed or 1, broken.VOCAB, { 9, 11 }, 2) end

--- Settings of a small job with `over` in them.
function broken.settings(over)
  local s = { model = good, micro_tokens = 24, home = "disk", dev_slots = 2 }
  for key, value in pairs(over or {}) do s[key] = value end
  if not s.adapter and not s.lora then s.lora = { r = 4, alpha = 8 } end
  return target.settings(s)
end

--- One step of a job; the loss.
function broken.train(over)
  local j <close> = job.new(broken.settings(over))
  return j:step({ broken.micro() }, { lr = 1e-2 }).loss
end

local function held()
  collectgarbage()
  collectgarbage()
  local sum = 0
  for _, tag in ipairs(bs.tags()) do sum = sum + bs.host_bytes(tag) end
  return sum
end

local loss, bytes = broken.train(), held()

--- The process works as before: the same job gives the same loss, and nothing is left in memory.
function broken.check_usable()
  local now = held()
  assert(now <= bytes, ("%d bytes are held, %d at the start"):format(now, bytes))
  local again = broken.train()
  assert(again == loss, ("loss %.17g, %.17g at the start"):format(again, loss))
end

local function contains(message, ...)
  for _, text in ipairs { ... } do
    assert(message:find(text, 1, true), ("'%s' is not in: %s"):format(text, message))
  end
  assert(not message:find("stack traceback", 1, true), message)
end

--- fn(...) must end with this exit status and one message without a traceback that holds the texts.
function broken.fails(code, texts, fn, ...)
  local ok, err = pcall(fn, ...)
  assert(not ok, "nothing was raised")
  assert((type(err) == "table" and err.bs_exit or 1) == code, tostring(err))
  contains(tostring(err), table.unpack(texts))
  return tostring(err)
end

--- Run the program through a shell: exit status, standard output, standard error. before: commands for
-- the shell; what they limit concerns the program alone, whose output goes through pipes. program: another one.
function broken.run(words, before, program)
  local out, err, status = root .. "/out.txt", root .. "/err.txt", root .. "/status.txt"
  local line = { "exec '" .. (program or os.getenv("BSLUA") or "build/release/bslua") .. "'" }
  for _, w in ipairs(words) do line[#line + 1] = "'" .. w .. "'" end
  os.execute(("{ { { ( %s %s ) </dev/null; echo $? >&4; } | cat >'%s'; } 2>&1 | cat >'%s'; } 4>'%s'"):format(
    before or "", table.concat(line, " "), out, err, status))
  return tonumber(broken.read(status)), broken.read(out), broken.read(err)
end

--- The program must end with this status and one line on standard error that holds the texts.
function broken.run_fails(code, texts, words, before)
  local got, out, err = broken.run(words, before)
  assert(got == code, ("exit status %d, %d is expected: %s"):format(got, code, err))
  contains(err, table.unpack(texts))
  assert(select(2, err:gsub("\n", "")) == 1, "one line is expected: " .. err)
  return out, err
end

return broken
