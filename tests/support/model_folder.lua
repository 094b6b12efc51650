-- SPDX-License-Identifier: Apache-2.0
--- Every file and every key of a model folder, with what reads it. model_folder_spec.lua holds it against the sources
-- and the running program: a row that is wrong, or missing, fails.
local M = {}

-- ---- files ----------------------------------------------------------------------------------------------------------

--- name -> folders of the tree whose sources read it.
M.files = {
  ["config.json"] = "lua/bs/model lua/bs/data lua/bs/cli src/text recipes",
  ["model.safetensors"] = "lua/bs/model", ["model.safetensors.index.json"] = "lua/bs/model",
  ["generation_config.json"] = "src/text lua/bs/data recipes", ["tokenizer.json"] = "src/text recipes",
  ["tokenizer_config.json"] = "src/text lua/bs/data recipes", ["chat_template.jinja"] = "lua/bs/data",
  ["chat_template.json"] = "lua/bs/data",
  ["special_tokens_map.json"] = "src/text", ["added_tokens.json"] = "src/text",
  ["adapter_config.json"] = "lua/bs/model lua/bs/train recipes", -- of an adapter; beside a model it is told
}

--- Files that the sources name and that are in no model folder.
M.elsewhere = { ["reference.json"] = true }

--- Names of files that the index says, or that are told where they are not read: {name, "read" or "told"}.
M.weights = {
  { "model-00001-of-00002.safetensors", "read" }, { "model.safetensors", "read" },
  { "model-00009-of-00009.safetensors", "told" }, { "pytorch_model.bin", "told" },
  { "pytorch_model-00001-of-00002.bin", "told" }, { "consolidated.safetensors", "told" },
  { "consolidated.00.pth", "told" }, { "tf_model.h5", "told" }, { "flax_model.msgpack", "told" },
  { "model.Q4_K_M.gguf", "told" },
}

--- Files of published folders that say nothing about what is computed here: passed over without a word.
M.passed_over = {
  "README.md", "LICENSE", ".gitattributes", "vocab.json", "merges.txt", "tokenizer.model", "preprocessor_config.json",
  "video_preprocessor_config.json", "processor_config.json", "configuration_phi3.py", "modeling_phi3.py",
  "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "all_results.json",
  "quantize_config.json", "USE_POLICY.md",
}

-- ---- keys of model.safetensors.index.json and of a header -----------------------------------------------------------

--- file -> {key = what reads it}; false: passed over.
M.file_keys = {
  ["model.safetensors.index.json"] = { weight_map = "lua/bs/model/checkpoint.lua", metadata = false },
  ["tokenizer_config.json"] = {
    added_tokens_decoder = "src/text/beside.c", bos_token = "src/text/beside.c", eos_token = "src/text/beside.c",
    unk_token = "src/text/beside.c", sep_token = "src/text/beside.c", pad_token = "src/text/beside.c",
    cls_token = "src/text/beside.c", mask_token = "src/text/beside.c", add_bos_token = "src/text/beside.c",
    additional_special_tokens = "src/text/beside.c", extra_special_tokens = "src/text/beside.c",
    chat_template = "lua/bs/data/templates.lua", add_prefix_space = "src/text/beside.c",
    split_special_tokens = "src/text/beside.c",
    -- Rows end with eos and prompts never do, whatever add_eos_token says.
    add_eos_token = false, clean_up_tokenization_spaces = false,
    legacy = false, model_max_length = false,
    padding_side = false, truncation_side = false, sp_model_kwargs = false, spaces_between_special_tokens = false,
    tokenizer_class = false, use_default_system_prompt = false,
  },
  ["chat_template.json"] = { chat_template = "lua/bs/data/templates.lua" },
  ["special_tokens_map.json"] = {
    bos_token = "src/text/beside.c", eos_token = "src/text/beside.c", pad_token = "src/text/beside.c",
    additional_special_tokens = "src/text/beside.c",
  },
  ["generation_config.json"] = { eos_token_id = "src/text/beside.c", bos_token_id = "src/text/beside.c" },
}

