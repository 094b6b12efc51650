-- SPDX-License-Identifier: Apache-2.0
--- Folders that hold something else than a checkpoint that can be computed with: each is told as what it is, at once.
package.path = "tests/support/?.lua;" .. package.path
local bs = require "bs"
local folders = require "folders"

local ABSENT, checkpoint, open, refuses = folders.ABSENT, folders.checkpoint, folders.open, folders.refuses

describe("quantised weights", function()
  it("are told by what config.json says", function()
    local function says(over, ...) refuses(checkpoint(over), nil, ...) end
    for method, name in pairs {
      gptq = "GPTQ to 4 bits", awq = "AWQ to 4 bits", fp8 = "FP8 to 4 bits",
      ["compressed-tensors"] = "compressed-tensors", mxfp4 = "MXFP4", hqq = "HQQ", torchao = "torchao",
    } do
      says({ quantization_config = { quant_method = method, bits = 4 } }, "quantised by " .. name,
        "original checkpoint")
    end
    says({ quantization_config = { quant_method = "bitsandbytes", load_in_4bit = true } }, "bitsandbytes to 4 bits")
    says({ quantization_config = { quant_method = "bitsandbytes", load_in_8bit = true } }, "bitsandbytes to 8 bits")
    says({ quantization_config = { quant_method = "frobnicate" } }, "the quant_method frobnicate, which is not known")
    says({ quantization_config = { bits = 3 } }, "'quantization_config' has the quant_method nil")
    says({ quantization_config = "gptq" }, "'quantization_config' is gptq, an object is expected")
    says({ quantization = { group_size = 64, bits = 4 } }, "quantised by MLX to 4 bits")
    says({ quantization_config = { group_size = 64, bits = 4, mode = "affine" } }, "quantised by MLX to 4 bits")
    says({ compression_config = { quant_method = "compressed-tensors" } }, "compressed-tensors")
  end)

  it("pass where the key says nothing", function()
    local off = { quant_method = "bitsandbytes", load_in_4bit = false, load_in_8bit = false }
    for _, q in ipairs { bs.json.null, {}, off } do
      open(checkpoint { quantization_config = q })
    end
  end)

  it("are told by the tensors beside a weight that is absent or cannot be read", function()
    local W <const> = "model.layers.0.mlp.up_proj."
    local packed = bs.array.new("i32", { 4, 8 })
    refuses(checkpoint({}, { [W .. "weight"] = ABSENT, [W .. "qweight"] = packed, [W .. "g_idx"] = { 8 } }), nil,
      "'" .. W .. "weight' [40, 32] is missing", "'" .. W .. "g_idx' is beside it: weights quantised by GPTQ")
    refuses(checkpoint({}, { [W .. "weight"] = ABSENT, [W .. "qweight"] = packed, [W .. "scales"] = { 8 } }), nil,
      "'" .. W .. "qweight' is beside it: weights quantised by AWQ or GPTQ")
    refuses(checkpoint({}, { [W .. "weight"] = ABSENT, [W .. "weight_packed"] = packed }), nil, "compressed-tensors")
    refuses(checkpoint({}, { [W .. "weight"] = bs.array.new("u8", { 640, 1 }), [W .. "weight.absmax"] = { 8 } }), nil,
      "stored as u8", "'" .. W .. "weight.absmax' is beside it: weights quantised by bitsandbytes")
    refuses(checkpoint({}, { [W .. "weight"] = packed, [W .. "scales"] = { 8 }, [W .. "biases"] = { 8 } }), nil,
      "stored as i32", "weights quantised by MLX")
    refuses(checkpoint({}, { [W .. "weight"] = bs.array.new("u8", { 40, 32 }), [W .. "weight_scale"] = { 1 } }), nil,
      "stored as u8", "weights quantised by FP8 or compressed-tensors")
  end)
end)

