-- SPDX-License-Identifier: Apache-2.0
--- Checkpoints of published shapes with random weights, bf16 or packed as they are published, written as fast as the
-- disk takes them.
local bs = require "bs"
local family = require "bs.model.find_family"

local M = {}

local function qwen3(layers, channels, heads, kv_heads, hidden, tied, vocab)
  return {
    model_type = "qwen3", vocab_size = vocab or 151936, hidden_size = channels, intermediate_size = hidden,
    num_hidden_layers = layers, num_attention_heads = heads, num_key_value_heads = kv_heads, head_dim = 128,
    rms_norm_eps = 1e-6, rope_theta = 1000000.0, max_position_embeddings = 40960, hidden_act = "silu",
    tie_word_embeddings = tied, attention_bias = false,
  }
end

local function gpt_oss(layers, experts)
  return {
    model_type = "gpt_oss", vocab_size = 201088, hidden_size = 2880, intermediate_size = 2880,
    num_hidden_layers = layers, num_attention_heads = 64, num_key_value_heads = 8, head_dim = 64, rms_norm_eps = 1e-5,
    num_local_experts = experts, num_experts_per_tok = 4, sliding_window = 128, attention_bias = true,
    swiglu_limit = 7.0, tie_word_embeddings = false, max_position_embeddings = 131072, rope_theta = 150000,
    rope_scaling = { rope_type = "yarn", factor = 32.0, beta_fast = 32.0, beta_slow = 1.0, truncate = false,
                     original_max_position_embeddings = 4096 },
  }
end

--- Shapes by name. tiny and narrow are for machines without a GPU: the second has many visits with next to
-- no work in them. tiny64 is for the cost of a visit: 64 layers of 1.6 MB.
M.shapes = {
  ["qwen3-0.6b"] = qwen3(28, 1024, 16, 8, 3072, true),
  ["qwen3-1.7b"] = qwen3(28, 2048, 16, 8, 6144, true),
  ["qwen3-4b"] = qwen3(36, 2560, 32, 8, 9728, true),
  ["qwen3-8b"] = qwen3(36, 4096, 32, 8, 12288, false),
  ["qwen3-14b"] = qwen3(40, 5120, 40, 8, 17408, false),
  ["qwen3-32b"] = qwen3(64, 5120, 64, 8, 25600, false),
  ["qwen3-30b-a3b"] = {
    model_type = "qwen3_moe", vocab_size = 151936, hidden_size = 2048, intermediate_size = 6144,
    num_hidden_layers = 48, num_attention_heads = 32, num_key_value_heads = 4, head_dim = 128, rms_norm_eps = 1e-6,
    rope_theta = 1000000.0, max_position_embeddings = 40960, hidden_act = "silu", tie_word_embeddings = false,
    num_experts = 128, num_experts_per_tok = 8, moe_intermediate_size = 768, norm_topk_prob = true,
    decoder_sparse_step = 1, mlp_only_layers = {},
  },
  ["glm-4.5-air"] = {
    model_type = "glm4_moe", vocab_size = 151552, hidden_size = 4096, intermediate_size = 10944, num_hidden_layers = 46,
    num_attention_heads = 96, num_key_value_heads = 8, head_dim = 128, rms_norm_eps = 1e-5, rope_theta = 1000000,
    partial_rotary_factor = 0.5, attention_bias = true, use_qk_norm = false, max_position_embeddings = 131072,
    tie_word_embeddings = false, moe_intermediate_size = 1408, n_routed_experts = 128, num_experts_per_tok = 8,
    n_shared_experts = 1, n_group = 1, topk_group = 1, first_k_dense_replace = 1, norm_topk_prob = true,
    routed_scaling_factor = 1.0,
  },
  ["gpt-oss-20b"] = gpt_oss(24, 32),
  ["gpt-oss-120b"] = gpt_oss(36, 128),
  tiny = qwen3(8, 256, 2, 1, 512, false, 1024),
  narrow = qwen3(64, 64, 1, 1, 128, false, 256),
  tiny64 = qwen3(64, 256, 2, 1, 768, false, 1024),
}

