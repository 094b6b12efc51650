-- SPDX-License-Identifier: Apache-2.0
--- Reading config.json for a family, with clear errors.
local bs = require "bs"
local reads = require "bs.nn.reads"

local config = {}

local act_of = {
  silu = "silu", swish = "silu", relu = "relu", gelu = "gelu_erf", gelu_new = "gelu_tanh",
  gelu_pytorch_tanh = "gelu_tanh",
}

--- Names as messages list them.
function config.listed(names)
  for i, name in ipairs(names) do names[i] = tostring(name) end
  table.sort(names)
  return table.concat(names, ", ")
end

--- Is a value there? null counts as absent.
function config.present(v) return v ~= nil and v ~= bs.json.null end

local MOST_SHOWN <const> = 200 -- bytes

--- A value as messages show it: what is long is cut.
function config.shown(v)
  local text = tostring(v)
  if type(v) == "table" then
    local ok, json = pcall(bs.json.encode, reads.plain(v)) -- not where a text in it is no UTF-8
    text = ok and json or v[1] ~= nil and "a list" or "an object"
  end
  return #text > MOST_SHOWN and text:sub(1, MOST_SHOWN) .. "..." or text
end

--- End: a key has a value that is not expected.
function config.wrong(key, v, expected)
  bs.fail("error", "config.json: '%s' is %s, %s is expected", key, config.shown(v), expected)
end

local shown, listed, wrong = config.shown, config.listed, config.wrong

-- Larger sizes are refused: a product of two then fits an integer. Lists of layers are made before the checkpoint says
-- how many there can be.
local MAX_COUNT <const>, MAX_LAYERS <const> = 0x7FFFFFFF, 1 << 16

--- The word that bs.op.act and bs.op.glu take for an activation as config.json names it, or nil.
function config.act_word(name) return act_of[name] end

-- Which layers have the window: a list from 0 on, by `layer_types` if it is there, else rule(i).
local function sliding(r, layers, rule)
  local kinds, out = r.get("layer_types", false), {}
  if layers > MAX_LAYERS then wrong("num_hidden_layers", layers, "at most " .. MAX_LAYERS) end
  if kinds and (type(kinds) ~= "table" or #kinds ~= layers) then
    wrong("layer_types", type(kinds) == "table" and #kinds .. " kinds" or kinds, "a list of " .. layers)
  end
  for i = 0, layers - 1 do
    local kind = kinds and kinds[i + 1]
    if kind and kind ~= "full_attention" and kind ~= "sliding_attention" then
      wrong("layer_types", kind, "full_attention or sliding_attention")
    end
    if kind then out[i] = kind == "sliding_attention" else out[i] = rule(i) end
  end
  return out
end

-- The sizes that every decoder has; d: the family's own defaults of keys that it may leave out, and `eps_key`, its name
-- for the norms' epsilon.
local function decoder(r, d)
  local c = {
    vocab = r.count("vocab_size", d.vocab), channels = r.count("hidden_size", d.channels),
    hidden = r.count("intermediate_size", d.hidden), layers = r.count("num_hidden_layers", d.layers),
    heads = r.count("num_attention_heads", d.heads), eps = r.number(d.eps_key or "rms_norm_eps", d.eps or 1e-6),
    tied = r.flag("tie_word_embeddings", d.tied or false),
  }
  c.eps_key = d.eps_key or "rms_norm_eps"
  if c.layers > MAX_LAYERS then wrong("num_hidden_layers", c.layers, "at most " .. MAX_LAYERS) end
  local even = c.channels // c.heads
  c.kv_heads = r.count("num_key_value_heads", d.kv_heads or c.heads, c.heads)
  c.head_dim = r.count("head_dim", d.head_dim or even, even)
  if c.heads % c.kv_heads ~= 0 then
    bs.fail("error", "config.json: %d attention heads do not share %d key/value heads evenly", c.heads,
      c.kv_heads)
  end
  return c
end

--- Reader of a config.json table for a family. A key whose default is nil must be there; null counts as
-- absent, unless a value for null is given. What it reads is noted (reads.lua).
function config.reader(hf, family)
  local r = {}
  hf = reads.over(hf)
  function r.get(key, default, null)
    local v = hf[key]
    if v == bs.json.null then v = null end
    if v == nil then v = default end
    if v == nil then
      bs.fail("error", "config.json: key '%s' is missing; a %s model needs it", key, family)
    end
    return v
  end
  function r.count(key, default, null) -- a positive integer
    local v = r.get(key, default, null)
    if math.type(v) ~= "integer" or v < 1 then wrong(key, v, "a positive integer") end
    if v > MAX_COUNT then wrong(key, v, "at most " .. MAX_COUNT) end
    return v
  end
  function r.number(key, default, null) -- not negative
    local v = r.get(key, default, null)
    if type(v) ~= "number" or v < 0 then wrong(key, v, "a number >= 0") end
    return v
  end
  function r.flag(key, default)
    local v = r.get(key, default)
    if type(v) ~= "boolean" then wrong(key, v, "true or false") end
    return v
  end
  function r.want(key, allowed, default) -- one of the listed values
    local v = r.get(key, default)
    for _, a in ipairs(allowed) do
      if v == a then return v end
    end
    bs.fail("error", "config.json: '%s' is %s; this %s supports %s", key, shown(v), family,
      listed { table.unpack(allowed) })
  end
  function r.act(key, default) -- an activation, by the word that bs.op.act and bs.op.glu take
    local names = {}
    for name in pairs(act_of) do names[#names + 1] = name end
    return act_of[r.want(key, names, default)]
  end
  function r.window(key, default) -- tokens that attention looks back, with itself; 0 (or null): all
    local v = r.get(key, default, 0)
    if math.type(v) ~= "integer" or v < 0 then wrong(key, v, "an integer >= 0 or null") end
    return v
  end

  function r.no_effect(...) -- keys that the authors' program has and does not compute with
    for _, key in ipairs { ... } do reads.note(hf, key) end
  end

  function r.sliding(layers, rule) return sliding(r, layers, rule) end
  function r.decoder(defaults) return decoder(r, defaults) end
  return r
end

--- The decoder's part of a multimodal config.json; whether the head is tied is said at the top level.
function config.text(hf)
  if type(hf.text_config) ~= "table" or hf.text_config == bs.json.null then
    bs.fail("error", "config.json: 'text_config' is missing; a %s model keeps its decoder there", hf.model_type)
  end
  local tied = hf.tie_word_embeddings
  return reads.over(hf.text_config, { tie_word_embeddings = tied == nil and bs.json.null or tied })
end

return config
