-- SPDX-License-Identifier: Apache-2.0
--- Tensors that no block holds, and heads that are tied, stored, or both.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local folders = require "folders"
local job = require "bs.job"
local merge = require "bs.model.merge"
local model = require "bs.model.model"
local target = require "target"

local ABSENT, checkpoint, open, refuses = folders.ABSENT, folders.checkpoint, folders.open, folders.refuses

describe("tensors that nothing reads", function()
  it("are refused inside a layer, with a pattern that goes on without them", function()
    local dir = checkpoint({}, {
      ["model.layers.0.self_attn.q_proj.bias"] = { 32 }, ["model.layers.1.self_attn.q_proj.bias"] = { 32 },
    })
    refuses(dir, nil, dir .. ": a llama model with this config.json does not read 2 of the tensors",
      "2 in layers that it has ('model.layers.0.self_attn.q_proj.bias', ", "ignore='*.bias'")
    assert.equal(dir .. ": ignore= leaves out 2 tensors: 'model.layers.0.self_attn.q_proj.bias', "
      .. "'model.layers.1.self_attn.q_proj.bias'", open(dir, { ignore = { "*.bias" } }))
    open(dir, { ignore = "model.layers.?.self_attn.q_proj.bias" })
    refuses(dir, { ignore = { "model.layers.0.*" } }, "read 1 of the tensors", "'model.layers.1.self_attn.q_proj.bias'")
    for _, name in ipairs { "self_attn.q_norm.weight", "self_attn.k_norm.weight", "post_feedforward_layernorm.weight",
                            "self_attn.sinks", "mlp.gate.weight", "self_attn.o_proj.biass" } do
      refuses(checkpoint({}, { ["model.layers.1." .. name] = { 8 } }), nil, "1 in layers that it has", name)
    end
  end)

  it("are what they are called: scales, adapters, heads, other layers", function()
    for name, text in pairs {
      ["model.layers.0.mlp.up_proj.weight_scale_inv"] = "quantisation by FP8",
      ["model.layers.0.mlp.up_proj.weight_scale"] = "quantisation by FP8 or compressed-tensors",
      ["model.layers.0.mlp.up_proj.weight.absmax"] = "quantisation by bitsandbytes",
      ["model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"] = "quantisation by bitsandbytes",
      ["model.layers.0.mlp.up_proj.SCB"] = "quantisation by bitsandbytes",
      ["model.layers.0.mlp.up_proj.g_idx"] = "quantisation by GPTQ",
      ["model.layers.0.mlp.up_proj.scales"] = "quantisation by GPTQ, AWQ or MLX",
      ["model.layers.0.mlp.up_proj.lora_A.weight"] = "of an adapter that is not merged",
      ["model.layers.0.mlp.up_proj.lora_magnitude_vector"] = "of an adapter that is not merged",
      ["base_model.model.lm_head.lora_B.default.weight"] = "of an adapter that is not merged",
      ["score.weight"] = "of a head that is not a language model's",
      ["classifier.bias"] = "of a head that is not a language model's",
      ["v_head.summary.weight"] = "of a head that is not a language model's",
      ["model.layers.2.input_layernorm.weight"] = "of layers beyond the 2 that config.json says",
      ["model.layers.10.mlp.up_proj.weight"] = "of layers beyond the 2",
      ["layers.0.mlp.up_proj.weight"] = "1 outside its layers",
      ["model.embed_positions.weight"] = "1 outside its layers",
      ["lm_head.bias"] = "1 outside its layers",
      ["model.layers.x.weight"] = "1 outside its layers",
    } do
      refuses(checkpoint({}, { [name] = { 8 } }), nil, text, name, "ignore=")
    end
  end)

  it("pass where they are computed again", function()
    assert.equal("", open(checkpoint({}, {
      ["model.layers.0.self_attn.rotary_emb.inv_freq"] = { 4 },
      ["model.layers.1.self_attn.rotary_emb.cos_cached"] = { 4 },
      ["model.rotary_emb.inv_freq"] = { 4 }, ["model.layers.0.attn.masked_bias"] = { 1 },
      ["model.layers.0.attn.bias"] = { 1, 1, 8, 8 }, ["model.embeddings.position_ids"] = { 1, 8 },
    })))
    refuses(checkpoint({}, { ["model.layers.0.attn.bias"] = { 8 } }), nil, "in layers that it has")
  end)

  it("of parts that are left out are told", function()
    local dir = checkpoint({ num_nextn_predict_layers = 1 }, {
      ["model.layers.2.eh_proj.weight"] = { 4, 8 }, ["model.layers.2.mlp.up_proj.weight"] = { 8 },
      ["vision_tower.vision_model.head.weight"] = { 4 }, ["multi_modal_projector.mm_soft_emb_norm.weight"] = { 4 },
      ["model.visual.blocks.0.norm1.weight"] = { 4 }, ["mtp.fc.weight"] = { 4 },
    })
    assert.equal(dir .. ": left out: 3 tensors of layers that predict further tokens ('model.layers.2.eh_proj.weight', "
      .. "'model.layers.2.mlp.up_proj.weight', 'mtp.fc.weight')\n" .. dir .. ": left out: 3 tensors of a part for "
      .. "images or sound ('model.visual.blocks.0.norm1.weight', 'multi_modal_projector.mm_soft_emb_norm.weight', "
      .. "'vision_tower.vision_model.head.weight')", open(dir))
    refuses(checkpoint({ num_nextn_predict_layers = 1 }, { ["model.layers.3.eh_proj.weight"] = { 8 } }), nil,
      "of layers beyond the 2")
    refuses(checkpoint({}, { ["model.visually.weight"] = { 8 } }), nil, "outside its layers")
  end)

  it("may have any name, and patterns any number of stars", function()
    local long = ("a."):rep(50000)
    refuses(checkpoint({}, { [long] = { 8 } }), nil, "1 with names of more than 500 characters ('a.a.")
    local stars = ("*a"):rep(30) .. "b"
    refuses(checkpoint({}, { [("a"):rep(400)] = { 8 } }), { ignore = { stars } }, "1 outside its layers")
    for pattern, ok in pairs {
      ["more*"] = true, ["*"] = true, ["m?re.[x]"] = true, ["more.[x]*"] = true, ["**x]"] = true, ["more"] = false,
      ["more.x"] = false, ["m?ore.[x]"] = false, ["*y*"] = false, ["more.%[x%]"] = false,
    } do
      local dir = checkpoint({}, { ["more.[x]"] = { 8 } })
      if ok then open(dir, { ignore = { pattern } }) else refuses(dir, { ignore = { pattern } }, "more.[x]") end
    end
  end)

  it("are those that an index leaves out, and copies in another shard are told", function()
    local dir, parts, map = checkpoint(), { {}, {} }, {}
    for name, a in pairs(folders.tensors(dir .. "/model.safetensors")) do
      local n = name:find("layers.1", 1, true) and 2 or 1
      parts[n][name], map[name] = a, ("model-%05d-of-00002.safetensors"):format(n)
    end
    local function write(more, copies)
      for name, a in pairs(more) do parts[2][name] = a end
      for _, name in ipairs(copies) do parts[2][name] = parts[1][name] end
      for n, arrays in ipairs(parts) do
        bs.safetensors.write(("%s/model-%05d-of-00002.safetensors"):format(dir, n), arrays)
      end
      os.remove(dir .. "/model.safetensors")
      bs.write_file(dir .. "/model.safetensors.index.json", bs.json.encode { weight_map = map })
    end
    write({}, {})
    assert.equal("", open(dir))
    write({}, { "model.norm.weight" })
    assert.equal(dir .. ": 1 tensors are in several files ('model.norm.weight'); those of the files that the index "
      .. "names are read", open(dir))
    write({ ["model.layers.1.self_attn.q_proj.bias"] = bs.array.new("f32", { 32 }) }, {})
    refuses(dir, nil, "does not read 1 of the tensors", "'model.layers.1.self_attn.q_proj.bias'")
    map["model.layers.1.mlp.up_proj.weight"] = nil
    write({}, {})
    refuses(dir, nil, "'model.layers.1.mlp.up_proj.weight' [40, 32] is missing", "the index does not name it")
  end)

  it("may be those that are read, under other names", function()
    for _, rename in ipairs { { "^", "_orig_mod." }, { "^model%.", "" }, { "^", "base_model.model." } } do
      local dir, more = checkpoint(), {}
      for name, a in pairs(folders.tensors(dir .. "/model.safetensors")) do
        more[name:gsub(rename[1], rename[2], 1)], more[name] = a, ABSENT
      end
      refuses(checkpoint({}, more), nil, "is missing", "its names have another prefix")
    end
  end)

  it("are copied by a merge that goes on with them", function()
    local BIAS <const> = "model.layers.0.self_attn.q_proj.bias"
    local dir, saved, out = checkpoint({}, { [BIAS] = { 32 } }), folders.folder(), folders.folder()
    local settings = target.settings { model = dir, lora = { r = 2 }, micro_tokens = 8 }
    assert.is_false(pcall(job.new, settings))
    settings.ignore = { "*.bias" }
    folders.told(function()
      local j <close> = job.new(settings)
      j:save(saved)
      assert.is_false(pcall(merge.run, { model = dir, adapter = saved, out = out }))
      merge.run { model = dir, adapter = saved, out = out, ignore = { "*.bias" } }
    end)
    local before, after = folders.tensors(dir .. "/model.safetensors"), folders.tensors(out .. "/model.safetensors")
    assert.equal(before[BIAS]:hash(), after[BIAS]:hash())
    refuses(out, nil, BIAS)
  end)

  it("are named where a pattern finds none of them", function()
    local dir = checkpoint()
    assert.equal(dir .. ": ignore=*.weight names no tensor that would be refused",
      open(dir, { ignore = { "*.weight" } }))
    assert.equal("", open(dir))
    local ok, err = pcall(model.open, dir, { ignore = { 3 } })
    assert.is_false(ok)
    assert.equal(2, err.bs_exit)
  end)
end)

