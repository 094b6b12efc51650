-- SPDX-License-Identifier: Apache-2.0
--- config.json tables of small models, one a family, with whatever the family can switch on.
local M = { VOCAB = 600 } -- several tiles of the head

--- config.json of a small model with the usual keys.
function M.config(kind, over)
  local c = {
    model_type = kind, vocab_size = M.VOCAB, hidden_size = 32, intermediate_size = 40, num_hidden_layers = 3,
    num_attention_heads = 4, num_key_value_heads = 2, head_dim = 8, tie_word_embeddings = false,
  }
  for key, value in pairs(over or {}) do c[key] = value end
  return c
end

M.long_factors = { 1.0, 1.5, 2.0, 3.0 }
--- config.json of a small model of every family, by model_type.
M.small = {
  llama = M.config("llama", { attention_bias = true, mlp_bias = true }),
  qwen2 = M.config("qwen2", { use_sliding_window = true, sliding_window = 5, max_window_layers = 1 }),
  qwen3 = M.config("qwen3", { attention_bias = true }),
  qwen3_vl = { model_type = "qwen3_vl", tie_word_embeddings = true, text_config = M.config "qwen3_vl_text" },
  mistral = M.config("mistral", { sliding_window = 4 }),
  gemma = M.config("gemma", { num_key_value_heads = 1, tie_word_embeddings = true }),
  gemma2 = M.config("gemma2", { query_pre_attn_scalar = 12, sliding_window = 5, tie_word_embeddings = true,
    attn_logit_softcapping = 2.0, final_logit_softcapping = 3.0 }),
  gemma3_text = M.config("gemma3_text", { query_pre_attn_scalar = 12, sliding_window = 5,
    sliding_window_pattern = 2, rope_scaling = { rope_type = "linear", factor = 8.0 } }),
  phi = M.config("phi", { qk_layernorm = true }),
  phi3 = M.config("phi3", { sliding_window = 6, max_position_embeddings = 64, original_max_position_embeddings = 16,
    rope_scaling = { type = "su", short_factor = { 1.0, 1.1, 1.2, 1.3 }, long_factor = M.long_factors } }),
  glm = M.config("glm", { attention_bias = true }),
  glm4 = M.config("glm4", { attention_bias = false }),
  qwen3_moe = M.config("qwen3_moe", { num_experts = 6, num_experts_per_tok = 2, moe_intermediate_size = 24,
    norm_topk_prob = true, mlp_only_layers = { 1 } }),
  qwen3_vl_moe = { model_type = "qwen3_vl_moe", tie_word_embeddings = false,
    text_config = M.config("qwen3_vl_moe_text",
      { num_experts = 5, num_experts_per_tok = 3, moe_intermediate_size = 24 }) },
  mixtral = M.config("mixtral", { num_local_experts = 4, num_experts_per_tok = 2, sliding_window = 6 }),
  glm4_moe = M.config("glm4_moe", { n_routed_experts = 6, num_experts_per_tok = 2, moe_intermediate_size = 24,
    n_shared_experts = 2, n_group = 3, topk_group = 2, routed_scaling_factor = 1.5, first_k_dense_replace = 1,
    use_qk_norm = true, attention_bias = true }),
  gpt_oss = M.config("gpt_oss", { intermediate_size = 64, num_local_experts = 4, num_experts_per_tok = 2,
    sliding_window = 5, swiglu_limit = 0.5 }),
}

--- What makes a family's choice of experts smooth: each token goes to all of them.
M.all_experts = {
  qwen3_moe = { num_experts_per_tok = 6 }, mixtral = { num_experts_per_tok = 4 }, gpt_oss = { num_experts_per_tok = 4 },
  glm4_moe = { num_experts_per_tok = 6, topk_group = 3 },
  qwen3_vl_moe = { text_config = M.config("qwen3_vl_moe_text",
    { num_experts = 5, num_experts_per_tok = 5, moe_intermediate_size = 24 }) },
}

return M
