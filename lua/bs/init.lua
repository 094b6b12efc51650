-- SPDX-License-Identifier: Apache-2.0
-- Module "bs": the C part. Everything written in Lua is a module of its own under "bs.", loaded by
-- whoever needs it.
return require "bs.core"
