-- SPDX-License-Identifier: Apache-2.0
-- Module "bs": the C part, and `fail`, with which Lua code ends a run with an exit status. Everything
-- else written in Lua is a module of its own under "bs.", loaded by whoever needs it.
local bs = require "bs.core"

bs.fail = require("bs.settings.exit").fail

return bs
