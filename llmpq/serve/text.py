"""The text of an answer while its tokens come: in whole characters, and without its stop string."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from llmpq.serve.wire.pieces import INCOMPLETE

Decode = Callable[[Sequence[int]], Awaitable[str]]

MOST_PARTS = 4
"""Tokens that one character can take: UTF-8 has at most four bytes."""


MOST_BEHIND = 16
"""Tokens that new ones are decoded behind. To begin with a later token costs one decoding more."""


class Detokenizer:
    """Turns tokens into pieces of text that together are the text of all of them.

    Tokens are decoded behind those of pieces before, as some tokenizers leave out the space at the
    beginning of a text. What ends within a character waits for the rest of it, unless so many
    tokens have come that there is none.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown_tokens = 0
        self._shown_text = ""

    async def add(self, token_id: int) -> str:
        """The text that is certain with one more token, perhaps none."""
        self._window.append(token_id)
        text = await self._decode(self._window)
        waiting = len(self._window) - self._shown_tokens
        if text == self._shown_text:  # a special token, or a first space that is left out
            if self._shown_tokens or waiting > MOST_PARTS:
                self._window.pop()
            return ""
        if text.endswith(INCOMPLETE) and waiting <= MOST_PARTS:
            return ""
        piece = text[len(self._shown_text) :]
        begin, self._shown_tokens, self._shown_text = self._shown_tokens, len(self._window), text
        if len(self._window) > MOST_BEHIND or text.endswith(INCOMPLETE):
            self._window = self._window[begin:]
            self._shown_tokens = len(self._window)
            self._shown_text = await self._decode(self._window)
        return piece

    async def finish(self) -> str:
        """What has waited for the rest of a character that did not come."""
        if len(self._window) == self._shown_tokens:
            return ""
        return (await self._decode(self._window))[len(self._shown_text) :]


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is certain with `piece`; it ends before the first stop string."""
        text = self._held + piece
        ends = [end for end in map(text.find, self._stops) if end >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, without being all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)
