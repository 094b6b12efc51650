-- SPDX-License-Identifier: Apache-2.0
--- `bslua --doctor [key=value ...]`: what this machine has and how fast its parts are, each measured alone, and for
-- all that is missing what it costs and what to do about it. Uses nothing that must be there but the CPU device.
local bs = require "bs"
local args = require "bs.settings.args"
local files = require "bs.settings.files"
local measure = require "bs.plan.measure"

local doctor = {}

local MIB <const>, FILE <const> = 1 << 20, 64 << 20

doctor.settings = {
  dir = { ".", "folder whose disk is read; its *.safetensors, else files that are made and removed" },
  size = { 256 * MIB, "bytes that are read at most", MIB, 64 << 30 },
  json = { "", "file for all of it" },
}

local function gib(n) return ("%.1f GiB"):format(n / 2 ^ 30) end
local function gb(n) return ("%.2f GB/s"):format(n / 1e9) end
local function flops(n) return n >= 1e12 and ("%.1f TFLOP/s"):format(n / 1e12) or ("%.1f GFLOP/s"):format(n / 1e9) end
local function first_line(text) return (tostring(text):match "^[^\n]*") end

local function slurp(path)
  local f <close> = io.open(path)
  return f and f:read "a" or ""
end

-- What is missing, what that costs, what to do. It may name paths, which are bytes where JSON is text.
local function note(report, what, costs, todo)
  report.notes[#report.notes + 1] = { what = bs.printable(what), costs = costs, todo = todo }
end

-- A rate that cannot be had is told, and the rest goes on.
local function try(report, what, fn, ...)
  local ok, value, more = pcall(fn, ...)
  if ok then return value, more end
  note(report, what .. " was not measured: " .. first_line(value), "this report lacks it", "see the reason given")
end

-- ---- machine and build -------------------------------------------------------------------------------

local function machine()
  local cpu, info = slurp "/proc/cpuinfo", slurp "/proc/meminfo"
  local _, cores = cpu:gsub("processor%s*:", "")
  local locked = slurp "/proc/self/limits":match "Max locked memory%s+(%w+)"
  return {
    cpu = cpu:match "model name%s*:%s*([^\n]+)" or "unknown", cores = math.max(cores, 1),
    kernel = slurp "/proc/sys/kernel/osrelease":match "%S+" or "unknown",
    memory_bytes = (tonumber(info:match "MemTotal:%s*(%d+)") or 0) * 1024, memory_available = bs.memory_available(),
    locked_bytes = math.tointeger(tonumber(locked)), locked_unlimited = locked == "unlimited",
  }
end

-- {name = value} of the lines of bs.build().
local function build()
  local out = {}
  for name, value in bs.build():gmatch "([^:\n]+): ([^\n]+)" do out[name] = value end
  return out
end

local function check_build(report)
  local have = report.features
  if not have.io_uring then
    note(report, "io_uring is not in this build", "reads go through threads: more work for the CPU, and less from fast "
      .. "drives", "install liburing (liburing-dev) and build again")
  end
  if not have.openblas then
    note(report, "OpenBLAS was not found", "products on the CPU are plain loops, about half as fast or worse",
      "install it (libopenblas0), which this program then finds; a build with BS_BLAS=OFF does not look for it")
  end
  if not have.pcre2 then
    note(report, "PCRE2 is not in this build", "most tokenizer.json files are refused: text cannot be trained on",
      "install PCRE2 (libpcre2-dev) and build again")
  end
  if not have.utf8proc then
    note(report, "utf8proc is not in this build", "tokenizers with NFC or NFKC are refused",
      "install utf8proc (libutf8proc-dev) and build again")
  end
end

local function check_locked(report)
  local most = report.machine.locked_bytes
  if not most or most >= 64 * MIB then return end
  note(report, ("at most %d KiB of memory may be locked"):format(most // 1024), "without the right to lock more, "
    .. "buffers of reads are not registered with io_uring, and a GPU's driver may refuse to pin: slower copies",
    "raise it: ulimit -l unlimited, or LimitMEMLOCK= or --ulimit memlock= of what starts the program")
end

-- ---- disk --------------------------------------------------------------------------------------------

-- Files of random bytes, on the disk when this returns.
local function make_files(dir, size)
  local words, paths = {}, {}
  for i = 1, MIB // 8 do words[i] = string.pack("<i8", math.random(0)) end
  local text = table.concat(words):rep(math.min(size, FILE) // MIB)
  local made = setmetatable({ paths = paths }, { __close = function()
    for _, path in ipairs(paths) do os.remove(path) end
  end })
  for i = 1, math.max(1, size // FILE) do
    local path = ("%s/.bslua-doctor-%d-%d"):format(dir, bs.pid(), i)
    paths[i] = path
    local ok, err = pcall(bs.write_file, path, text)
    if not ok then
      getmetatable(made).__close()
      error(err, 0)
    end
  end
  return made
end

local function checkpoint_files(dir)
  local paths = {}
  for _, name in ipairs(bs.list_folder(dir)) do
    if name:match "%.safetensors$" then paths[#paths + 1] = dir .. "/" .. name end
  end
  return paths
end

-- Blocks of 16 MiB over the files, `size` bytes at most.
local function manifest_of(paths, size)
  local m, blocks, sum = bs.manifest.new(), {}, 0
  for _, path in ipairs(paths) do
    local f <close> = files.open(path)
    local length, offset = files.seek(f, path, "end", 0) // 2 * 2, 0
    local file = m:file(path)
    while offset < length and sum < size do
      local n = math.min(16 * MIB, length - offset, (size - sum + 1) // 2 * 2)
      blocks[#blocks + 1] = m:block("part." .. #blocks, "layer")
      m:tensor(blocks[#blocks], "bytes", "bf16", { n // 2 }, file, offset)
      offset, sum = offset + n, sum + n
    end
  end
  m:finish()
  return m, blocks
end

local function read_rate(dir, size)
  local paths = checkpoint_files(dir)
  local made <close> = #paths == 0 and make_files(dir, size) or nil
  local device <close> = bs.device.open("cpu", { threads = 1 })
  local m <close>, blocks = manifest_of(made and made.paths or paths, size)
  local rate, how, bytes = measure.reads(device, m, blocks, {})
  return { rate = rate, io = how, bytes = bytes, dir = bs.printable(dir), made = made ~= nil }
end

local function disk(report, cfg)
  local r = try(report, "the disk of " .. cfg.dir, read_rate, cfg.dir, cfg.size)
  report.rates.disk = r
  if not r then return end
  if not r.io:match "direct" then
    note(report, ("'%s' cannot be read past the page cache"):format(r.dir), "every read also takes memory and a copy "
      .. "by the CPU; the rate above may be the memory's", "keep checkpoints on a local ext4, xfs or btrfs")
  end
  if not r.io:match "^uring" and report.features.io_uring then
    note(report, "the system refuses io_uring", "reads go through threads: more work for the CPU, and less from fast "
      .. "drives", "allow it: sysctl kernel.io_uring_disabled=0; in containers, a seccomp profile with it")
  end
end

-- ---- devices -----------------------------------------------------------------------------------------

local function cpu()
  local device <close> = bs.device.open("cpu", {})
  return measure.product(device, "f32", 1024, 1024, 1024, 4)
end

local function compiled_for(g)
  local major, minor = (g.capability or ""):match "^(%d+)%.(%d+)$"
  local best
  for a in (g.compiled or ""):gmatch "sm_(%d+)" do
    local n = tonumber(a)
    if n // 10 == tonumber(major) and n % 10 <= tonumber(minor) then best = "sm_" .. a end
  end
  return best or "PTX, translated at the first start"
end

local function gpu_rates(report, device)
  local r = {}
  r.copies_in = try(report, "copies to the GPU", measure.copies, device, 256 * MIB, 8)
  r.copies_out = try(report, "copies from the GPU", measure.copies, device, 256 * MIB, 8, true)
  r.product_bf16 = try(report, "bf16 products", measure.product, device, "bf16", 8192, 4096, 4096, 50)
  r.product_f32 = try(report, "f32 products", measure.product, device, "f32", 4096, 4096, 4096, 10)
  return r
end

-- A pool beside the context: what NVML sees must be both.
local function gpu_memory(report, device)
  local bytes = math.min(1 << 30, device:props().total_bytes // 4)
  local engine <close> = bs.engine.open { device = device, compute = "bf16", pool_bytes = bytes }
  engine:seal()
  local m = measure.memory(bytes)
  if m and not m.within then
    note(report, ("the GPU holds %.1f %% %s than pool and context"):format(math.abs(m.ratio - 1) * 100,
      m.ratio > 1 and "more" or "less"), "vram= is less exact than it should be",
      "look for other processes on this GPU: nvidia-smi")
  end
  return m
end

local function gpu(report)
  local ok, device = pcall(bs.device.open, "cuda", {})
  local g = bs.gpu.status()
  report.gpu = g
  g.usable = ok
  if not ok then
    g.problem = first_line(device):gsub("^bs%.device%.open: %w+: ", ""):gsub(" %[%w+%]$", "")
    note(report, "no GPU is used: " .. g.problem, "training runs on the CPU, in f32, slowly", g.built
      and "see the reason given" or "build with the CUDA toolkit: cmake --preset cuda")
    return
  end
  local _ <close> = device
  report.rates.gpu = gpu_rates(report, device)
  g.memory = try(report, "the GPU's memory", gpu_memory, report, device)
  for key, value in pairs(bs.gpu.status()) do g[key] = value end -- with the clocks of just now
  g.code = compiled_for(g)
  if not g.nvml then
    note(report, "libnvidia-ml.so.1 was not found", "power, clocks and what others use of the GPU are not shown",
      "in a container: give it the driver's utilities (NVIDIA_DRIVER_CAPABILITIES=compute,utility)")
  elseif (g.pcie_width or 16) < 16 then
    note(report, ("the GPU's link has %d lanes"):format(g.pcie_width), "streamed blocks arrive at a part of the "
      .. "possible rate", "put the card in a slot with 16 lanes, if the board has one")
  end
end

-- ---- the report ----------------------------------------------------------------------------------------

local function gpu_lines(report, line)
  local g, r = report.gpu, report.rates.gpu
  if not g.usable then
    line("gpu", "none: %s", g.problem)
    if g.built then line("", "cuBLAS: %s", g.blas or "not found") end
    return
  end
  line("gpu", "%s, compute capability %s, code for %s (compiled: %s)", g.name, g.capability, g.code, g.compiled)
  line("driver", "%s, CUDA %s; runtime %s; cuBLAS %s", g.driver or "?", g.cuda_driver, g.cuda_runtime, g.blas or "?")
  if g.nvml then
    line("", "%s of %s in use, %d processes; %.0f of %.0f W, %d of %d MHz; PCIe %s x%s", gib(g.used_bytes or 0),
      gib(g.total_bytes or 0), g.processes or 0, g.power_w or 0, g.power_limit_w or 0, g.sm_mhz or 0,
      g.sm_most_mhz or 0, g.pcie_generation or "?", g.pcie_width or "?")
  end
  if g.memory then
    line("", "pool %s + context %s = %.3f x what NVML sees of it (by %s)", gib(g.memory.pool), gib(g.memory.context),
      1 / g.memory.ratio, g.memory.by)
  end
  line("link", "%s in, %s out (pinned)", gb(r.copies_in or 0), gb(r.copies_out or 0))
  line("products", "%s bf16, %s f32", flops(r.product_bf16 or 0), flops(r.product_f32 or 0))
end

local function print_report(report)
  local m, d = report.machine, report.rates.disk
  local function line(name, fmt, ...) bs.say("  %-9s %s", name, fmt:format(...)) end
  bs.say("bslua %s (%s)", report.version, report.lua)
  line("cpu", "%s, %d cores; products %s f32", m.cpu, m.cores, flops(report.rates.cpu or 0))
  line("memory", "%s, %s free; page-lock limit %s", gib(m.memory_bytes), gib(m.memory_available),
    m.locked_unlimited and "none" or ("%d KiB"):format((m.locked_bytes or 0) // 1024))
  line("kernel", "%s", m.kernel)
  if d then
    line("disk", "%s: %s (%s, %d MB of %s)", d.dir, gb(d.rate), d.io, d.bytes // 1000000,
      d.made and "files made for it" or "its safetensors")
  end
  gpu_lines(report, line)
  for _, name in ipairs { "io_uring", "gemm", "cuda", "tokenizer patterns", "unicode normalisation" } do
    line("built", "%s: %s", name, report.build[name] or "unknown")
  end
  for _, n in ipairs(report.notes) do
    bs.say("- %s", n.what)
    bs.say("    costs: %s", n.costs)
    bs.say("    to do: %s", n.todo)
  end
  if #report.notes == 0 then bs.say("Nothing is missing.") end
end

--- Run it on a list of words.
function doctor.main(words)
  local cfg = args.parse(words, doctor.settings, "bslua --doctor key=value ...")
  if not bs.list_folder(cfg.dir) then bs.fail("usage", "dir=%s: not a folder that can be read", cfg.dir) end
  local report = {
    version = bs.version, lua = _VERSION, machine = machine(), build = build(),
    features = bs.features(), rates = {}, notes = {}, ok = true,
  }
  bs.log_to(function(text) note(report, text, "see the line itself", "see the line itself") end)
  check_build(report)
  check_locked(report)
  report.rates.cpu = try(report, "the CPU", cpu)
  report.ok = report.rates.cpu ~= nil
  disk(report, cfg)
  gpu(report)
  bs.log_to(nil)
  print_report(report)
  if cfg.json ~= "" then bs.write_file(cfg.json, bs.json.encode(report) .. "\n") end
  if not report.ok then bs.fail("error", "the CPU device does not work: bslua cannot be used here") end
end

return doctor
