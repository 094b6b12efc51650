-- SPDX-License-Identifier: Apache-2.0
local bs = require "bs"

--- Fill a folder that is put in place as a whole (bs.folder, whose `own` this takes): fill(temp) writes its files and
-- may look at them again; what it raises leaves dir as it was, and speaks of dir.
local function put_folder(dir, own, fill)
  local folder <close> = bs.folder.begin(dir, own)
  local temp = folder:temp()
  local function of_dir(text) -- what is written is named by where it will be
    local first, last = text:find(temp, 1, true)
    return first and text:sub(1, first - 1) .. dir .. of_dir(text:sub(last + 1)) or text
  end
  local ok, err = xpcall(fill, bs.traceback, temp)
  if not ok then
    if type(err) == "string" then err = of_dir(err) elseif err.message then err.message = of_dir(err.message) end
    error(err, 0)
  end
  folder:commit()
end

return put_folder
