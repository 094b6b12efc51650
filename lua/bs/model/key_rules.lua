-- SPDX-License-Identifier: Apache-2.0
--- Keys of published config.json files, as data: those that some family computes with, and those that say nothing
-- about the numbers of a decoder. keys.lua holds a checkpoint to it.
local config = require "bs.nn.config"

local rules = {}

-- ---- when a key does nothing ---------------------------------------------------------------------------------------
-- A rule is a list of values that do nothing, besides null, false, empty lists and texts (a strict list holds all such
-- values); or a function (value, at, model) -> does it nothing? "tell": nothing, and the user is told. at: the table
-- that the key stands in. model: {c, has(pattern), head_bias}: what the family made of config.json, whether a tensor of
-- its layers has such a name, whether its head has a bias.

local OFF <const> = {} -- whatever is there does something
local ZERO <const>, ONE <const>, TRUE <const> = { 0 }, { 1 }, { true, strict = true }

local function absent(v) return not config.present(v) or v == false end

-- Equal to a number that the family has taken from another key, or from a default.
local function same_as(name)
  return function(value, _, model) return value == model.c[name] end
end

-- Another word for the epsilon of the norms: the family's own decides where it is there.
local function other_eps(value, at, model)
  local own = model.c.eps_key
  return value == model.c.eps or own ~= nil and config.present(at[own]) and "tell"
end

-- A flag of tensors that the family has anyway: files without them are refused, so the flag says nothing new.
local function tensors(...)
  local patterns = { ... }
  return function(value, _, model)
    for _, pattern in ipairs(patterns) do
      if value == true and model.has(pattern) then return true end
    end
    return false
  end
end

local function no_window(at)
  local w, most = at.sliding_window, at.max_position_embeddings
  return absent(w) or at.use_sliding_window == false
    or math.type(w) == "integer" and math.type(most) == "integer" and w >= most
end

local function window(_, at) return no_window(at) end

-- A list of layers that are all of one kind.
local function all(kind)
  return function(value)
    if type(value) ~= "table" then return false end
    for _, v in ipairs(value) do
      if v ~= kind then return false end
    end
    return true
  end
end

local function same_act(value, _, model)
  return model.c.act ~= nil and (config.act_word(value) or value) == model.c.act
end

local function interleaved(value, _, model) return value == true and model.c.rope_style == "interleaved" end

local function shared_experts(value, _, model) return value == 0 or model.has "shared_expert" end

-- Written into some files; the authors' own programs do not agree on it, and transformers does not compute with it.
local function told(value) return value == 1 or "tell" end

local function same_theta(value, _, model) return type(model.c.rope) == "table" and value == model.c.rope.theta end

local qkv_bias, mlp_bias = tensors("[qkv]_proj%.bias$", "qkv%.bias$", "value%.bias$"), tensors "mlp.*%.bias$"
local any_bias, qk_norm = tensors "%.bias$", tensors "[qk]_%w*norm"

-- ---- keys that some published family computes with ------------------------------------------------------------------

