#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ids of random rows against the Python packages: texts, prompts with completions, and chats by the model's template.

    python3 tests/optional/rows_check.py TOKENIZERS BSLUA [SEED]

TOKENIZERS holds a folder a model with tokenizer.json.xz and tokenizer_config.json.xz. A row's ids must be those of its
whole text, unless the row is marked (lua/bs/data/texts.lua); the prompt's ids must be those of the prompt alone. Needs
the Python packages tokenizers and transformers; without them it says so and exits with status 77.
"""
import json
import lzma
import pathlib
import random
import subprocess
import sys
import tempfile

try:
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import _compile_jinja_template
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

ENCODE = """
local bs, formats, files = require "bs", require "bs.data.formats", require "bs.settings.files"
local text, out = formats.text(arg[1]), bs.json.array {}
bs.log_to(function() end)
for i, row in ipairs(files.json(arg[1] .. "/rows.json")) do
  local f = formats.new(1 << 24, text)
  local ok, ids, labels, marks = pcall(f.encode, f, row)
  out[i] = ok and ids and { ids = ids, labels = labels, marks = marks } or { why = tostring(ok and labels or ids) }
end
io.write(bs.json.encode(out))
"""
PIECES = ["Hello", " world", "2+2=", "4", "\n", "\n\n", "  ", "    return 1", "def f():", "'s", "don", "'t", "123", "4567", "é", "e\u0301", "日本語", "😀",
          "\t", "<s>", "</s>", "a", "▁", " -", "...", "\u00a0", "ﬁ", "\r\n", "[INST]", "<|im_end|>", "<bos>"]


def rows(rnd):
    text = lambda: "".join(rnd.choice(PIECES) for _ in range(rnd.randrange(7)))
    for _ in range(300):
        yield dict(text=text())
        yield dict(prompt=text(), completion=text())
        yield dict(messages=[dict(role=("user", "assistant")[i % 2], content=text()) for i in range(rnd.randrange(1, 5))])


def name(config, key):
    value = config.get(key)
    return value["content"] if isinstance(value, dict) else value


def check(folder, source, bslua, rnd):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes(lzma.open(source / (file + ".xz")).read())
    config, given = json.loads((folder / "tokenizer_config.json").read_text()), list(rows(rnd))
    (folder / "rows.json").write_text(json.dumps(given))
    (folder / "encode.lua").write_text(ENCODE)
    got = json.loads(subprocess.run([bslua, folder / "encode.lua", folder], capture_output=True, text=True, check=True).stdout)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = config.get("chat_template") and _compile_jinja_template(config["chat_template"])
    eos, counts = tokenizer.token_to_id(name(config, "eos_token")), dict(equal=0, marked=0, refused=0, wrong=0)

    def start(text):
        plain, whole = (tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True))
        before = whole[:len(whole) - len(plain)]
        return plain if plain[:len(before)] == before else whole

    for row, out in zip(given, got):
        if "why" in out:
            counts["refused"] += 1
            continue
        prompt = start(row["prompt"]) if "prompt" in row else []
        if "messages" in row:
            text = template.render(messages=row["messages"], tools=None, add_generation_prompt=False, enable_thinking=False,
                                   bos_token=name(config, "bos_token") or "", eos_token=name(config, "eos_token"))
            want = tokenizer.encode(text, add_special_tokens=False).ids
        else:
            want = start(row.get("text", row.get("prompt", "") + row.get("completion", "")))
            if len(want) == len(prompt) or want[-1] != eos:
                want = want + [eos]
        right = out["ids"][:len(prompt)] == prompt and all(label == -100 for label in out["labels"][:len(prompt)])
        kind = "wrong" if not right else "equal" if out["ids"] == want else "marked" if out["marks"] else "wrong"
        counts[kind] += 1
        if kind == "wrong" and counts[kind] < 4:
            print(source.name, row, out, want)
    print(source.name, counts)
    return counts["wrong"]


def main():
    rnd, wrong = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1), 0
    for source in sorted(p for p in pathlib.Path(sys.argv[1]).iterdir() if p.is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            wrong += check(pathlib.Path(folder), source, sys.argv[2], rnd)
    sys.exit(1 if wrong else 0)


main()