describe("a head", function()
  local HEAD <const>, EMBED <const> = "lm_head.weight", "model.embed_tokens.weight"

  it("that is absent is the embedding only where config.json or the family ties it", function()
    open(checkpoint { tie_word_embeddings = true })
    refuses(checkpoint({}, { [HEAD] = ABSENT }), nil, "the head 'lm_head.weight' is missing", "(false)")
    refuses(checkpoint({ tie_word_embeddings = ABSENT }, { [HEAD] = ABSENT }), nil, "(absent: false for this family)")
    refuses(checkpoint({ tie_word_embeddings = bs.json.null }, { [HEAD] = ABSENT }), nil, "is missing")
    open(checkpoint { model_type = "gemma", architectures = ABSENT, hidden_act = ABSENT, tie_word_embeddings = ABSENT })
  end)

  it("that is stored and tied must be the embedding", function()
    local plain = checkpoint { tie_word_embeddings = true }
    local embed = folders.tensors(plain .. "/model.safetensors")[EMBED]
    assert.equal("", open(checkpoint({ tie_word_embeddings = true }, { [EMBED] = embed, [HEAD] = embed })))
    open(checkpoint({ tie_word_embeddings = true }, { [EMBED] = embed, [HEAD] = embed }), { check = "full" })
    local wide = embed:cast("bf16"):cast("f32")
    local both = { [EMBED] = wide, [HEAD] = embed:cast("bf16") }
    open(checkpoint({ tie_word_embeddings = true }, both), { check = "full" })
    local other = checkpoint({ tie_word_embeddings = true }, { [EMBED] = embed, [HEAD] = { 300, 32 } })
    refuses(other, nil, "makes 'model.embed_tokens.weight' the head, but one is stored", "row 0 of 'lm_head.weight'",
      "ignore=lm_head.weight")
    assert.equal(other .. ": ignore= leaves out 1 tensors: 'lm_head.weight'", open(other, { ignore = { HEAD } }))
    refuses(checkpoint({ tie_word_embeddings = true }, { [HEAD] = { 299, 32 } }), nil, "is [299, 32]")
  end)

  it("that differs in one row is found by a full check", function()
    local embed = folders.tensors(checkpoint { tie_word_embeddings = true } .. "/model.safetensors")[EMBED]
    local near = embed:cast("f32")
    near:set(2 * 32 + 5, 7)
    local dir = checkpoint({ tie_word_embeddings = true }, { [EMBED] = embed, [HEAD] = near })
    open(dir)
    refuses(dir, { check = "full" }, "row 2 of 'lm_head.weight' differs")
  end)
end)
