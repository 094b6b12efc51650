-- SPDX-License-Identifier: Apache-2.0
-- Rates of bs.tokenizer, and beside them those of the Python package `tokenizers` on the same texts
-- when python3 (or $PYTHON) has it; the ids of both are compared.
--   bslua bench/tokenizer.lua [--text FILE] FOLDER...
-- Without FOLDER: the published tokenizers under $BS_SHARED (../shared). FILE is the English text;
-- without it the words of this project's LICENSE in random order.
local bs = require "bs"
local tokenizer = require "bs.tokenizer"

local shared = os.getenv "BS_SHARED" or "../shared"
local tmp = os.tmpname()
os.remove(tmp)

local function read(path)
  local f = assert(io.open(path, "rb"))
  local s = f:read "a"
  f:close()
  return s
end

local function published()
  local folders = {}
  for _, name in ipairs {"qwen3", "gptoss", "llama3_0", "deepseek_v3", "gemma3", "mistral_v0_1"} do
    local from = ("%s/tokenizers/%s/tokenizer.json.xz"):format(shared, name)
    local to = tmp .. "/" .. name
    if io.open(from) then
      bs.mkdir(to)
      assert(os.execute(("xz -dc '%s' > '%s/tokenizer.json'"):format(from, to)))
      folders[#folders + 1] = to
    end
  end
  return folders
end

local function arguments()
  local folders, text, i = {}, nil, 1
  while arg and arg[i] do
    if arg[i] == "--text" then
      text, i = arg[i + 1], i + 2
    else
      folders[#folders + 1], i = arg[i], i + 1
    end
  end
  return folders, text
end

-- Texts

local MB = 1000000

local function english(path)
  if path then return read(path) end
  local words, out, n = {}, {}, 0
  for w in read "LICENSE":gmatch "%S+" do words[#words + 1] = w end
  while n < 4 * MB do
    local w = words[math.random(#words)]
    out[#out + 1] = w
    n = n + #w + 1
    if n % 97 == 0 then out[#out] = w .. "\n" end
  end
  return table.concat(out, " ")
end

-- Words of random letters: no word comes twice, so nothing that remembers words helps.
local function mixed()
  local scripts = {
    {0x61, 0x7A}, {0x430, 0x44F}, {0x3B1, 0x3C9}, {0x5D0, 0x5EA}, {0x627, 0x64A}, {0x905, 0x939},
    {0xE01, 0xE2E}, {0x3041, 0x3096}, {0x4E00, 0x9FA5}, {0xAC00, 0xD7A3}, {0x1F600, 0x1F64F},
    {0x30, 0x39}, {0x21, 0x2F}, {0xE0, 0x17F},
  }
  local out, n = {}, 0
  while n < 2 * MB do
    local s, word = scripts[math.random(#scripts)], {}
    for i = 1, math.random(1, 8) do word[i] = utf8.char(math.random(s[1], s[2])) end
    if math.random(8) == 1 then word[#word + 1] = "e\u{301}\u{323}" end
    word[#word + 1] = math.random(12) == 1 and "\n" or " "
    out[#out + 1] = table.concat(word)
    n = n + #out[#out]
  end
  return table.concat(out)
end

local function one_word()
  local out = {}
  for i = 1, MB do out[i] = string.char(math.random(97, 122)) end
  return table.concat(out)
end

-- Ours

-- A number that depends on every id and on its place.
local function digest(lines)
  local h = 0
  for i = 1, #lines do
    for _, id in ipairs(lines:get(i)) do h = (h * 31 + id + 1) & 0xFFFFFFFF end
  end
  return h
end

local function time(f)
  collectgarbage()
  local start = bs.now()
  local result = f()
  return bs.now() - start, result
end

local function measure(folder, texts)
  local seconds, t = time(function() return assert(tokenizer.open(folder)) end)
  local row = {open = seconds}
  for _, text in ipairs(texts) do
    local one, lines = time(function() return t:encode_file(text.path, {threads = 1}) end)
    local all = time(function() return t:encode_file(text.path) end)
    row[text.name] = {one = one, all = all, ids = lines:ids(), digest = digest(lines)}
    lines:close()
  end
  t:close()
  return row
end

-- The Python package

local script = [[
import os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
start = time.monotonic()
t = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
t.no_truncation()
t.no_padding()
print("open", time.monotonic() - start, 0, 0)
for path in sys.argv[2:]:
    with open(path, encoding="utf-8", newline="") as f:
        text = f.read()
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    start = time.monotonic()
    got = t.encode_batch_fast(lines, add_special_tokens=False)
    seconds = time.monotonic() - start
    h = n = 0
    for e in got:
        for i in e.ids:
            h = (h * 31 + i + 1) & 0xFFFFFFFF
        n += len(e.ids)
    print(os.path.basename(path), seconds, n, h)
]]

local function python(folder, texts)
  local command = {os.getenv "PYTHON" or "python3", "'" .. tmp .. "/rate.py'", "'" .. folder .. "'"}
  for _, text in ipairs(texts) do command[#command + 1] = "'" .. text.path .. "'" end
  local row, pipe = {}, io.popen(table.concat(command, " ") .. " 2>/dev/null")
  for line in pipe:lines() do
    local name, seconds, ids, h = line:match "^(%S+) (%S+) (%d+) (%d+)$"
    if name then row[name] = {one = tonumber(seconds), ids = tonumber(ids), digest = tonumber(h)} end
  end
  return pipe:close() and row or nil
end

-- Report

local function report(folders, texts)
  local bad = 0
  print("tokenizer        text        MB     ids/MB   1 thread   all cores     Python   ids   [MB/s]")
  for _, folder in ipairs(folders) do
    local ours, theirs = measure(folder, texts), python(folder, texts)
    local name = folder:match "([^/]+)/*$"
    print(("%-16s open                            %6.2f s                %6s s"):format(name, ours.open,
      theirs and ("%.2f"):format(theirs.open.one) or "-"))
    for _, text in ipairs(texts) do
      local o, t = ours[text.name], theirs and theirs[text.name]
      local size = #text.text / MB
      local same = not t and "-" or (t.ids == o.ids and t.digest == o.digest) and "equal" or "DIFFER"
      if same == "DIFFER" then bad = bad + 1 end
      print(("%-16s %-9s %5.1f %10.0f %10.1f %11.1f %10s   %s"):format(name, text.name, size,
        o.ids / size, size / o.one, size / o.all, t and ("%.1f"):format(size / t.one) or "-", same))
    end
  end
  return bad
end

local function main()
  local folders, path = arguments()
  local texts = {{name = "english", text = english(path)}, {name = "mixed", text = mixed()},
                 {name = "one_word", text = one_word()}}
  for _, text in ipairs(texts) do
    text.path = tmp .. "/" .. text.name
    bs.write_file(text.path, text.text)
  end
  bs.write_file(tmp .. "/rate.py", script)
  folders = #folders > 0 and folders or published()
  if #folders == 0 then
    bs.fail("usage", "no tokenizer folder given, and none under %s/tokenizers", shared)
  end
  local bad = report(folders, texts)
  if bad > 0 then bs.fail("error", "%d texts have other ids than the Python package gives", bad) end
end

math.randomseed(1)
bs.mkdir(tmp)
local done, failure = pcall(main)
os.execute("rm -r '" .. tmp .. "'")
if not done then error(failure, 0) end
