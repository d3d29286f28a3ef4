"""The texts between which models reason and call tools, as templates and vocabularies show them.

The process of the tokenizer imports it: it imports nothing of this project.
"""

from __future__ import annotations

from typing import Any

_MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Between which models reason before they answer: DeepSeek, Qwen and many others; Magistral;
Seed-OSS; EXAONE; Command A."""

_TAGS = ("<tool_call>", "</tool_call>")
_CALLS = (
    ("mistral", "[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ("none", "<seed:tool_call>", ()),
    ("qwen3_coder", "<function=", _TAGS),
    ("glm45", "<arg_key>", (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    ("hermes", "<tool_call>", _TAGS),
    ("llama3", "<|python_tag|>", ("<|python_tag|>",)),
    ("llama3", "<|start_header_id|>ipython", ("<|python_tag|>",)),
)
"""How models write calls of tools (`tool_calls.py`), by what their template or vocabulary has: the
first that is found; and their markers. Qwen3-Coder and GLM have Hermes's around another form,
Seed-OSS has one of its own, which is not read."""


def reasoning_markers(tokenizer: Any) -> tuple[str, str] | None:
    """The markers of reasoning that the chat template has, or else the vocabulary."""
    template, added = str(tokenizer.chat_template), tokenizer.get_added_vocab()
    for known in (template, added):
        for pair in _MARKERS:
            if all(marker in known for marker in pair):
                return pair
    return None


def tool_parser(tokenizer: Any) -> str | None:
    """How the model writes calls, None where that is not known."""
    for known in (str(tokenizer.chat_template), tokenizer.get_added_vocab()):
        for name, sign, _ in _CALLS:
            if sign in known:
                return name
    return None


class _MarkedTexts:
    """Decodes with markers that are special tokens, of which others are left out."""

    def __init__(self, tokenizer: Any, left_out: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._left_out = left_out

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        if skip_special_tokens:
            token_ids = [each for each in token_ids if each not in self._left_out]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def decoder_of(tokenizer: Any, reasoning: tuple[str, str] | None, parser: str | None) -> Any:
    """What makes texts of tokens: the tokenizer, unless it would lose markers of `reasoning`, or of
    calls in the form of `parser`.
    """
    markers = {
        *(reasoning or ()),
        *(text for name, _, own in _CALLS if name == parser for text in own),
    }
    special = {
        str(token): number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    if not any(each in special for each in markers):
        return tokenizer
    left_out = (number for text, number in special.items() if text not in markers)
    return _MarkedTexts(tokenizer, frozenset(left_out))
