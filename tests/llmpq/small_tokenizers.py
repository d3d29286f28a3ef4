"""Model folders with a small tokenizer, and chat templates that do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

GIVES_UP = r"(x+x+)+y"
"""A pattern at which the regular expressions of `tokenizers` panic, on many x."""

MANY_X = "x" * 60
WORDS = ("a", "b", "1", "x", "y", "[", "]", "user", "assistant", "hello", "world", "\n")

TEMPLATE = "{% for m in messages %}[ {{ m.role }} ] {{ m.content }}\n{% endfor %}"
BY_CONTENT = """{% set c = messages[0].content %}
{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}
{% if c == 'recursion' %}{{ again(0) }}
{% elif c == 'wrong type' %}{{ 'abc' | dictsort }}
{% elif c == 'memory' %}{{ 'a' * (10 ** 12 + c | length) }}
{% elif c == 'long' %}{{ 'a ' * (10 ** 7 + c | length) }}
{% elif c == 'loop' %}
{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}{% endfor %}{% endfor %}
{% elif c == 'division' %}{{ 1 // 0 }}
{% elif c == 'refused' %}{{ raise_exception('roles must alternate') }}
{% elif c == 'half a pair' %}{{ raise_exception('\\ud800') }}
{% elif c == 'half a pair shown' %}{{ '\\ud800' }}
{% elif c == 'missing' %}{{ messages[7].role.x }}
{% else %}{{ c }}{% endif %}"""
"""Fails in as many ways as there are, as the first message asks for."""


def write_tokenizer(
    folder: Path, template: str | None = None, pattern: str | None = None, **settings: Any
) -> Path:
    """`folder` with a tokenizer of `WORDS`; `pattern` splits texts before anything else does."""
    vocabulary = {word: number for number, word in enumerate(("<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Whitespace()])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "TokenizersBackend", "unk_token": "<unk>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
