#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes cases.json: small tokenizers of the shapes that published models have, and what the Python
package `tokenizers` makes of some texts with them. usage: make.py > cases.json"""
import json
import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog and then it's there, isn't it? " * 3,
          "a model streams its blocks from the disk; each block is read, used and dropped again. " * 3,
          "für naïve Leute: der Straßenlärm dröhnt. Привет, мир! Как дела, мир? 世界 日本語 の テスト。 " * 2,
          "int main(void) {\n\treturn 0;\n}\n" * 3, "1234 3.14 2024-01-31 1,000,000.00\n\n" * 2]
TEXTS = ["", " ", "  ", "\n", "a", "Hello world", " hello  world ", "the quick brown fox", "it's there, ISN'T IT?",
         "don\u2019t we'll", "1234567 3.14", "int main() {\n\treturn 0;\n}\n", "naïve Straße",
         "e\u0301 a\u0323\u0302 \u212b", "ﬁ ① ｆｕｌｌ", "Привет, мир!", "世界日本語のテスト。", "한국어 각", "שלום مرحبا हिन्दी ไทย",
         "😀👨\u200d👩\u200d👧 x", "<s>hi</s>", "a <|end|> b", "<|end|><|end|>", "x<|tool|>y <|tool|> z",
         "\u00a0x\u3000y\u2028z\u180e", "tab\tsep\r\n\r\n  end  ", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "x" + " " * 20 + "y",
         "ſ 'ſ 'S", "▁▁ x▁y", "\x01\x7f\x85", "snake_case CamelCase http://a.b/c?d=e"]

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = ["\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
            " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]


def learn(byte_level):
    t = Tokenizer(models.BPE())
    if byte_level:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        t.normalizer = normalizers.Replace(" ", "▁")
        t.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        alphabet = []
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=450 if byte_level else 220, initial_alphabet=alphabet,
                                                      show_progress=False))
    return json.loads(t.to_str())["model"]


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def seq(kind, *items):
    key = {"n": "normalizers", "p": "pretokenizers", "d": "decoders", "o": "processors"}[kind]
    return {"type": "Sequence", key: list(items)}


def replace(a, b):
    return {"type": "Replace", "pattern": {"String": a}, "content": b}


def byte_level(regex=False, space=False):
    return {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": regex}


def meta(scheme, cut=True):
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": cut}


def token(content, special=True, **more):
    return dict(dict(content=content, single_word=False, lstrip=False, rstrip=False, normalized=False, special=special), **more)


BYTES, CHARS = learn(True), learn(False)
FUSE, FALLBACK = {"type": "Fuse"}, {"type": "ByteFallback"}


def model(base, pairs=True, fallback=False, unk=None, **flags):
    vocab = {}
    for piece in ([unk] if unk else []) + ([f"<0x{b:02X}>" for b in range(256)] if fallback else []) + list(base["vocab"]):
        vocab.setdefault(piece, len(vocab))
    merges = [list(m) if pairs else " ".join(m) for m in base["merges"]]
    return dict(dict(type="BPE", dropout=None, unk_token=unk, continuing_subword_prefix=None, end_of_word_suffix=None,
                     fuse_unk=False, byte_fallback=fallback, vocab=vocab, merges=merges), **flags)


def case(name, m, pre, norm=None, dec=None, post=None, tokens=("<s>", "</s>", "<|end|>")):
    tokens = [token(x) if isinstance(x, str) else x for x in tokens]
    ids = dict(m["vocab"])
    for x in tokens:
        x["id"] = ids.setdefault(x["content"], len(ids))
    if post:
        post = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}}}
    doc = dict(version="1.0", truncation=None, padding=None, added_tokens=tokens, normalizer=norm, pre_tokenizer=pre,
               post_processor=post, decoder=dec or byte_level(), model=m)
    t = Tokenizer.from_str(json.dumps(doc))
    rows = []
    for text in TEXTS:
        got = t.encode(text, add_special_tokens=True)
        rows.append(dict(ids=got.ids, text=t.decode(got.ids, skip_special_tokens=False),
                         plain=t.decode(got.ids, skip_special_tokens=True)))
    return dict(name=name, tokenizer=doc, rows=rows)


def cases():
    yield case("qwen", model(BYTES), seq("p", split(QWEN), byte_level()), {"type": "NFC"})
    yield case("llama3", model(BYTES, pairs=False, ignore_merges=True), seq("p", split(LLAMA), byte_level()), post=True)
    yield case("o200k", model(BYTES), seq("p", split(O200K), byte_level()))
    yield case("deepseek", model(BYTES, pairs=False), seq("p", *[split(r) for r in DEEPSEEK], byte_level()), seq("n"),
               tokens=["<s>", token("<|tool|>", False, normalized=True)])
    yield case("digits", model(BYTES), seq("p", {"type": "Digits", "individual_digits": True}, byte_level(True)))
    yield case("gpt2", model(BYTES), byte_level(True, True))
    sp = dict(fallback=True, unk="<unk>", fuse_unk=True)
    end = seq("d", replace("▁", " "), FALLBACK, FUSE)
    front = seq("d", replace("▁", " "), FALLBACK, FUSE, {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    yield case("gemma", model(CHARS, **sp), {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
               replace(" ", "▁"), end, True, ["<s>", "</s>", token("▁▁", False), token("\n", False), token("\n\n", False)])
    yield case("mistral", model(CHARS, pairs=False, **sp), None, seq("n", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), front, True)
    yield case("phi3", model(CHARS, **sp), None, seq("n", {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")), front, True,
               ["<s>", token("</s>", rstrip=True), token("<|end|>", rstrip=True, lstrip=True), token("<|tool|>", False, single_word=True)])
    yield case("first", model(CHARS, **sp), meta("first", False), None, front)
    yield case("always", model(CHARS, unk="<unk>"), meta("always"), {"type": "NFKC"}, meta("always"))
    yield case("lower", model(CHARS, unk="<unk>", fuse_unk=True), seq("p", {"type": "Whitespace"}), {"type": "Lowercase"}, FUSE)
    yield case("punctuation", model(CHARS), seq("p", {"type": "Punctuation", "behavior": "Contiguous"}, {"type": "Digits", "individual_digits": False}), None, FUSE)
    rnd = random.Random(5)
    for i, behavior in enumerate(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]):
        for invert in (False, True):
            yield case(f"{behavior} {invert}", model(CHARS, unk="<unk>", fuse_unk=invert),
                       split(rnd.choice([r"\w+", r"[aeiou]", r"\s|\d", r"\b"]), behavior, invert), None, FUSE, tokens=["<s>"])


print('{"texts": ' + json.dumps(TEXTS) + ',\n"cases": [\n' + ",\n".join(json.dumps(c, ensure_ascii=False, separators=(",", ":")) for c in cases()) + "]}")
