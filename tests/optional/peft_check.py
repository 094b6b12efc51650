#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Our adapters and merged checkpoints in the eyes of PEFT and transformers.

Not part of tests/run.sh, since it needs packages of some gigabytes:

    python3 -m venv venv && venv/bin/pip install torch transformers peft
    venv/bin/python tests/optional/peft_check.py [path of bslua]

Trains small adapters with bslua on tests/data, saves them, and compares: logits of transformers + PEFT with
ours (f32, relative to the norm, bound 1e-5), and logits of transformers on the folder that recipes/merge.lua
wrote with ours of base and adapter (1e-5 for f32 storage, 1e-2 for bf16: its rounding). Without the packages it
says so and exits with status 77.
"""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

BOUND = 1e-5
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# name, checkpoint, adapter settings in Lua, bound for the merged model
CASES = [
    ("llama, all linears", "llama", "{ r = 4, alpha = 8 }", 1e-5),
    ("llama, rsLoRA", "llama", "{ r = 4, alpha = 6, rslora = true }", 1e-5),
    ("llama, patterns", "llama",
     "{ r = 4, alpha = 8, rank_pattern = { q_proj = 2, ['layers.1.mlp.up_proj'] = 6 }, alpha_pattern = { down_proj = 3 } }",
     1e-5),
    ("llama, one layer, some targets", "llama", "{ r = 3, layers = { 1 }, targets = { 'q_proj', 'mlp' } }", 1e-5),
    ("llama, no product of layers and names", "llama",
     "{ r = 2, targets = { 'layers.0.self_attn.q_proj', 'layers.1.mlp.up_proj' } }", 1e-5),
    ("llama_bias, all linears", "llama_bias", "{ r = 4 }", 1e-2),
    ("qwen3, all linears", "qwen3", "{ r = 4, rslora = true }", 1e-5),
]

SCRIPT = """
local bs, job = require "bs", require "bs.job"
local ids = {}
for i = 1, 24 do ids[i] = i * 7919 %% 300 end
local micro = { row_len = { 24 }, ids = ids, labels = ids }
local j <close> = job.new { model = "%s", micro_tokens = 24, lora = %s, logits = true }
for _ = 1, 5 do j:step({ micro }, { lr = 2e-2 }) end
j:save("%s")
local ids_array = bs.array.new("i64", { 1, 24 }, ids)
bs.safetensors.write("%s", { logits = j:walk({ micro }, "logits")[1], ids = ids_array })
"""


def relative(got, want):
    return float((got - want).norm() / want.norm())


def logits(model, ids):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids).logits[0].double()


def base_model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def check(bslua, folder, name, checkpoint, settings, merged_bound):
    base = os.path.join(ROOT, "tests", "data", checkpoint)
    adapter, numbers, merged = (os.path.join(folder, x) for x in ("adapter", "numbers.safetensors", "merged"))
    script = os.path.join(folder, "train.lua")
    with open(script, "w") as f:
        f.write(SCRIPT % (base, settings, adapter, numbers))
    subprocess.run([bslua, script], check=True, cwd=ROOT)
    subprocess.run([bslua, "recipes/merge.lua", f"model={base}", f"adapter={adapter}", f"out={merged}"],
                   check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    ours = load_file(numbers)
    want, ids = ours["logits"].double(), ours["ids"]
    plain = logits(base_model(base), ids)
    with_peft = PeftModel.from_pretrained(base_model(base), adapter)
    results = [
        ("PEFT", relative(logits(with_peft, ids), want), BOUND),
        ("merged", relative(logits(base_model(merged), ids), want), merged_bound),
    ]
    effect, good = relative(plain, want), True
    for what, error, bound in results:
        ok = error <= bound and effect > 10 * error
        good = good and ok
        print(f"{name:40} {what:8} {error:.2e}  bound {bound:.0e}  (base: {effect:.2e})  {'ok' if ok else 'FAIL'}")
    return good


def main():
    bslua = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/release/bslua"))
    good = True
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            good = check(bslua, folder, *case) and good
    sys.exit(0 if good else 1)


main()
