-- SPDX-License-Identifier: Apache-2.0
--- config.json tables as hubs and trainers publish them, with small sizes in place of the real ones: what healthy
-- checkpoints hold. told: what the user is told about one; nothing is told about the others.
local bs = require "bs"

local null <const> = bs.json.null
local M = {}

-- Sizes of every model here; `over` comes last.
local function config(over)
  local c = {
    vocab_size = 64, hidden_size = 40, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4,
    num_key_value_heads = 2, initializer_range = 0.02, use_cache = true, torch_dtype = "bfloat16",
    bos_token_id = 1, eos_token_id = 2, transformers_version = "4.46.3", tie_word_embeddings = false,
  }
  for key, value in pairs(over) do c[key] = value end
  return c
end

local function with(base, over)
  local c = {}
  for _, t in ipairs { base, over } do
    for key, value in pairs(t) do c[key] = value end
  end
  return c
end

local ABSENT = {}
local function without(c)
  local out = {}
  for key, value in pairs(c) do
    if value ~= ABSENT then out[key] = value end
  end
  return out
end

-- ---- Llama's layout -------------------------------------------------------------------------------------------------

local llama = config {
  architectures = { "LlamaForCausalLM" }, model_type = "llama", attention_bias = false, attention_dropout = 0.0,
  hidden_act = "silu", max_position_embeddings = 4096, mlp_bias = false, pretraining_tp = 1, rms_norm_eps = 1e-5,
  rope_scaling = null, rope_theta = 10000.0,
}
local llama3 = with(llama, {
  bos_token_id = 128000, eos_token_id = { 128001, 128008, 128009 }, max_position_embeddings = 131072,
  rope_theta = 500000.0, rope_scaling = {
    factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192,
    rope_type = "llama3",
  },
})
M["Llama 1, an early conversion"] = { config {
  architectures = { "LLaMAForCausalLM" }, model_type = "llama", hidden_act = "silu", max_sequence_length = 2048,
  pad_token_id = 0, rms_norm_eps = 1e-6, transformers_version = "4.27.0.dev0", num_key_value_heads = ABSENT,
  tie_word_embeddings = ABSENT, _name_or_path = "converted",
} }
M["Llama 2"] = { with(llama, { _name_or_path = "meta-llama/Llama-2-7b-hf", num_key_value_heads = 4 }) }
M["TinyLlama, Yi"] = { with(llama, { rope_theta = 5000000.0, pad_token_id = 0, attention_bias = ABSENT }) }
M["Llama 3.1"] = { llama3 }
M["Llama 3.2"] = { with(llama3, { tie_word_embeddings = true, head_dim = 10 }) }
M["Llama 3.2 of unsloth"] = { with(llama3, {
  tie_word_embeddings = true, head_dim = 10, pad_token_id = 128004, unsloth_fixed = true, unsloth_version = "2024.12",
}) }
M["Llama 3.1, written by transformers 5"] = { with(llama, {
  torch_dtype = ABSENT, dtype = "bfloat16", transformers_version = "5.2.0", rope_theta = ABSENT, rope_scaling = ABSENT,
  pad_token_id = null, head_dim = 10, rope_parameters = {
    factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192,
    rope_type = "llama3", rope_theta = 500000.0,
  },
}) }
M["a merge of mergekit"] = { with(llama3, { _name_or_path = "a/b", _attn_implementation_autoset = true }) }
M["a model of a trainer with its own notes"] = {
  with(llama, { my_run = "7", neftune_noise_alpha = 5, max_seq_lenght = 9 }), told = "max_seq_lenght, my_run",
}
M["SmolLM2"] = { with(llama, {
  is_llama_config = true, rope_interleaved = false, tie_word_embeddings = true, rope_theta = 100000, pad_token_id = 2,
  ["transformers.js_config"] = { kv_cache_dtype = { q4f16 = "float16", fp16 = "float16" } },
}) }
M["Mistral 7B v0.1"] = { config {
  architectures = { "MistralForCausalLM" }, model_type = "mistral", hidden_act = "silu", rms_norm_eps = 1e-5,
  max_position_embeddings = 32768, rope_theta = 10000.0, sliding_window = 4096,
} }
M["Mistral 7B v0.3"] = { config {
  architectures = { "MistralForCausalLM" }, model_type = "mistral", attention_dropout = 0.0, hidden_act = "silu",
  max_position_embeddings = 32768, rms_norm_eps = 1e-5, rope_theta = 1000000.0, sliding_window = null,
} }
M["Mistral Nemo"] = { config {
  architectures = { "MistralForCausalLM" }, model_type = "mistral", attention_dropout = 0.0, head_dim = 12,
  hidden_act = "silu", max_position_embeddings = 1024000, rms_norm_eps = 1e-5, rope_theta = 1000000.0,
  sliding_window = null,
} }

-- ---- Qwen -----------------------------------------------------------------------------------------------------------

