"""The text of an answer while its tokens come, in whole characters and without its stop string; and
the texts of single tokens beside their log-probabilities, of answers and of prompts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from actors.logprobs import LEAST_LOGPROB, LogprobRows, TokenLogprobs
from actors.messages import Request
from actors.sampling_options import stop_begin
from llmpq.rows.answers import Json, TextPiece, TokenText
from llmpq.tokenizing.reasoning import overlap
from quant.common.text import INCOMPLETE, MOST_BEFORE

FinishReason = Literal["stop", "length"]

Decode = Callable[[Sequence[int], Sequence[int]], Awaitable[str]]
"""The text of tokens after others, as `Engine.decode`."""

EachText = Callable[[Sequence[int], Sequence[int]], Awaitable[Sequence[str]]]
"""The texts of tokens each of which comes after the same others."""

MOST_PARTS = 4
"""Tokens that one character can take: UTF-8 has at most four bytes."""

T = TypeVar("T")


@dataclass(frozen=True)
class TokenEvent:
    """A new token, in order; `stop`: it is an end token, or completes a stop string.
    `shared_tokens`, of the first one: how many of the prompt's were not computed for it, and
    `prompt_logprobs` of those that were.
    """

    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    shared_tokens: int = 0
    prompt_logprobs: LogprobRows | None = None


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
        """The text certain with `piece`, up to a stop string that does not end too early."""
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


class AnswerText:
    """The pieces of choice `index`, the answer to `request`; it begins behind `offset` characters
    of what is told with it.
    """

    def __init__(
        self, decode: Decode, each: EachText, request: Request, index: int = 0, offset: int = 0
    ) -> None:
        self._each = each
        self._index = index
        self._detokenizer = Detokenizer(decode, request.prompt_ids)
        self._sampling = request.sampling
        self._stops = StopStrings(request.sampling.stop)
        self._wants_tokens = request.top_logprobs is not None
        self._tokens: list[TokenText] = []
        self._new_tokens = self._shared_tokens = 0
        self._all_tokens = 0
        self._decoded = self._given = offset

    async def add(self, event: TokenEvent) -> TextPiece | None:
        """The piece that is certain with one more token; None if it adds no text."""
        self._new_tokens += 1
        self._shared_tokens += event.shared_tokens
        self._all_tokens += 1
        begin, before = self._decoded, self._detokenizer.before
        is_last = event.finish_reason == "stop"
        is_stop_token = is_last and event.token_id in self._sampling.stop_token_ids
        text = "" if is_stop_token else await self._detokenizer.add(event.token_id)
        is_end_token = is_last and not text
        if self._wants_tokens and not is_end_token:
            assert event.logprobs is not None, "they were asked for"
            one = await token_text(self._each, event.token_id, event.logprobs, begin, before)
            self._tokens.append(one)
        if event.finish_reason is not None:
            text += await self._detokenizer.finish()
        self._decoded += len(text)
        text = self._stops.add(text, self._all_tokens <= self._sampling.min_tokens)
        if self._stops.found:
            return self._piece(text, "stop")
        if event.finish_reason is not None:
            return self._piece(text + self._stops.finish(), event.finish_reason)
        return self._piece(text) if text else None

    def _piece(self, text: str, reason: FinishReason | None = None) -> TextPiece:
        self._given += len(text)
        is_whole = reason is not None and not self._stops.found
        tokens = tuple(t for t in self._tokens if is_whole or t.offset < self._given)
        self._tokens = self._tokens[len(tokens) :]
        new_tokens, self._new_tokens = self._new_tokens, 0
        shared, self._shared_tokens = self._shared_tokens, 0
        return TextPiece(self._index, text, new_tokens, tokens, reason, shared_tokens=shared)


async def token_text(
    each: EachText, token_id: int, found: TokenLogprobs, offset: int, before: Sequence[int]
) -> TokenText:
    text, *texts = await each((token_id, *(other for other, _ in found.top)), before)
    own, *others = (
        max(one, LEAST_LOGPROB) for one in (found.logprob, *(one for _, one in found.top))
    )
    return TokenText(text, offset, own, tuple(zip(texts, others, strict=True)))


async def echoed_tokens(
    decode: Decode, each: EachText, prompt_ids: Sequence[int], found: LogprobRows | None, most: int
) -> tuple[TokenText, ...]:
    """The tokens of a prompt, the first of which nothing is known of, with at most so many others
    beside each.
    """
    known = {} if found is None else found.by_row()
    detokenizer, offset = Detokenizer(decode, ()), 0
    tokens: list[TokenText] = []
    for place, token_id in enumerate(prompt_ids):
        before = detokenizer.before
        if place in known:
            one = TokenLogprobs(known[place].logprob, known[place].top[:most])
            tokens.append(await token_text(each, token_id, one, offset, before))
        else:
            (text,) = await each((token_id,), before)
            tokens.append(TokenText(text, offset, None, ()))
        offset += len(await detokenizer.add(token_id))
    return tuple(tokens)


async def prompt_content(
    each: EachText, prompt_ids: Sequence[int], found: LogprobRows | None, most: int
) -> list[Json | None]:
    """What vLLM calls `prompt_logprobs`: of every token but the first one its own log-probability
    by its id, and then those of the `most` most probable ones.
    """
    content: list[Json | None] = [None]
    for place, one in ({} if found is None else found.by_row()).items():
        token_id, before = prompt_ids[place], prompt_ids[max(0, place - MOST_BEFORE) : place]
        best = enumerate(one.top[:most], start=1)
        told = {token_id: (one.logprob, one.rank)}
        told |= {other: (value, n) for n, (other, value) in best if other != token_id}
        texts = await each([*told], before)
        content.append(
            {
                str(other): {
                    "logprob": max(value, LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": text,
                }
                for (other, (value, rank)), text in zip(told.items(), texts, strict=True)
            }
        )
    return content


def completed(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing, where its texts are there at once."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise RuntimeError("a coroutine waits outside of an event loop")
