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

    def text(ids: list[int]) -> str:
        decoded: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return decoded

    behind: list[int] = []
    first = ""
    for token in reversed(before[-MOST_BEFORE:]):
        if _is_special(tokenizer, token):
            continue
        behind.insert(0, token)
        first = text(behind)
        is_cut = first.startswith(INCOMPLETE) and text([*behind, *token_ids]).startswith(INCOMPLETE)
        if first and not is_cut:
            break  # the tokens before change nothing in what follows these
    both = text([*behind, *token_ids])
    while first.endswith(INCOMPLETE) and not both.startswith(first):
        first = text(behind := behind[:-1])
    # A byte that is no part of a character may take those before it along.
    return both[len(first) :] if both.startswith(first) else text([*token_ids])


def _is_special(tokenizer: Decoder, token: int) -> bool:
    kept, skipped = (tokenizer.decode([token], skip_special_tokens=skip) for skip in (False, True))
    return bool(kept != skipped)
