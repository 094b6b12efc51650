-- SPDX-License-Identifier: Apache-2.0
--- Files that are named from outside: regular ones only; those that are read whole, up to a size. What cannot be read,
-- or is not what it should be, ends the script with one line that names the file.
local core = require "bs.core"
local exit = require "bs.settings.exit"

local files = {}

-- Larger settings files do not exist; the index of a checkpoint with a million tensors stays below.
local JSON_MOST <const> = 256 << 20

--- What bs.read_file or bs.open_file says, as a user reads it.
function files.reason(message) return (message:gsub("^bs%.[%w_]+: %w+: ", ""):gsub(" %[%w+%]$", "")) end

--- A regular file, opened for reading: one of Lua's io library.
function files.open(path)
  local file, message = core.open_file(path)
  if not file then exit.fail("error", "%s", files.reason(message)) end
  return file
end

--- file:seek of an open file; returns the place. path names it in the message.
function files.seek(file, path, whence, offset)
  local at, message = file:seek(whence, offset)
  if not at then exit.fail("error", "%s: %s", path, message) end
  return at
end

--- End the script unless a file can be read, before work that takes long. where: whose setting it is, "data=".
function files.check(where, path)
  local file, message = core.open_file(path)
  if not file then exit.fail("error", "%s%s: %s", where, path, files.reason(message)) end
  file:close()
end

--- A file as text. most: bytes that it may have; nil: any number.
function files.read(path, most)
  local text, message = core.read_file(path, most)
  if not text then exit.fail("error", "%s", files.reason(message)) end
  return text
end

--- The table that a file of JSON holds, and its text. most: bytes that it may have; nil: 256 MiB.
function files.json(path, most)
  local text = files.read(path, most or JSON_MOST)
  local ok, value = pcall(core.json.decode, text)
  if not ok then exit.fail("error", "%s is not JSON: %s", path, tostring(value)) end
  if type(value) ~= "table" then exit.fail("error", "%s: a JSON object is expected", path) end
  return value, text
end

return files
