"""The text of an answer while its tokens come: in whole characters, and without its stop string."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from actors.sampling_options import stop_begin
from llmpq.tokenizing.reasoning import overlap
from quant.common.text import INCOMPLETE, MOST_BEFORE

Decode = Callable[[Sequence[int], Sequence[int]], Awaitable[str]]
"""The text of tokens after others, as `Engine.decode`."""

MOST_PARTS = 4
"""Tokens that one character can take: UTF-8 has at most four bytes."""


class Detokenizer:
    """Turns tokens into pieces of text that together are the text of all of them.

    What ends within a character waits for the rest of it, unless so many tokens have come that
    there is none. `before` are the tokens that those waiting follow: at first the prompt's last.
    """

    def __init__(self, decode: Decode, before: Sequence[int]) -> None:
        self._decode = decode
        self.before = list(before[-MOST_BEFORE:])
        self._waiting: list[int] = []

    async def add(self, token_id: int) -> str:
        """The text that is certain with one more token, perhaps none."""
        self._waiting.append(token_id)
        text = await self._decode(self._waiting, self.before)
        if text.endswith(INCOMPLETE) and len(self._waiting) <= MOST_PARTS:
            return ""
        if text or len(self.before) < MOST_BEFORE:  # special tokens push none with a text out
            self.before = [*self.before, *self._waiting][-MOST_BEFORE:]
        self._waiting = []
        return text

    async def finish(self) -> str:
        """What has waited for the rest of a character that did not come."""
        return await self._decode(self._waiting, self.before) if self._waiting else ""


class StopStrings:
    """Looks for stop strings in a text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str, is_early: bool = False) -> str:
        """The text that is certain with `piece`; it ends before the first stop string.

        `is_early`: none counts that ends with this piece.
        """
        text = self._held + piece
        end = stop_begin(text, self._stops, text if is_early else self._held)
        if end is not None:
            self.found, self._held = True, ""
            return text[:end]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
