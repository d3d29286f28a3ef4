"""The text that tokens add to that of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

INCOMPLETE = "\ufffd"
"""Decoders put this in place of bytes that are no whole character, perhaps only for now."""

MOST_BEFORE = 32
"""Tokens before others that are looked at for the last one with a text: prompts of chats end with
some special tokens, and a character has at most four tokens."""


class Decoder(Protocol):
    """The part of a tokenizer that makes texts."""

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Text of `token_ids`."""


def text_after(
    tokenizer: Decoder,
    before: Sequence[int],
    token_ids: Sequence[int],
    skip_special_tokens: bool = True,
) -> str:
    """The text that `token_ids` add to that of the tokens `before` them.

    It is a difference of two texts, as decoders treat the beginning of a text in their own way:
    those of SentencePiece leave out its first space. A character that begins in `before` is part of
    it. Special tokens in `before` have no text, whatever is asked of those in `token_ids`.
    """

    def text(ids: list[int], skip: bool = True) -> str:
        decoded: str = tokenizer.decode(ids, skip_special_tokens=skip)
        return decoded

    behind: list[int] = []
    first = ""
    for token in reversed(before[-MOST_BEFORE:]):
        longer = text([token, *behind])
        if longer == first and text([token]) != text([token], skip=False):
            continue  # a special token
        behind, first = [token, *behind], longer
        is_cut = first.startswith(INCOMPLETE) and text([*behind, *token_ids]).startswith(INCOMPLETE)
        if first and not is_cut:
            break  # the tokens before change nothing in what follows these
    both = text([*behind, *token_ids], skip_special_tokens)
    while first.endswith(INCOMPLETE) and not both.startswith(first):
        first = text(behind := behind[:-1])
    if both.startswith(first):
        return both[len(first) :]
    return text([*token_ids], skip_special_tokens)  # bytes may make those before no character
