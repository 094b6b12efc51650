-- SPDX-License-Identifier: Apache-2.0
--- LoRA finetuning of Qwen3-VL-32B-Instruct (its text path), or of any model by model=DIR. 64 layers of about
-- 1 GB: a step reads what has no home in memory once each way whatever its tokens, so it has more of them.
--
--   bslua recipes/qwen32b_lora.lua data=FILE.jsonl [valid=FILE.jsonl] [model=DIR] [key=value ...]
--   bslua recipes/qwen32b_lora.lua help
require "bs.cli.finetune".main(arg, {
  file = "recipes/qwen32b_lora.lua",
  model = "Qwen3-VL-32B-Instruct",
  hub = "Qwen/Qwen3-VL-32B-Instruct",
  defaults = { step_tokens = 16384, micro_tokens = 2048, r = 16, lr = 1e-4 },
})
