-- SPDX-License-Identifier: Apache-2.0
--- Makes small checkpoints and rows for tests: deterministic, written in milliseconds.
local bs = require "bs"

local tiny = {}

-- Numbers in [-1, 1) from a counter: the same on every machine.
local function noise(name, n, scale)
  local out, key = {}, bs.hash(name)
  for i = 1, n do out[i] = ((bs.hash(string.pack("<i8", i), key) & 0xFFFFFF) / 0x800000 - 1.0) * scale end
  return out
end
tiny.noise = noise

--- A random array; vectors that are no biases (norm weights) are around 1.
function tiny.tensor(name, dims, dtype)
  local n = 1
  for _, d in ipairs(dims) do n = n * d end
  local v = noise(name, n, #dims == 1 and 0.1 or 1.0 / math.sqrt(dims[#dims]))
  if #dims == 1 and not name:match("bias$") then
    for i = 1, n do v[i] = v[i] + 1 end
  end
  local a = bs.array.new("f32", dims, v)
  return dtype and dtype ~= "f32" and a:cast(dtype) or a
end

--- Random values [.., columns] that MXFP4 holds: arrays of its blocks [.., columns / 32, 16] and scales
-- [.., columns / 32], and the values as f32.
function tiny.mxfp4(name, dims)
  local value, n = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 }, 1
  for _, d in ipairs(dims) do n = n * d end
  local code, exponent, values = noise(name, n, 8), noise("scales of " .. name, n // 32, 2), {}
  local blocks, scales = {}, {}
  for g = 1, n // 32 do
    local scale = 124 + math.floor(exponent[g])
    scales[g] = string.char(scale)
    for i = 1, 32 do
      local at = (g - 1) * 32 + i
      code[at] = math.floor(code[at] + 8)
      values[at] = (code[at] < 8 and 1 or -1) * value[code[at] % 8 + 1] * 2.0 ^ (scale - 127)
      if i % 2 == 0 then blocks[#blocks + 1] = string.char(code[at - 1] | code[at] << 4) end
    end
  end
  local groups = table.move(dims, 1, #dims, 1, {})
  groups[#dims] = groups[#dims] // 32
  local per_block = table.move(groups, 1, #groups, 1, {})
  per_block[#dims + 1] = 16
  return bs.array.new("u8", per_block, table.concat(blocks)), bs.array.new("u8", groups, table.concat(scales)),
    bs.array.new("f32", dims, values)
end

--- Numbers to move a tensor along, as large as its own spread: half gradient, half random.
function tiny.direction(name, dims, gradient)
  local norm, n = 0, #gradient
  for i = 1, n do norm = norm + gradient[i] ^ 2 end
  local scale = #dims == 1 and 0.1 or 1.0 / math.sqrt(dims[#dims])
  local d, along = noise("direction of " .. name, n, scale), scale * math.sqrt(n / norm)
  for i = 1, n do d[i] = d[i] + along * gradient[i] end
  return d
end

-- What a file has of the experts of layer i: tensors of each, or fused ones, of which matrices that may lie as
-- [in, out] do.
local function add_experts(family, c, i, add)
  local n = family.routing(c).experts
  for _, t in ipairs(family.expert_tensors(c, i)) do
    if t.stored then
      local turned = t.transposed and #t.dims == 2
      add(family.prefix(i) .. t.stored, turned and { n, t.dims[2], t.dims[1] } or { n, table.unpack(t.dims) })
    else
      for e = 0, n - 1 do add(family.expert_prefix(i, e) .. t.name, t.dims) end
    end
  end
end

--- Write config.json and model.safetensors for a family. dtype: how weights are stored, but for corrections of a
-- choice, which are f32 in all files.
function tiny.checkpoint(dir, family, config, dtype)
  local c, arrays = family.config(config), {}
  local function add(name, dims)
    arrays[name] = tiny.tensor(name, dims, not name:find "correction_bias" and dtype or nil)
  end
  for i = 0, c.layers - 1 do
    for _, t in ipairs(family.tensors(c, i)) do add(family.prefix(i) .. t.name, t.dims) end
    if family.stages and (not family.staged or family.staged(c, i)) then add_experts(family, c, i, add) end
  end
  add(family.embed.name, { c.vocab, c.channels })
  add(family.head.norm, { c.channels })
  if family.head.norm_bias then add(family.head.norm_bias, { c.channels }) end
  if family.head.bias then add(family.head.bias, { c.vocab }) end
  if not c.tied then add(family.head.weight, { c.vocab, c.channels }) end
  bs.mkdir(dir)
  bs.write_file(dir .. "/config.json", bs.json.encode(config))
  bs.safetensors.write(dir .. "/model.safetensors", arrays, { format = "pt" })
end

--- All tensors of a checkpoint of one file: name -> array.
function tiny.arrays(dir)
  local file <close>, arrays = assert(bs.safetensors.open(dir .. "/model.safetensors")), {}
  for _, t in ipairs(file:tensors()) do arrays[t.name] = file:read(t.name) end
  return arrays
end

--- config.json of a small Qwen3-layout model.
function tiny.qwen3_config(over)
  local c = {
    model_type = "qwen3", vocab_size = 300, hidden_size = 32, intermediate_size = 48,
    num_hidden_layers = 5, num_attention_heads = 4, num_key_value_heads = 2, head_dim = 16,
    rms_norm_eps = 1e-6, rope_theta = 10000.0, tie_word_embeddings = false, hidden_act = "silu",
  }
  for key, value in pairs(over or {}) do c[key] = value end
  return c
end

--- config.json of the two-stage test family.
function tiny.soft_gate_config(over)
  local c = {
    model_type = "soft_gate", vocab_size = 200, hidden_size = 24, num_hidden_layers = 3, expert_size = 20,
    num_experts = 5, head_dim = 8, rope_theta = 10000.0,
  }
  for key, value in pairs(over or {}) do c[key] = value end
  return c
end

--- A micro-batch with rows of the given lengths; the first `masked` labels of a row are -100.
function tiny.micro(seed, vocab, lengths, masked)
  local m, i = { row_len = {}, ids = {}, labels = {}, row_id = {} }, 0
  for r, n in ipairs(lengths) do
    m.row_len[r], m.row_id[r] = n, seed * 1000 + r
    for t = 1, n do
      i = i + 1
      m.ids[i] = bs.hash(string.pack("<i8i8", i, seed)) % vocab
      m.labels[i] = t <= (masked or 0) and -100 or m.ids[i]
    end
  end
  return m
end

-- The letter that stands for a byte in byte-level vocabularies.
local function byte_letters()
  local letter, next_free = {}, 256
  for b = 0, 255 do
    local plain = b >= 33 and b <= 126 or b >= 161 and b <= 172 or b >= 174
    letter[b] = utf8.char(plain and b or next_free)
    next_free = plain and next_free or next_free + 1
  end
  return letter
end

--- Write tokenizer.json and tokenizer_config.json: id b for byte b, then ids 256, ... for the tokens of `special`.
-- o: {special = {"<s>", ...}, bos (put before a text), eos, template, merges = {{"a", "b"}, ...} (ids after these),
-- strip = {token = "lstrip" | "rstrip"}}.
function tiny.tokenizer(dir, o)
  local letter, vocab = byte_letters(), {}
  local added, merges = bs.json.decode "[]", bs.json.decode "[]" -- lists, when empty too
  for b = 0, 255 do vocab[letter[b]] = b end
  local id_of = {}
  for i, text in ipairs(o.special or {}) do
    local strip = (o.strip or {})[text]
    id_of[text] = 255 + i
    added[i] = {
      id = 255 + i, content = text, special = true, single_word = false, normalized = false,
      lstrip = strip == "lstrip", rstrip = strip == "rstrip",
    }
  end
  for i, pair in ipairs(o.merges or {}) do
    merges[i], vocab[pair[1] .. pair[2]] = pair, 255 + #added + i
  end
  local level = { type = "ByteLevel", add_prefix_space = false, trim_offsets = true, use_regex = false }
  local post = o.bos and {
    type = "TemplateProcessing",
    single = { { SpecialToken = { id = o.bos, type_id = 0 } }, { Sequence = { id = "A", type_id = 0 } } },
    pair = { { Sequence = { id = "A", type_id = 0 } }, { Sequence = { id = "B", type_id = 1 } } },
    special_tokens = { [o.bos] = { id = o.bos, ids = { id_of[o.bos] }, tokens = { o.bos } } },
  } or nil
  bs.mkdir(dir)
  bs.write_file(dir .. "/tokenizer.json", bs.json.encode {
    version = "1.0", added_tokens = added, pre_tokenizer = level, decoder = level, post_processor = post,
    model = { type = "BPE", vocab = vocab, merges = merges },
  })
  bs.write_file(dir .. "/tokenizer_config.json",
    bs.json.encode { bos_token = o.bos, eos_token = o.eos, chat_template = o.template })
end

--- One hash of all values of a table name -> array, by name.
function tiny.digest(values)
  local names, hash = {}, 0
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do hash = bs.hash(values[name]:bytes(), hash) end
  return hash
end

--- A fresh folder under build/ for files of a test.
function tiny.folder(name)
  local dir = (os.getenv("BS_TEST_TMP") or "build/test-tmp") .. "/" .. name
  os.execute(("rm -rf '%s' && mkdir -p '%s'"):format(dir, dir))
  return dir
end

return tiny