local computed = {
  multipliers = {
    embedding_multiplier = ONE, residual_multiplier = ONE, attention_multiplier = ONE, logits_scaling = ONE,
    logit_scale = ONE, logits_scale = ONE, lm_head_multiplier = ONE, key_multiplier = ONE, mlp_multipliers = all(1),
    ssm_multipliers = all(1), attention_in_multiplier = ONE, attention_out_multiplier = ONE, embed_scale = ONE,
    embedding_scale = ONE, emb_scale = ONE, scale_emb = ONE, scale_depth = ONE, dim_model_base = same_as "channels",
    embedding_multiplier_scale = ONE, output_multiplier_scale = ONE, attn_output_multiplier = ONE,
    residual_scale = ONE, mup_width_multiplier = ONE, mup_attn_multiplier = ONE, mup_embedding_multiplier = ONE,
    mup_output_alpha = ONE, mup_scale_emb = ONE, mup_width_scale = ONE, mup_embeddings_scale = ONE,
    mup_use_scaling = OFF, use_mup = OFF, routed_scaling_factor = ONE, scale_embedding = OFF, scale_embeddings = OFF,
    normalize_embedding = OFF, normalize_embeddings = OFF, width_scale = ONE,
  },
  scales = {
    query_pre_attn_scalar = same_as "head_dim", attention_scale = OFF, attn_scale = OFF, softmax_scale = OFF,
    scale_attn_weights = TRUE, scale_attn_by_inverse_layer_idx = OFF, attn_temperature_tuning = OFF,
    attention_softmax_in_fp32 = { true }, query_key_scale = OFF, use_logn_attn = OFF,
    apply_residual_connection_post_layernorm = OFF,
  },
  caps = {
    attn_logit_softcapping = ZERO, final_logit_softcapping = ZERO, attn_logit_softcap = ZERO,
    final_logit_softcap = ZERO, logit_softcapping = ZERO, logits_soft_cap = ZERO, logit_cap = ZERO,
    attn_logit_cap = ZERO, router_logit_softcapping = ZERO, clip_qkv = ZERO, swiglu_limit = ZERO, swiglu_alpha = OFF,
    gelu_clip = ZERO,
  },
  windows = {
    sliding_window = window, use_sliding_window = OFF, sliding_window_pattern = window,
    _sliding_window_pattern = window, max_window_layers = window, interleaved_sliding_window = OFF,
    sliding_window_size = function(value, at) return value == at.sliding_window end,
    layer_types = all "full_attention", attention_chunk_size = ZERO, attention_window = ZERO, window_size = ZERO,
    local_attention = ZERO, global_attn_every_n_layers = ONE, full_attention_interval = ONE, full_attn_mod = ONE,
    attention_layers = all "global", blocksparse_num_local_blocks = ZERO, dense_attention_every_n_layers = ONE,
    is_causal = TRUE, use_bidirectional_attention = OFF, bidirectional = OFF, is_bidirectional = OFF,
    add_cross_attention = OFF, is_encoder_decoder = OFF, attention_sinks = OFF, attention_sink = OFF,
    num_kv_shared_layers = ZERO, num_meta_tokens = ZERO,
  },
  norms = {
    rms_norm_eps = other_eps, rms_norm_epsilon = other_eps, layer_norm_eps = other_eps,
    layer_norm_epsilon = other_eps, layernorm_epsilon = other_eps, norm_eps = other_eps,
    norm_epsilon = other_eps, use_qk_norm = qk_norm, qk_norm = qk_norm,
    qk_layernorm = qk_norm, use_qk_layernorm = qk_norm, use_qknorm = qk_norm,
    do_layer_norm_before = TRUE, post_layer_norm = OFF, use_post_norm = OFF, post_norm = OFF, norm_after = OFF,
    use_parallel_residual = OFF, parallel_residual = OFF, parallel_attn = OFF, new_decoder_architecture = OFF,
    rms_norm_unit_offset = OFF, norm_add_unit_offset = OFF, layernorm_1p = OFF, use_layer_scale = OFF,
  },
  biases = {
    attention_bias = qkv_bias, qkv_bias = qkv_bias, attn_bias = qkv_bias,
    use_qkv_bias = qkv_bias, add_qkv_bias = qkv_bias, attention_qkv_bias = qkv_bias,
    attention_out_bias = tensors("o_proj%.bias$", "out_proj%.bias$", "dense%.bias$"),
    mlp_bias = mlp_bias, ffn_bias = mlp_bias,
    feed_forward_bias = mlp_bias, use_bias = any_bias, bias = any_bias,
    add_bias_linear = any_bias, no_bias = TRUE, use_mlp_bias = mlp_bias,
    lm_head_bias = function(value, _, model) return value == true and model.head_bias end,
  },
  rope = {
    rope_scaling = OFF, rope_parameters = OFF, rope_theta = same_theta, rotary_emb_base = same_theta,
    rope_base = same_theta, rotary_base = same_theta, rope_local_base_freq = OFF, global_rope_theta = OFF,
    local_rope_theta = OFF, rope_type = { "default" }, factor = ONE, attention_factor = ONE, attn_factor = told,
    low_freq_factor = OFF, high_freq_factor = OFF, beta_fast = { 32 }, beta_slow = ONE, short_factor = all(1),
    long_factor = all(1), short_mscale = ONE, long_mscale = ONE, mscale = { 0, 1 }, mscale_all_dim = { 0, 1 },
    extrapolation_factor = ONE, llama_4_scaling_beta = ZERO, partial_rotary_factor = ONE, rotary_pct = ONE,
    rotary_percent = ONE, rope_pct = ONE, rope_percentage = ONE, rotary_dim = same_as "head_dim", rope_ratio = ONE,
    rope_interleave = interleaved, rope_interleaved = interleaved, use_interleaved_rope = interleaved,
    no_rope_layers = all(1), nope_layer_interval = ZERO,
    no_rope_layer_interval = function(_, at) return config.present(at.no_rope_layers) end,
    use_rope = TRUE, use_rotary = TRUE, rotary = TRUE, use_rotary_embedding = TRUE, alibi = OFF, use_alibi = OFF,
    position_embedding_type = { "rope", "rotary", "rope_gptj", "absolute" }, use_mrope = OFF, mrope_section = OFF,
    mrope_interleaved = OFF, use_dynamic_ntk = OFF, rope_xpos = OFF,
  },
  activations = {
    hidden_act = same_act, hidden_activation = same_act, activation_function = same_act, activation = same_act,
    hidden_function = same_act, act_fn = same_act, mlp_activation = same_act, mlp_hidden_act = same_act,
    glu_activation = same_act, activation_sparsity_pattern = all(0),
  },
  experts = {
    num_local_experts = ZERO, num_experts = ZERO, n_routed_experts = ZERO, moe_num_experts = ZERO,
    n_shared_experts = shared_experts, num_shared_experts = shared_experts,
    moe_layer_freq = ONE, decoder_sparse_step = ONE, mlp_only_layers = OFF, zero_expert_num = ZERO,
  },
}