describe("a folder without safetensors", function()
  local function holds(name, text, ...)
    local dir = checkpoint()
    os.remove(dir .. "/model.safetensors")
    if name then bs.write_file(dir .. "/" .. name, text or "x") end
    refuses(dir, nil, dir .. ": neither model.safetensors nor model.safetensors.index.json is there", ...)
  end

  it("is told as what it is", function()
    holds(nil)
    for name, what in pairs {
      ["pytorch_model.bin"] = "a pickled PyTorch checkpoint: load it with transformers",
      ["pytorch_model-00001-of-00002.bin"] = "a pickled PyTorch checkpoint",
      ["pytorch_model.bin.index.json"] = "a pickled PyTorch checkpoint",
      ["consolidated.00.pth"] = "Meta's own layout", ["consolidated.safetensors"] = "Mistral's own layout",
      ["model.gguf"] = "a GGUF file: give the original", ["weights.00.npz"] = "weights of MLX",
      ["tf_model.h5"] = "weights of TensorFlow", ["flax_model.msgpack"] = "weights of Flax",
      ["model.onnx"] = "an ONNX model", ["model-00001-of-00002.safetensors"] = "a shard without its index",
      ["adapter_model.safetensors"] = "the weights of an adapter",
      ["weights.safetensors"] = "weights under a name that no index says",
      ["model.safetensors.incomplete"] = "a download that has not ended",
    } do
      holds(name, nil, "'" .. name .. "' is " .. what)
    end
  end)

  it("may have links that lead nowhere", function()
    for _, name in ipairs { "model.safetensors", "model.safetensors.index.json" } do
      local dir = checkpoint()
      os.remove(dir .. "/model.safetensors")
      os.execute(("ln -s ../../blobs/0123 '%s/%s'"):format(dir, name))
      refuses(dir, nil, name .. " is a link that leads nowhere")
    end
    local dir = checkpoint()
    os.remove(dir .. "/config.json")
    os.execute(("ln -s ../../blobs/0123 '%s/config.json'"):format(dir))
    refuses(dir, nil, dir .. "/config.json is a link that leads nowhere")
    dir = checkpoint()
    bs.write_file(dir .. "/model.safetensors.index.json", '{"weight_map": {"x": "a.safetensors"}}')
    os.execute(("rm '%s/model.safetensors' && ln -s nowhere '%s/a.safetensors'"):format(dir, dir))
    refuses(dir, nil, "names files that are not there: a.safetensors (is a link that leads nowhere")
  end)

  it("may be no model's folder at all", function()
    local dir = folders.folder()
    bs.mkdir(dir)
    refuses(dir, nil, "there is no config.json; model= must name a Hugging Face checkpoint folder")
    bs.write_file(dir .. "/adapter_config.json", '{"base_model_name_or_path": "owner/base"}')
    refuses(dir, nil, "It is the folder of an adapter: give it as adapter=" .. dir, "(it names 'owner/base')")
    dir = folders.folder()
    bs.mkdir(dir .. "/snapshots/abc")
    refuses(dir, nil, "the root of a hub's cache: model=" .. dir .. "/snapshots/abc")
    dir = folders.folder()
    bs.mkdir(dir)
    bs.write_file(dir .. "/x.Q4_0.gguf", "GGUF")
    refuses(dir, nil, "'x.Q4_0.gguf' is a GGUF file")
    refuses(dir .. "/x.Q4_0.gguf", nil, "is a file, a GGUF file: model= must name")
    bs.mkdir(dir .. "/config.json")
    refuses(dir, nil, "config.json is a folder")
    dir = checkpoint()
    refuses(dir .. "/model.safetensors", nil, "is a file; the folder that it is in is expected: model=" .. dir)
    refuses("/dev/null", nil, "there is no config.json")
  end)
end)

describe("files that are there", function()
  it("and are pointers or pages say so", function()
    local LFS <const> = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for _, name in ipairs { "config.json", "model.safetensors", "model.safetensors.index.json" } do
      local dir = checkpoint()
      if name:find("index") then os.remove(dir .. "/model.safetensors") end
      bs.write_file(dir .. "/" .. name, LFS)
      refuses(dir, nil, name, "a Git LFS pointer, not the data", "git lfs pull")
    end
    local dir = checkpoint()
    bs.write_file(dir .. "/config.json", "\n<!doctype html>")
    refuses(dir, nil, "an HTML page")
  end)

  it("and are absurd end at once", function()
    local dir = checkpoint()
    os.execute(("truncate -s 3G '%s/config.json'"):format(dir))
    refuses(dir, nil, "config.json", "3221225472 bytes", "limit")
    bs.write_file(dir .. "/config.json", ("["):rep(100000))
    refuses(dir, nil, "nested too deeply")
    bs.write_file(dir .. "/config.json", '{"model_type": ' .. ('{"a":'):rep(5000) .. "1" .. ("}"):rep(5000) .. "}")
    refuses(dir, nil, "nested too deeply")
  end)

  it("and have absurd numbers end at once", function()
    local none = {
      num_hidden_layers = 2, vocab_size = 300, hidden_size = 32, num_attention_heads = 4, head_dim = ABSENT,
      num_key_value_heads = 2, intermediate_size = 40, model_type = "llama", num_nextn_predict_layers = ABSENT,
    }
    local function absurd(over, ...) refuses(checkpoint(over, nil, none), nil, ...) end
    absurd({ num_hidden_layers = 1000000000 }, "'num_hidden_layers' is 1000000000, at most 65536")
    absurd({ num_hidden_layers = 60000 }, "config.json says 60000 layers; the checkpoint holds")
    absurd({ model_type = "mistral", num_hidden_layers = 1 << 31 }, "'num_hidden_layers' is 2147483648")
    absurd({ vocab_size = 2147483647 }, "config.json implies [2147483647, 32]")
    absurd({ vocab_size = -1 }, "'vocab_size' is -1")
    absurd({ hidden_size = 1000000000, head_dim = 8 }, "config.json implies [1000000000]")
    absurd({ num_attention_heads = 1000000000 }, "'head_dim' is 0")
    absurd({ num_attention_heads = 1000000000, head_dim = 8 }, "implies [8000000000, 32]")
    absurd({ intermediate_size = 2147483647 }, "implies [2147483647, 32]")
    absurd({ num_nextn_predict_layers = 1000000000 }, "'num_nextn_predict_layers' is 1000000000, an integer 0..1024")
    absurd({ num_nextn_predict_layers = -1 }, "'num_nextn_predict_layers' is -1")
  end)
end)
