-- SPDX-License-Identifier: Apache-2.0
--- Which tensor the head is. A tied head is the embedding: one that is stored as well must be equal to it, or what was
-- trained would be dropped. A head that is not tied must be stored.
local bs = require "bs"
local files = require "bs.settings.files"
local checkpoint = require "bs.model.checkpoint"
local unread = require "bs.model.unread"

local head = {}

local SAMPLES <const> = 64 -- rows that are compared where not all are
local CHUNK <const> = 4 << 20 -- bytes that are compared at once

--- The name of the tensor that is the head.
function head.name_of(self)
  local c, fam = self.config, self.family
  if c.tied then return fam.embed.name end
  if self.checkpoint.tensors[fam.head.weight] then return fam.head.weight end
  -- A family that says nothing of tied heads leaves it to the file.
  if c.tied == nil and self.checkpoint.config.tie_word_embeddings ~= false then return fam.embed.name end
  local said = self.checkpoint.config.tie_word_embeddings == false and "false" or "absent: false for this family"
  bs.fail("error", "%s: the head '%s' is missing, and 'tie_word_embeddings' of config.json (%s) does not tie it to the "
    .. "embedding: the checkpoint is not whole, or the key is wrong", self.dir, fam.head.weight, said)
end

-- Rows first.. (from 0) of a stored table, n of them: bytes as they are stored, and the same as f32.
local function rows_of(file, t, first, n, as_f32)
  local row = t.bytes // t.dims[1]
  assert(file:seek("set", t.offset + first * row))
  local bytes = file:read(n * row)
  if not bytes or #bytes < n * row then bs.fail("error", "%s: tensor '%s' cannot be read", t.path, t.name) end
  if not as_f32 then return bytes end
  local stored <close> = bs.array.new(t.dtype, { n, t.dims[2] }, bytes)
  local wide <close> = stored:cast("f32")
  return wide:bytes()
end

-- A row in which both differ, or nil: the first one where all are compared. Bits are compared where the dtypes are the
-- same.
local function differing(embed, own, full)
  local a <close> = files.open(embed.path)
  local b <close> = files.open(own.path)
  local n, as_f32 = own.dims[1], embed.dtype ~= own.dtype
  local function same(first, k)
    return rows_of(a, embed, first, k, as_f32) == rows_of(b, own, first, k, as_f32)
  end
  if not full then
    for i = 0, SAMPLES - 1 do
      local row = i * (n - 1) // (SAMPLES - 1)
      if not same(row, 1) then return row end
    end
    return nil
  end
  local run = math.max(1, CHUNK // (own.bytes // n))
  for first = 0, n - 1, run do
    local k = math.min(run, n - first)
    if not same(first, k) then
      for row = first, first + k - 1 do
        if not same(row, 1) then return row end
      end
    end
  end
end

--- Check a head that is stored beside the embedding it is tied to. full: all rows, not a sample. patterns: of
-- unread.patterns; one that names the head leaves it out unchecked.
function head.check_tied(self, full, patterns)
  local fam = self.family
  local ckpt, name = self.checkpoint, fam.head.weight
  local own, embed = ckpt.tensors[name] or ckpt.unlisted[name], ckpt.tensors[fam.embed.name]
  if not self.tied or not own or own == embed or unread.ignored(patterns, name) then return end
  checkpoint.check_tensor(ckpt, own, embed.dims)
  local row = differing(embed, own, full)
  if row then
    bs.fail("error", "%s: 'tie_word_embeddings' of config.json makes '%s' the head, but one is stored: row %d of '%s' "
      .. "differs. With \"tie_word_embeddings\": false that one is used; ignore=%s drops it", self.dir, embed.name,
      row, own.name, own.name)
  end
  self.read[name] = true
end

return head
