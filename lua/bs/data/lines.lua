-- SPDX-License-Identifier: Apache-2.0
--- Lines of a file, in memory that the longest line wanted bounds: one that is longer is passed over in pieces. A
-- regular file only, which stays open: lines are read again by their offsets.
local bs = require "bs"
local files = require "bs.settings.files"

local lines = {}
local methods = {}
local mt = { __index = methods, __name = "bs.lines" }

local LEAST <const>, MOST <const> = 4 << 10, 256 << 10 -- bytes of a piece, which grows along a line

--- Open a file: a reader, or nil and a message.
function lines.open(path)
  local file, message = bs.open_file(path)
  if not file then return nil, files.reason(message) end
  return setmetatable({ path = path, file = file, at = 0, buffer = "", from = 1 }, mt)
end

-- Some bytes in self.buffer from self.from on; false at the end.
local function fill(self, piece)
  if self.from <= #self.buffer then return true end
  local text, message = self.file:read(piece)
  if message then bs.fail("error", "%s: %s", self.path, message) end
  self.buffer, self.from = text or "", 1
  return text ~= nil
end

--- The next line, with its end: its text, or nil where it has more than `most` bytes; then its offset and its bytes.
-- Nothing at the end of the file. piece: bytes to read at once.
function methods:next(most, piece)
  local parts, size, start = {}, 0, self.at
  local stop
  while not stop and fill(self, piece or MOST) do
    stop = self.buffer:find("\n", self.from, true)
    local last = stop or #self.buffer
    size = size + last - self.from + 1
    if size <= most then
      parts[#parts + 1] = self.buffer:sub(self.from, last)
    else
      parts = {}
    end
    self.from = last + 1
    piece = piece and math.min(2 * piece, MOST)
  end
  if size == 0 then return end
  self.at = start + size
  return size <= most and (#parts == 1 and parts[1] or table.concat(parts)) or nil, start, size
end

--- The line at an offset, as next gives it; lines after it are next.
function methods:line_at(offset, most)
  files.seek(self.file, self.path, "set", offset)
  self.at, self.buffer, self.from = offset, "", 1
  return self:next(most, LEAST)
end

function methods:close() self.file:close() end

return lines