local qwen2 = config {
  architectures = { "Qwen2ForCausalLM" }, model_type = "qwen2", attention_dropout = 0.0, hidden_act = "silu",
  max_position_embeddings = 32768, max_window_layers = 21, rms_norm_eps = 1e-6, rope_theta = 1000000.0,
  sliding_window = 32768, use_sliding_window = false,
}
M["Qwen2"] = { with(qwen2, { use_mrope = false }) }
M["Qwen2.5"] = { with(qwen2, { max_position_embeddings = 131072, sliding_window = 131072, max_window_layers = 70 }) }
M["Qwen2.5, tied"] = { with(qwen2, { tie_word_embeddings = true }) }
M["Qwen2.5, written by transformers 4.53"] = { with(qwen2, {
  layer_types = { "full_attention", "full_attention" }, rope_scaling = null, sliding_window = null,
}) }
M["Qwen2.5 of a million tokens"] = { with(qwen2, {
  dual_chunk_attention_config = { chunk_size = 262144, local_size = 8192, original_max_position_embeddings = 262144 },
}), told = "dual_chunk_attention_config" }
M["a distillation of DeepSeek R1 into Qwen2.5"] = { with(qwen2, {
  max_position_embeddings = 131072, sliding_window = 4096, use_mrope = false,
}) }
local qwen3 = config {
  architectures = { "Qwen3ForCausalLM" }, model_type = "qwen3", attention_bias = false, attention_dropout = 0.0,
  head_dim = 16, hidden_act = "silu", max_position_embeddings = 40960, max_window_layers = 36, rms_norm_eps = 1e-6,
  rope_scaling = null, rope_theta = 1000000, sliding_window = null, use_sliding_window = false,
}
M["Qwen3"] = { qwen3 }
M["Qwen3, longer by yarn"] = { with(qwen3, {
  rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 32768 },
}) }
M["a distillation of DeepSeek R1 0528 into Qwen3"] = { with(qwen3, {
  max_position_embeddings = 131072, rope_scaling = {
    attn_factor = 0.8782488562869419, factor = 4.0, original_max_position_embeddings = 32768, rope_type = "yarn",
  },
}), told = "rope_scaling.attn_factor" }
M["Qwen3, written by transformers 5"] = { with(qwen3, {
  torch_dtype = ABSENT, dtype = "bfloat16", layer_types = { "full_attention", "full_attention" }, pad_token_id = null,
  rope_theta = ABSENT, rope_scaling = ABSENT, rope_parameters = { rope_theta = 1000000, rope_type = "default" },
}) }
M["Qwen3-VL"] = { {
  architectures = { "Qwen3VLForConditionalGeneration" }, model_type = "qwen3_vl", image_token_id = 50,
  tie_word_embeddings = true, transformers_version = "4.57.0.dev0", video_token_id = 51, vision_end_token_id = 52,
  vision_start_token_id = 53, text_config = without(config {
    model_type = "qwen3_vl_text", attention_bias = false, attention_dropout = 0.0, dtype = "bfloat16", head_dim = 16,
    hidden_act = "silu", max_position_embeddings = 262144, rms_norm_eps = 1e-6, rope_theta = 5000000,
    tie_word_embeddings = true, rope_scaling = {
      mrope_interleaved = true, mrope_section = { 4, 2, 2 }, rope_type = "default",
    },
  }), vision_config = { depth = 24, hidden_size = 1024, model_type = "qwen3_vl" },
} }

-- ---- Gemma ----------------------------------------------------------------------------------------------------------