-- ---- keys of config.json --------------------------------------------------------------------------------------------

local ALL <const> = "gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss llama mistral mixtral phi phi3 qwen2 qwen3 "
  .. "qwen3_moe qwen3_vl qwen3_vl_moe"

--- key -> families whose config(hf) reads it; in a multimodal file, of its text_config.
M.read = {
  vocab_size = ALL, hidden_size = ALL, intermediate_size = ALL, num_hidden_layers = ALL, num_attention_heads = ALL,
  num_key_value_heads = ALL, head_dim = ALL, tie_word_embeddings = ALL, max_position_embeddings = ALL,
  original_max_position_embeddings = ALL, partial_rotary_factor = ALL, rope_theta = ALL, rope_scaling = ALL,
  rope_parameters = ALL, hidden_act = ALL,
  rms_norm_eps = "gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss llama mistral mixtral phi3 qwen2 qwen3 qwen3_moe "
    .. "qwen3_vl qwen3_vl_moe",
  layer_norm_eps = "phi",
  attention_bias = "gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_oss llama qwen3 qwen3_moe qwen3_vl qwen3_vl_moe",
  mlp_bias = "llama", qk_layernorm = "phi", hidden_activation = "gemma gemma2 gemma3_text",
  query_pre_attn_scalar = "gemma2 gemma3_text", attn_logit_softcapping = "gemma2",
  final_logit_softcapping = "gemma2 gemma3_text",
  sliding_window = "gemma2 gemma3_text gpt_oss mistral mixtral phi3 qwen2 qwen3 qwen3_moe qwen3_vl_moe",
  layer_types = "gemma2 gemma3_text gpt_oss mistral mixtral phi3 qwen2 qwen3 qwen3_moe qwen3_vl_moe",
  use_sliding_window = "qwen2 qwen3 qwen3_moe qwen3_vl_moe",
  max_window_layers = "qwen2 qwen3 qwen3_moe qwen3_vl_moe", sliding_window_pattern = "gemma3_text",
  _sliding_window_pattern = "gemma3_text", rope_local_base_freq = "gemma3_text",
  use_bidirectional_attention = "gemma3_text", decoder_sparse_step = "qwen3_moe qwen3_vl_moe",
  first_k_dense_replace = "glm4_moe", mlp_only_layers = "qwen3_moe qwen3_vl_moe",
  moe_intermediate_size = "glm4_moe qwen3_moe qwen3_vl_moe", n_group = "glm4_moe", n_routed_experts = "glm4_moe",
  n_shared_experts = "glm4_moe",
  norm_topk_prob = "glm4_moe qwen3_moe qwen3_vl_moe", num_experts = "qwen3_moe qwen3_vl_moe",
  num_experts_per_tok = "glm4_moe gpt_oss mixtral qwen3_moe qwen3_vl_moe", num_local_experts = "gpt_oss mixtral",
  quantization_config = "gpt_oss", routed_scaling_factor = "glm4_moe", swiglu_alpha = "gpt_oss",
  swiglu_limit = "gpt_oss", topk_group = "glm4_moe", use_qk_norm = "glm4_moe",
  router_aux_loss_coef = "gpt_oss mixtral qwen3_moe qwen3_vl_moe", router_jitter_noise = "mixtral",
  output_router_logits = "gpt_oss mixtral qwen3_moe qwen3_vl_moe", experts_per_token = "gpt_oss",
  initial_context_length = "gpt_oss",
}

--- Keys that the authors' programs of these families have and do not compute with.
M.no_effect = {
  hidden_act = "gemma2 gemma3_text", norm_topk_prob = "qwen3_vl_moe",
  mrope_section = "qwen3_vl qwen3_vl_moe", mrope_interleaved = "qwen3_vl qwen3_vl_moe",
  router_aux_loss_coef = "gpt_oss mixtral qwen3_moe qwen3_vl_moe",
  output_router_logits = "gpt_oss mixtral qwen3_moe qwen3_vl_moe", router_jitter_noise = "mixtral",
  experts_per_token = "gpt_oss", initial_context_length = "gpt_oss",
}

