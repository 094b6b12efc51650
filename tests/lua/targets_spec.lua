-- SPDX-License-Identifier: Apache-2.0
--- Which linears an adapter is of: what `targets` name, with every family, and that what trains is also saved.
package.path = require("bs").real_path "tests/support" .. "/?.lua;" .. package.path
local bs = require "bs"
local job = require "bs.job"
local soft_gate = require "soft_gate"
local tiny = require "tiny"

local out = tiny.folder("targets")
local micro = tiny.micro(3, 40, { 9, 6 })
local staged = out .. "/staged"
tiny.checkpoint(staged, soft_gate, tiny.soft_gate_config(), "bf16")

local function open(settings)
  settings.model = settings.model or "tests/data/llama"
  settings.micro_tokens = settings.micro_tokens or 24
  return job.new(settings)
end

local function digest(j) return tiny.digest(j:parameters()) end

describe("targets", function()
  local function family(over)
    local f = {}
    for key, value in pairs(require "bs.family.llama") do f[key] = value end
    for key, value in pairs(over) do f[key] = value end
    return f
  end

  -- The last names of what is trained, and how many linears that is; each is in the saved file, too.
  local function trained(name, settings)
    local dir, names, seen = out .. "/" .. name, {}, {}
    local j <close> = open(settings)
    j:step({ micro }, { lr = 2e-2 })
    j:save(dir)
    settings.adapter, settings.lora = dir, nil
    local k <close> = open(settings)
    assert.equal(digest(j), digest(k))
    for _, a in ipairs(k.spec.adapters) do
      local leaf = a.full:match("[^.]+$")
      if not seen[leaf] then names[#names + 1] = leaf end
      seen[leaf] = true
    end
    table.sort(names)
    return table.concat(names, " "), #k.spec.adapters
  end

  it("'all' are every linear of a dense layer, in a group of the family or not", function()
    local few = family { lora = { attention = { "q_proj" } } }
    local names, n = trained("few", { family = few, lora = { r = 2, targets = { "all" } } })
    assert.same({ "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", 28 }, { names, n })
    assert.same({ "q_proj", 4 }, { trained("few", { family = few, lora = { r = 2, targets = { "attention" } } }) })
  end)

  it("of an adapter's file are read whether a group of the family has them or not", function()
    local few = family { lora = { attention = { "q_proj" } } }
    local j <close> = open { adapter = "tests/data/llama/adapter" }
    local k <close> = open { adapter = "tests/data/llama/adapter", family = few }
    assert.equal(digest(j), digest(k))
    assert.equal(j:walk({ micro }, { mode = "last" })[1]:hash(), k:walk({ micro }, { mode = "last" })[1]:hash())
  end)

  it("'all' of a staged layer leave out routed experts and the router, which have to be named", function()
    local function of(targets) return { model = staged, lora = { r = 2, targets = targets } } end
    assert.same({ "out qkv", 6 }, { trained("common", of { "all" }) })
    assert.same({ "gate out qkv", 9 }, { trained("router", of { "all", "gate" }) })
    assert.same({ "down gate_up out qkv up", 51 }, { trained("experts", of { "all-linear", "experts" }) })
  end)

  it("of a family without a prefix of its own, or with other names for its layers, are saved", function()
    local bare = family {}
    bare.peft_prefix = nil
    trained("bare", { family = bare, lora = { r = 2, targets = { "q_proj" } } })
    trained("first", { model = staged, lora = { r = 2, targets = { "qkv" }, layers = { 1 } } })
    -- PEFT reads a layer's number behind a name that is not the first.
    local file <close> = assert(io.open(out .. "/first/adapter_config.json"))
    local c = bs.json.decode(file:read("a"))
    assert.same({ bs.json.null, { "layers.1.attn.qkv" } }, { c.layers_to_transform, c.target_modules })
  end)

  it("outside the layers are refused as what they are", function()
    for target, what in pairs {
      lm_head = "head", ["lm_head.weight"] = "head", embed_tokens = "embedding", ["model.embed_tokens"] = "embedding",
    } do
      local ok, err = pcall(open, { lora = { targets = { "q_proj", target } } })
      assert.is_false(ok)
      assert.is_truthy(tostring(err):find(("targets: '%s' is the %s;"):format(target, what), 1, true), tostring(err))
    end
  end)
end)