--- Their names, sorted.
function M.names()
  local list = {}
  for name in pairs(M.shapes) do list[#list + 1] = name end
  table.sort(list)
  return list
end

local SHARD <const> = 4 << 30
local CHUNK <const> = 64 << 20
-- Random numbers before they repeat; prime, so that no two rows of a matrix are alike.
local PERIOD <const> = 2097143

local function tensors_of(config)
  local fam = family.find(config)
  local c, list = fam.config(config), {}
  local function add(name, dims, u8)
    local n = u8 and 1 or 2
    for _, d in ipairs(dims) do n = n * d end
    list[#list + 1] = { name = name, dims = dims, bytes = n, u8 = u8 }
  end
  -- Slices of all experts lie in one tensor, packed ones in two.
  local function add_experts(i, experts)
    for _, t in ipairs(fam.expert_tensors(c, i)) do
      local name, d = fam.prefix(i) .. (t.stored or ""), t.dims
      if not t.stored then
        for e = 0, experts - 1 do add(fam.expert_prefix(i, e) .. t.name, d) end
      elseif t.packed then
        add(name .. "_blocks", { experts, d[1], d[2] // 32, 16 }, true)
        add(name .. "_scales", { experts, d[1], d[2] // 32 }, true)
      else
        add(name, t.transposed and { experts, d[2], d[1] } or { experts, table.unpack(d) })
      end
    end
  end
  for i = 0, c.layers - 1 do
    for _, t in ipairs(fam.tensors(c, i)) do add(fam.prefix(i) .. t.name, t.dims) end
    if fam.stages and (not fam.staged or fam.staged(c, i)) then add_experts(i, fam.routing(c).experts) end
  end
  add(fam.head.norm, { c.channels })
  add(fam.embed.name, { c.vocab, c.channels })
  if not c.tied then add(fam.head.weight, { c.vocab, c.channels }) end
  return list
end

-- Tensors in files of about SHARD bytes.
local function shards_of(list)
  local shards, size = {}, SHARD
  for _, t in ipairs(list) do
    if size + t.bytes > SHARD then shards[#shards + 1], size = {}, 0 end
    table.insert(shards[#shards], t)
    size = size + t.bytes
  end
  return shards
end

-- A little over CHUNK bytes of numbers of about N(0, 0.02) as bf16; `most` bounds it for small models.
local function noise(most)
  local n = math.max(math.min(PERIOD, most // 2 + 1), 1)
  local v, random = {}, math.random
  math.randomseed(1)
  for i = 1, n do v[i] = (random() + random() + random() - 1.5) * 0.04 end
  local one = bs.array.new("f32", { n }, v):cast("bf16"):bytes()
  return one:rep(math.max(1, math.min(CHUNK, most) // #one))
end

local function header(list)
  local parts, at = {}, 0
  for i, t in ipairs(list) do
    parts[i] = ('"%s":{"dtype":"%s","shape":[%s],"data_offsets":[%d,%d]}'):format(t.name, t.u8 and "U8" or "BF16",
      table.concat(t.dims, ","), at, at + t.bytes)
    at = at + t.bytes
  end
  local text = "{" .. table.concat(parts, ",") .. "}"
  text = text .. (" "):rep(-#text % 8)
  return string.pack("<I8", #text) .. text
end

local function write_shard(path, list, text, at)
  local f <close> = assert(io.open(path, "wb"))
  f:setvbuf("no")
  assert(f:write(header(list)))
  for _, t in ipairs(list) do
    local left = t.bytes
    if #t.dims == 1 then -- norm weights
      assert(f:write(string.pack("<I2", 0x3F80):rep(t.dims[1])))
      left = 0
    elseif t.name:find "_scales$" then -- of values up to 6: 2^-7
      assert(f:write(("\x78"):rep(left)))
      left = 0
    end
    while left > 0 do
      local n = math.min(left, #text - at)
      assert(f:write(n == #text and text or text:sub(at + 1, at + n)))
      at, left = (at + n) % #text, left - n
    end
  end
  return at
end

-- Onto the disk and out of the page cache, as far as the system has what it takes.
local function settle(path)
  os.execute(("dd if=/dev/null of='%s' oflag=nocache conv=notrunc,fdatasync count=0 status=none 2>/dev/null")
    :format(path))
end

local function read(path)
  local f <close> = io.open(path, "rb")
  return f and f:read("a")
end

-- Rows of the vocabulary that one tile of the head has, which is about as large as a layer.
local function tile_rows(config)
  local fam, bytes = family.find(config), 0
  local c = fam.config(config)
  for _, t in ipairs(fam.tensors(c, 0)) do
    local n = 2
    for _, d in ipairs(t.dims) do n = n * d end
    bytes = bytes + n
  end
  return math.max(bytes // (2 * c.channels) // 64 * 64, 64)
end

--- The folder below `dir` with a checkpoint of the shape, made when it is not there. opts: layers and vocab (rows),
-- nil: the shape's own; vocab = "tile": at most a tile of the head. Returns the folder, its bytes, and the seconds that
-- writing took.
function M.make(dir, shape, opts)
  local config = {}
  for key, value in pairs(M.shapes[shape]) do config[key] = value end
  config.num_hidden_layers = opts.layers or config.num_hidden_layers
  config.vocab_size = opts.vocab == "tile" and math.min(tile_rows(config), config.vocab_size) or opts.vocab
    or config.vocab_size
  local folder = ("%s/%s-%dx%d"):format(dir, shape, config.num_hidden_layers, config.vocab_size)
  local bytes, start = 0, bs.now()
  local list = tensors_of(config)
  for _, t in ipairs(list) do bytes = bytes + t.bytes end
  local text, done = bs.json.encode(config), folder .. "/config.json"
  if read(done) == text then return folder, bytes, 0 end
  bs.mkdir(folder)
  os.remove(done) -- it comes back last
  local shards, map, chunk, at = shards_of(list), {}, noise(bytes), 0
  for i, shard in ipairs(shards) do
    local name = ("model-%05d-of-%05d.safetensors"):format(i, #shards)
    at = write_shard(folder .. "/" .. name, shard, chunk, at)
    for _, t in ipairs(shard) do map[t.name] = name end
  end
  for i = 1, #shards do settle(("%s/model-%05d-of-%05d.safetensors"):format(folder, i, #shards)) end
  bs.write_file(folder .. "/model.safetensors.index.json", bs.json.encode {
    metadata = { total_size = bytes }, weight_map = map,
  })
  bs.write_file(done, text)
  return folder, bytes, bs.now() - start
end

return M
