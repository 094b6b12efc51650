-- SPDX-License-Identifier: Apache-2.0
--- Files of the tree, for the specs that check how it is written.
local sources = {}

--- Lines that a shell command prints.
function sources.lines_of(command)
  local pipe, lines = assert(io.popen(command)), {}
  for line in pipe:lines() do lines[#lines + 1] = line end
  pipe:close()
  return lines
end

--- The whole text of a file.
function sources.read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read "a"
end

--- Paths under the folders (one text, spaces between) whose names end in one of the extensions, sorted.
function sources.find(folders, extensions)
  local names = {}
  for extension in extensions:gmatch "%S+" do names[#names + 1] = "-name '*." .. extension .. "'" end
  return sources.lines_of(("find %s -type f \\( %s \\) | LC_ALL=C sort"):format(folders, table.concat(names, " -o ")))
end

--- Whether a program is on the path.
function sources.has(program)
  return (os.execute("command -v " .. program .. " >/dev/null 2>&1")) == true
end

return sources
