-- SPDX-License-Identifier: Apache-2.0
--- For objects that are made in steps: `local _ <close> = guard(object)` closes the object when the block is left by an
-- error, and only then.
return function(object)
  return setmetatable({}, { __close = function(_, err)
    if err ~= nil then object:close() end
  end })
end
