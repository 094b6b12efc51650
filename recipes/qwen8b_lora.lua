-- SPDX-License-Identifier: Apache-2.0
--- LoRA finetuning of Qwen3-VL-8B-Instruct (its text path), or of any model by model=DIR.
--
--   bslua recipes/qwen8b_lora.lua data=FILE.jsonl [valid=FILE.jsonl] [model=DIR] [key=value ...]
--   bslua recipes/qwen8b_lora.lua help
require "bs.cli.finetune".main(arg, {
  file = "recipes/qwen8b_lora.lua",
  model = "Qwen3-VL-8B-Instruct",
  hub = "Qwen/Qwen3-VL-8B-Instruct",
  defaults = { step_tokens = 8192, micro_tokens = 2048, r = 16 },
})
