# SPDX-License-Identifier: Apache-2.0
"""Writes renderings.json: what chat templates of published models make of conversations.

    python3 tests/data/chat/make.py TEMPLATES BSLUA > tests/data/chat/renderings.json

TEMPLATES is a folder of NAME.jinja, each the text of a model's chat_template; they are others' work and are not kept
here. Their digests are, as lua/bs/data/templates.lua knows them. Needs the Python package transformers.
"""
import datetime
import json
import pathlib
import random
import subprocess
import sys

from transformers.utils.chat_template_utils import _compile_jinja_template

DIGEST = 'local t = io.read("a"); print(("%016x"):format(require("bs.data.templates").digest(t)))'
TEXTS = ["What is 2+2?", "", "  padded  ", "\n ok \n", "\u00a0no-break\u3000", "\x1cfile\x1f", "A\n\n", "\n\nB", "<think>\nr\n</think>\n\nA",
         "<think>\n\n</think>\n\nA", "<think>r</think>A", "no beginning\n</think>\nA", "a</think>\nb</think>\n\nc", "<think>open",
         "<tool_response>x</tool_response>", "<tool_response>\n</tool_response> and", "{{ braces }}", "Ça va? 日本語 😀", "say <|im_end|> or </s>"]
SHAPES = ["U", "UA", "SU", "SUA", "UAU", "UAUA", "SUAUA", "UAUAUA", "SUAU", "AU", "AUA", "UU", "UUA", "UAA", "S", "SA"]
ROLES = {"S": "system", "U": "user", "A": "assistant"}


def conversations():
    rnd = random.Random(11)
    for k in range(40):
        shape = SHAPES[k % len(SHAPES)] if k < 16 else rnd.choice(SHAPES[:9])
        yield [dict(role=ROLES[c], content=TEXTS[0] if k < 16 else rnd.choice(TEXTS)) for c in shape]


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 9)


def render(template, messages, generate):
    try:
        return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>",
                               enable_thinking=False, strftime_now=lambda f: Day.now().strftime(f))
    except Exception as error:  # raise_exception of the template
        assert "TemplateError" in type(error).__name__, error
        return None


def both(template, messages):
    """The text of a row, and what stands behind it where an answer is asked for, or that whole text."""
    row, prompt = render(template, messages, False), render(template, messages, True)
    if row is None or prompt == row:
        return [row]
    return [row, prompt[len(row):]] if prompt.startswith(row) else [row, None, prompt]


def main():
    talks, found, lists = list(conversations()), [], []
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        digest = subprocess.run([sys.argv[2], "-e", DIGEST], input=text, capture_output=True, text=True, check=True).stdout.strip()
        template = _compile_jinja_template(text)
        texts = [both(template, t) for t in talks]
        if texts not in lists:
            lists.append(texts)
        found.append(dict(name=path.stem, digest=digest, renderings=lists.index(texts) + 1))
    print('{"conversations": [\n' + ",\n".join(json.dumps(t, ensure_ascii=False) for t in talks) + '],\n"templates": [\n'
          + ",\n".join(json.dumps(t) for t in found) + '],\n"renderings": [\n' + ",\n".join(json.dumps(t, ensure_ascii=False) for t in lists) + "]}")


main()
