"""Small tokenizers, model folders with one, and chat templates that do harm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

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

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{number:02X}>" for number in range(256))
PIECES = ("▁Hello", "▁world", "▁the", "▁", "world", "é", ".")


def strip_decoder() -> decoders.Decoder:
    """LLaMA's: bytes where there is no token, a space less at the beginning."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])


def piece_tokenizer(
    decoder: decoders.Decoder | None, words: Sequence[str] = (*BYTES, *PIECES)
) -> PreTrainedTokenizerFast:
    """A tokenizer of `SPECIAL` and `words`, each a token, whose texts `decoder` makes."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def ids_of(tokenizer: PreTrainedTokenizerFast, piece: str) -> list[int]:
    """The token that `piece` is, or the tokens of its bytes."""
    vocabulary = tokenizer.get_vocab()
    if piece in vocabulary:
        return [vocabulary[piece]]
    return [vocabulary[BYTES[each]] for each in piece.encode()]


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


def write_byte_tokenizer(
    folder: Path,
    special: Sequence[str],
    added: Sequence[str] = (),
    begin: str | None = None,
    template: str | None = None,
) -> Path:
    """`folder` with a tokenizer of single bytes, of `special` and of other `added` tokens; it puts
    `begin` before a text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False) for each in added])
    settings: dict[str, Any] = {"tokenizer_class": "TokenizersBackend"}
    if begin is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
        settings["bos_token"] = begin
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
