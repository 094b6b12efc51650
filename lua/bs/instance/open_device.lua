-- SPDX-License-Identifier: Apache-2.0
local bs = require "bs"

-- Exit status where a device cannot be had: a name that is none, too little memory; the machine's reasons are errors.
local exits <const> = { arg = "usage", devmem = "plan" }

--- Open the device of a job's settings: device, threads, device_options, dtype, dry (may it be meta, which computes
-- nothing?). Returns it and what it is to compute in: "f32", "bf16", or "auto", which the checkpoint decides where
-- the device can do both.
return function(cfg)
  if cfg.device:match("meta$") and not cfg.dry then
    bs.fail("usage", "device=%s computes nothing; it is for dry runs", cfg.device)
  end
  local options = { threads = cfg.threads }
  for key, value in pairs(cfg.device_options or {}) do options[key] = value end
  local ok, device = pcall(bs.device.open, cfg.device, options)
  if not ok then
    local code = bs.code(device)
    bs.fail(code and (exits[code] or "error") or "usage", "device=%s: %s", cfg.device,
      (device:gsub("^bs%.device%.open: %w+: ", "")))
  end
  if device:props().bf16 then return device, cfg.dtype end
  if cfg.dtype == "bf16" then
    device:close()
    bs.fail("usage", "dtype=bf16: device %s computes in f32", cfg.device)
  end
  return device, "f32"
end