local gemma = config {
  architectures = { "GemmaForCausalLM" }, model_type = "gemma", attention_bias = false, attention_dropout = 0.0,
  head_dim = 16, hidden_act = "gelu", hidden_activation = null, max_position_embeddings = 8192, pad_token_id = 0,
  rms_norm_eps = 1e-6, rope_scaling = null, rope_theta = 10000.0, tie_word_embeddings = ABSENT,
}
M["Gemma"] = { gemma }
M["Gemma 1.1"] = { with(gemma, { hidden_activation = "gelu_pytorch_tanh", hidden_act = "gelu_pytorch_tanh" }) }
M["Gemma 2"] = { config {
  architectures = { "Gemma2ForCausalLM" }, model_type = "gemma2", attention_bias = false, attention_dropout = 0.0,
  attn_logit_softcapping = 50.0, cache_implementation = "hybrid", final_logit_softcapping = 30.0, head_dim = 16,
  hidden_act = "gelu_pytorch_tanh", hidden_activation = "gelu_pytorch_tanh", max_position_embeddings = 8192,
  pad_token_id = 0, query_pre_attn_scalar = 256, rms_norm_eps = 1e-6, rope_theta = 10000.0, sliding_window = 4096,
  sliding_window_size = 4096, tie_word_embeddings = ABSENT,
} }
local gemma3 = config {
  architectures = { "Gemma3ForCausalLM" }, model_type = "gemma3_text", attention_bias = false, attention_dropout = 0.0,
  attn_logit_softcapping = null, cache_implementation = "hybrid", eos_token_id = { 1, 106 },
  final_logit_softcapping = null, head_dim = 16, hidden_activation = "gelu_pytorch_tanh",
  max_position_embeddings = 32768, pad_token_id = 0, query_pre_attn_scalar = 256, rms_norm_eps = 1e-6,
  rope_local_base_freq = 10000, rope_scaling = null, rope_theta = 1000000, sliding_window = 512,
  sliding_window_pattern = 6, tie_word_embeddings = ABSENT,
}
M["Gemma 3 1B"] = { gemma3 }
M["Gemma 3 270M"] = { with(gemma3, {
  _sliding_window_pattern = 6, sliding_window_pattern = ABSENT, use_bidirectional_attention = false,
  layer_types = { "sliding_attention", "sliding_attention" },
}) }
M["Gemma 3, written by transformers 5"] = { with(gemma3, {
  torch_dtype = ABSENT, dtype = "bfloat16", rope_theta = ABSENT, rope_scaling = ABSENT, rope_local_base_freq = ABSENT,
  _sliding_window_pattern = 6, sliding_window_pattern = ABSENT, tie_word_embeddings = true,
  layer_types = { "sliding_attention", "full_attention" }, rope_parameters = {
    full_attention = { rope_type = "linear", rope_theta = 1000000.0, factor = 8.0 },
    sliding_attention = { rope_type = "default", rope_theta = 10000.0 },
  },
}) }

-- ---- Phi, GLM -------------------------------------------------------------------------------------------------------

local phi3 = config {
  architectures = { "Phi3ForCausalLM" }, model_type = "phi3", attention_bias = false, attention_dropout = 0.0,
  auto_map = { AutoConfig = "configuration_phi3.Phi3Config", AutoModelForCausalLM = "modeling_phi3.Phi3ForCausalLM" },
  embd_pdrop = 0.0, hidden_act = "silu", max_position_embeddings = 4096, original_max_position_embeddings = 4096,
  pad_token_id = 32000, resid_pdrop = 0.0, rms_norm_eps = 1e-5, rope_scaling = null, rope_theta = 10000.0,
  sliding_window = 2047,
}
M["Phi-3 mini"] = { phi3 }
M["Phi-3 mini of 128k"] = { with(phi3, {
  max_position_embeddings = 131072, sliding_window = 262144, rope_scaling = {
    type = "su", short_factor = { 1.0, 1.1, 1.2, 1.3, 1.4 }, long_factor = { 1.0, 1.5, 2.0, 3.0, 4.0 },
  },
}) }
M["Phi-4"] = { with(phi3, {
  max_position_embeddings = 16384, original_max_position_embeddings = 16384, rope_theta = 250000, sliding_window = null,
  auto_map = ABSENT,
}) }
M["Phi-4 mini"] = { with(phi3, {
  full_attn_mod = 1, interpolate_factor = 1, lm_head_bias = false, mlp_bias = false, partial_rotary_factor = 0.8,
  max_position_embeddings = 131072, sliding_window = 262144, tie_word_embeddings = true, rope_scaling = {
    type = "longrope", short_factor = { 1, 1.1, 1.2, 1.3 }, long_factor = { 1, 1.5, 2.0, 3.0 },
  },
}) }
M["Phi-2"] = { config {
  architectures = { "PhiForCausalLM" }, model_type = "phi", attention_dropout = 0.0, embd_pdrop = 0.0,
  hidden_act = "gelu_new", layer_norm_eps = 1e-5, max_position_embeddings = 2048, partial_rotary_factor = 0.4,
  qk_layernorm = false, resid_pdrop = 0.1, rope_scaling = null, rope_theta = 10000.0, num_key_value_heads = 4,
}, told = "resid_pdrop" }
M["GLM-4 9B"] = { config {
  architectures = { "GlmForCausalLM" }, model_type = "glm", attention_bias = true, attention_dropout = 0.0,
  head_dim = 16, eos_token_id = { 151329, 151336, 151338 }, hidden_act = "silu", max_position_embeddings = 131072,
  pad_token_id = 3,
  rms_norm_eps = 1.5625e-7, rope_theta = 10000.0, partial_rotary_factor = 0.5,
} }
M["GLM-4 0414"] = { config {
  architectures = { "Glm4ForCausalLM" }, model_type = "glm4", attention_bias = false, attention_dropout = 0.0,
  eos_token_id = { 151329, 151336, 151338 }, head_dim = 16, hidden_act = "silu", max_position_embeddings = 32768,
  pad_token_id = 3, partial_rotary_factor = 0.5, rms_norm_eps = 1e-5, rope_theta = 10000.0,
} }

for _, entry in pairs(M) do entry[1] = without(entry[1]) end

return M
