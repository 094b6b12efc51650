-- SPDX-License-Identifier: Apache-2.0
--- The device that specs run their jobs on: cpu, or on a machine with a GPU what BS_TEST_DEVICE and
-- BS_TEST_DTYPE say. One that finds races is `check`.
local bs = require "bs"

local target = { device = os.getenv "BS_TEST_DEVICE" or "cpu", dtype = os.getenv "BS_TEST_DTYPE" or "f32" }
target.check = target.device:match "^check:" and target.device or "check:" .. target.device

--- Settings of a job with the device where there is none in them.
function target.settings(s)
  s.device, s.dtype = s.device or target.device, s.dtype or target.dtype
  return s
end

--- Bytes of a pool that the device's kernels need for themselves; budgets of a test come on top.
function target.workspace()
  local device <close> = bs.device.open(target.device)
  return device:props().workspace_bytes
end

return target