--- Keys that other files than the families read.
M.read_elsewhere = {
  model_type = "lua/bs/model/find_family.lua", architectures = "lua/bs/model/keys.lua",
  text_config = "lua/bs/nn/config.lua", quantization_config = "lua/bs/model/quantised.lua",
  quantization = "lua/bs/model/quantised.lua", compression_config = "lua/bs/model/quantised.lua",
  num_nextn_predict_layers = "lua/bs/model/unread.lua", eos_token_id = "src/text/beside.c",
  bos_token_id = "src/text/beside.c",
}

--- Keys inside rope_scaling or rope_parameters -> types that read them.
M.rope = {
  rope_type = "default linear llama3 yarn longrope", type = "default linear llama3 yarn longrope",
  rope_theta = "default linear llama3 yarn longrope", partial_rotary_factor = "default linear llama3 yarn longrope",
  original_max_position_embeddings = "default linear llama3 yarn longrope", factor = "linear llama3 yarn longrope",
  low_freq_factor = "llama3", high_freq_factor = "llama3", beta_fast = "yarn", beta_slow = "yarn", truncate = "yarn",
  attention_factor = "yarn longrope", mscale = "yarn", mscale_all_dim = "yarn", short_factor = "longrope",
  long_factor = "longrope",
}

--- Keys that some published family computes with (lua/bs/model/key_rules.lua), where the family does not read them:
-- what does nothing in a llama model of 2 layers, heads of 8, 32 channels, epsilon 1e-5 and 4096 positions, and what is
-- refused. For the keys that are not here null, false and empty values do nothing and a text is refused.
M.values = {
  logits_scaling = { { 1, 1.0 }, { 16, 0.0625, "1" } }, embedding_multiplier = { { 1 }, { 12 } },
  query_pre_attn_scalar = { { 8 }, { 64 } }, dim_model_base = { { 32 }, { 256 } },
  mlp_multipliers = { { { 1, 1 } }, { { 1, 2 } } }, scale_attn_weights = { { true }, { false } },
  final_logit_softcapping = { { 0, 0.0 }, { 30.0 } }, clip_qkv = { { 0 }, { 8.0 } },
  sliding_window = { { 4096, 5000 }, { 64, "x" } }, sliding_window_size = { {}, { 64 } },
  sliding_window_pattern = { { 6 }, {} }, _sliding_window_pattern = { { 6 }, {} }, max_window_layers = { { 21 }, {} },
  layer_types = { { { "full_attention", "full_attention" } }, { { "full_attention", "sliding_attention" } } },
  is_causal = { { true }, { false } }, attention_chunk_size = { { 0 }, { 8192 } },
  rms_norm_epsilon = { { 1e-5, 1e-6 }, {} }, layer_norm_eps = { { 1e-5, 1e-6 }, {} }, norm_eps = { { 1e-5, 1e-6 }, {} },
  layer_norm_epsilon = { { 1e-5, 1e-6 }, {} }, layernorm_epsilon = { { 1e-5, 1e-6 }, {} },
  norm_epsilon = { { 1e-5, 1e-6 }, {} }, rms_norm_eps = { { 1e-5, 1e-6 }, {} },
  qkv_bias = { { false }, { true } }, no_bias = { { true }, { false } }, lm_head_bias = { { false }, { true } },
  rotary_emb_base = { { 10000 }, { 500000 } }, rotary_dim = { { 8 }, { 4 } }, rotary_pct = { { 1.0 }, { 0.25 } },
  attn_factor = { { 1, 0.9 }, {} }, use_rope = { { true }, { false } }, no_rope_layers = { { { 1, 1 } }, { { 1, 0 } } },
  position_embedding_type = { { "rope", "absolute" }, { "alibi" } },
  hidden_activation = { { "silu", "swish" }, { "gelu" } }, num_local_experts = { { 0 }, { 8 } },
  mlp_only_layers = { { {} }, { { 1 } } },
}

return M
