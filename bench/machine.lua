-- SPDX-License-Identifier: Apache-2.0
--- What a result was measured on, and the rates of its parts, each measured alone.
local bs = require "bs"
local measure = require "bs.plan.measure"

local M = {}

local function first_line(command)
  local p = io.popen(command .. " 2>/dev/null")
  local line = p and p:read("l")
  if p then p:close() end
  return line
end

local function cpu_name()
  local f <close> = io.open("/proc/cpuinfo")
  local text = f and f:read("a") or ""
  return text:match("model name%s*:%s*([^\n]+)") or "unknown"
end

--- Names of the machine's parts, the date, the build and the command.
function M.describe()
  local words = { [0] = arg[0], table.unpack(arg) }
  local g = bs.gpu.status()
  return {
    gpu = g.name and g.name .. (g.driver and ", " .. g.driver or ""), cpu = cpu_name(),
    cores = tonumber(first_line("nproc")), kernel = first_line("uname -sr"),
    memory_available = bs.memory_available(), date = os.date("!%Y-%m-%dT%H:%M:%SZ"),
    version = bs.version, build = bs.build(), command = "bslua " .. table.concat(words, " ", 0),
  }
end

-- A rate that cannot be had is told and left out; the rest of the bench goes on.
local function try(say, name, fn)
  local ok, value = pcall(fn)
  if ok then return value end
  say("%s: not measured: %s", name, (tostring(value):match("^[^\n]*")))
end

--- {h2d, d2h (bytes/s), gemm (FLOP/s), gemm_dtype} of a device.
function M.device_rates(spec, dtype, say)
  local device <close> = bs.device.open(spec, {})
  local gpu = measure.is_gpu(device)
  local bytes, n = gpu and 1 << 30 or 16 << 20, gpu and 8 or 4
  local m, k, times = 8192, 4096, 20
  if not gpu then m, k, times = 256, 256, 4 end
  local t = device:props().bf16 and dtype ~= "f32" and "bf16" or "f32"
  local r = { piece = bytes, gemm_dtype = t, gemm_dims = { m, k, k } }
  r.h2d = try(say, "copies in", function() return measure.copies(device, bytes, n) end)
  r.d2h = try(say, "copies out", function() return measure.copies(device, bytes, n, true) end)
  r.gemm = try(say, "products", function() return measure.product(device, t, m, k, k, times) end)
  say("rates: copies in %.2f GB/s, out %.2f GB/s (pieces of %d MiB); product %dx%dx%d %s %.1f TFLOP/s",
    (r.h2d or 0) / 1e9, (r.d2h or 0) / 1e9, bytes >> 20, m, k, k, t, (r.gemm or 0) / 1e12)
  return r
end

--- Bytes/s of reading the layers' blocks of a model, as many as `most` bytes, by the streamer's reader.
function M.disk_rate(spec, m, io_options, most, say)
  local device <close> = bs.device.open(spec, {})
  local blocks = measure.some_layers(m, most)
  local r = try(say, "reads", function() return bs.rates.read(device, m.manifest, blocks, io_options) end)
  if not r then return nil end
  say("rates: reads %.2f GB/s (%s, %d blocks, %.2f GB)", r.bytes / r.seconds / 1e9, r.io, #blocks, r.bytes / 1e9)
  return r.bytes / r.seconds, r.io
end

return M
