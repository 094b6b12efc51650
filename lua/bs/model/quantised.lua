-- SPDX-License-Identifier: Apache-2.0
--- Quantised weights, recognised by config.json, by the names of tensors and by their dtypes: none is computed with,
-- and each is told as what it is.
local config = require "bs.nn.config"

local quantised = {}

-- quant_method of a quantization_config -> what people call it.
local methods = {
  gptq = "GPTQ", awq = "AWQ", bitsandbytes = "bitsandbytes", fp8 = "FP8", fbgemm_fp8 = "FP8 (FBGEMM)",
  ["compressed-tensors"] = "compressed-tensors", mxfp4 = "MXFP4", modelopt = "ModelOpt", hqq = "HQQ",
  quanto = "Quanto", aqlm = "AQLM", eetq = "EETQ", torchao = "torchao", higgs = "HIGGS", spqr = "SpQR", vptq = "VPTQ",
  bitnet = "BitNet", quark = "Quark", ["auto-round"] = "AutoRound", ["intel/auto-round"] = "AutoRound",
  marlin = "Marlin",
  exl2 = "EXL2", exl3 = "EXL3", squeezellm = "SqueezeLLM", fp_quant = "FP-Quant", nvfp4 = "NVFP4", gptq_marlin = "GPTQ",
  awq_marlin = "AWQ", smoothquant = "SmoothQuant", deepspeedfp = "DeepSpeed FP", quip = "QuIP#",
}

-- What a tensor's last name says about the linear that it belongs to; what says most comes first.
local parts = {
  { "g_idx", "GPTQ" }, { "biases", "MLX" }, { "qweight", "AWQ or GPTQ" }, { "qzeros", "AWQ or GPTQ" },
  { "weight_packed", "compressed-tensors" },
  { "weight_scale_inv", "FP8" }, { "weight_scale", "FP8 or compressed-tensors" }, { "input_scale", "FP8" },
  { "weight_zero_point", "compressed-tensors" }, { "weight_shape", "compressed-tensors" },
  { "absmax", "bitsandbytes" }, { "quant_map", "bitsandbytes" }, { "nested_absmax", "bitsandbytes" },
  { "nested_quant_map", "bitsandbytes" }, { "SCB", "bitsandbytes" }, { "CB", "bitsandbytes" },
  { "weight_format", "bitsandbytes" }, { "scales", "GPTQ, AWQ or MLX" },
  { "q_weight", "EXL2" }, { "trellis", "EXL3" }, { "W_q", "HQQ" }, { "codebooks", "AQLM" },
  { "weight_scale_2", "ModelOpt" }, { "k_scale", "FP8" }, { "v_scale", "FP8" }, { "output_scale", "FP8" },
  { "weight_blocks", "MXFP4" }, { "weight_scales", "MXFP4" },
}
local by_part = {}
for _, p in ipairs(parts) do by_part[p[1]] = p[2] end

--- The kind of quantisation that a tensor belongs to by its name, or nil.
function quantised.of_tensor(name)
  if name:find("%.quant_state%.") then return "bitsandbytes" end
  if name:find("_blocks$") or name:find("_scales$") then return "MXFP4" end
  return by_part[name:match("[^.]*$")]
end

--- Words for a linear whose weight is absent or of a dtype that is not computed with, by what stands beside it; or nil.
function quantised.beside(tensors, name)
  local base = name:gsub("weight$", "")
  for _, p in ipairs(parts) do
    if tensors[base .. p[1]] or tensors[name .. "." .. p[1]] then
      return ("'%s' is beside it: weights quantised by %s are not read; give the original checkpoint"):format(
        tensors[base .. p[1]] and base .. p[1] or name .. "." .. p[1], p[2])
    end
  end
end

-- bitsandbytes with both of its switches off, or a table that says nothing at all.
local function harmless(q)
  return next(q) == nil or q.quant_method == "bitsandbytes" and q.load_in_4bit == false and q.load_in_8bit == false
end

local function bits(q)
  local n = math.tointeger(q.bits) or q.load_in_4bit == true and 4 or q.load_in_8bit == true and 8
  return n and (" to %d bits"):format(n) or ""
end

local KEYS <const> = { quantization_config = true, quantization = true, compression_config = true }

--- Is it a key that says how weights are quantised?
function quantised.is_key(key) return KEYS[key] or false end

--- What a value of such a key says, where it is not harmless; else nil.
function quantised.of_key(key, q)
  if type(q) ~= "table" then return ("'%s' is %s, an object is expected"):format(key, config.shown(q)) end
  if harmless(q) then return nil end
  local method = q.quant_method
  if key == "quantization" or method == nil and config.present(q.group_size) then
    return ("'%s' says that the weights are quantised by MLX%s"):format(key, bits(q))
  end
  if type(method) == "string" and methods[method:lower()] then
    return ("'%s' says that the weights are quantised by %s%s"):format(key, methods[method:lower()], bits(q))
  end
  return ("'%s' has the quant_method %s, which is not known"):format(key, config.shown(method))
end

return quantised