--- key -> its rule.
rules.computed = {}
for _, group in pairs(computed) do
  for key, rule in pairs(group) do rules.computed[key] = rule end
end

--- Names that look like such a key without being one of the list: taken as one whose only value that does nothing is 1.
rules.alike = { "multiplier", "soft_?cap", "logits?_scal", "^mup_", "^rope_", "^rotary", "alibi" }

--- Is a value empty in any way? Such a key says nothing, whatever it is called.
function rules.empty(value)
  return value == false or value == "" or type(value) == "table" and next(value) == nil
end

--- Does a key with this value nothing (true, false or "tell")? rule: of `computed`, or nil for a name that is alike.
function rules.does_nothing(rule, value, at, model)
  rule = rule or ONE
  if type(rule) == "function" then
    return rules.empty(value) or rule(value, at, model)
  end
  for _, v in ipairs(rule) do
    if v == value then return true end
  end
  return not rule.strict and rules.empty(value)
end

-- ---- keys that say nothing about the numbers ------------------------------------------------------------------------

--- Passed over without a word: what programs write about themselves, ids, defaults of generation, the random start of
-- training, costs, parts of a multimodal model that are told by their tensors.
rules.quiet = {}
for name in ([[
  model_type architectures _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype auto_map
  use_cache cache_implementation attn_implementation _attn_implementation _attn_implementation_autoset
  _attn_implementation_internal _flash_attn_2_enabled use_flash_attn tokenizer_class torchscript use_bfloat16
  bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
  initializer_range initializer_factor init_std init_method pretraining_tp gradient_checkpointing neftune_noise_alpha
  max_position_embeddings original_max_position_embeddings max_sequence_length model_max_length seq_length n_positions
  n_ctx max_seq_len vocab_size_padded pad_vocab_size_multiple_of
  output_attentions output_hidden_states output_scores return_dict return_dict_in_generate is_decoder
  cross_attention_hidden_size tie_encoder_decoder pruned_heads chunk_size_feed_forward tf_legacy_loss problem_type
  finetuning_task task_specific_params id2label label2id num_labels prefix keys_to_ignore_at_inference
  max_length min_length max_new_tokens do_sample temperature top_k top_p typical_p repetition_penalty length_penalty
  no_repeat_ngram_size encoder_no_repeat_ngram_size num_beams num_beam_groups diversity_penalty num_return_sequences
  early_stopping bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id
  exponential_decay_length_penalty remove_invalid_values
  unsloth_version unsloth_fixed unsloth_save_pretrained is_llama_config transformers.js_config interpolate_factor
  router_aux_loss_coef output_router_logits router_jitter_noise aux_loss_alpha seq_aux router_z_loss_coef ep_size
  num_nextn_predict_layers mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers
  vision_config audio_config image_token_id image_token_index video_token_id video_token_index audio_token_id
  vision_start_token_id vision_end_token_id vision_token_id boi_token_index eoi_token_index boi_token_id eoi_token_id
  mm_tokens_per_image tie_word_embeddings
]]):gmatch "%S+" do rules.quiet[name] = true end

return rules
