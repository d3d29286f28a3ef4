"""The text of an answer while its tokens come: in whole characters, and without its stop string."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from actors.messages import Request
from actors.sampling_options import stop_begin
from llmpq.rows.answers import TextPiece, TokenText
from llmpq.serve.access import ApiError, failed, log_fault, tasks, unavailable
from llmpq.serve.engine import (
    Engine,
    EngineStoppingError,
    FinishReason,
    GenerationError,
    TokenEvent,
)
from llmpq.serve.metrics import AnswerTimer
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


MOST_BUFFERED = 16
"""Pieces of a request that wait for its client; the engine is not asked for more meanwhile."""

LEAST_LOGPROB = -9999.0
"""OpenAI's value for tokens that cannot be chosen, whose logarithm is no number of JSON."""


class _Choice:
    def __init__(self, engine: Engine, request: Request, index: int) -> None:
        self._engine = engine
        self._index = index
        self._detokenizer = Detokenizer(engine.decode, request.prompt_ids)
        self._sampling = request.sampling
        self._stops = StopStrings(request.sampling.stop)
        self._wants_tokens = request.top_logprobs is not None
        self._tokens: list[TokenText] = []
        self._new_tokens = self._shared_tokens = 0
        self._all_tokens = 0
        self._decoded = 0
        self._given = 0

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
            self._tokens.append(await self._token_text(event, begin, before))
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

    async def _token_text(self, event: TokenEvent, begin: int, before: Sequence[int]) -> TokenText:
        decode = self._engine.decode
        found = event.logprobs
        assert found is not None, "they were asked for"
        ids = (event.token_id, *(token_id for token_id, _ in found.top))
        text, *texts = await asyncio.gather(*(decode([each], before) for each in ids))
        own, *others = (
            max(each, LEAST_LOGPROB) for each in (found.logprob, *(each for _, each in found.top))
        )
        return TokenText(text, begin, own, tuple(zip(texts, others, strict=True)))


async def _pieces(
    engine: Engine, request: Request, index: int, timer: AnswerTimer
) -> AsyncGenerator[TextPiece, None]:
    """The pieces of one choice; the last has a finish reason."""
    choice = _Choice(engine, request, index)
    with timer:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                timer.note_token()
                piece = await choice.add(event)
                if piece is None:
                    continue
                timer.outcome = piece.finish_reason or timer.outcome
                yield piece
                if piece.finish_reason is not None:
                    return
        raise GenerationError("the generation ended without a reason")


async def pieces(
    engine: Engine,
    requests: Sequence[Request],
    given_up: asyncio.Event,
    timer: Callable[[], AnswerTimer],
) -> AsyncGenerator[TextPiece, None]:
    """The pieces of all `requests` as they come; closing it ends every generation.

    Raises `ApiError` for the first of them that fails, and ends the others; also once `given_up`
    is set. `timer` makes one for each answer.
    """
    queue: asyncio.Queue[TextPiece | ApiError] = asyncio.Queue(MOST_BUFFERED)

    async def feed(request: Request, index: int) -> None:
        try:
            async with aclosing(_pieces(engine, request, index, timer())) as made:
                async for piece in made:
                    await queue.put(piece)
        except Exception as error:  # one request's fault must not end the server
            await queue.put(_told(error, request.custom_id))

    async def watch() -> None:
        await given_up.wait()
        await queue.put(unavailable("the server ended before the answer did"))

    feeds = [feed(request, index) for index, request in enumerate(requests)]
    async with tasks(*feeds, watch()):
        left = len(requests)
        while left:
            item = await queue.get()
            if isinstance(item, ApiError):
                raise item
            left -= item.finish_reason is not None
            yield item


def _told(error: Exception, name: str) -> ApiError:
    """What a client is told of a generation that ended by `error`."""
    if isinstance(error, EngineStoppingError):
        return unavailable("the server takes no more requests")
    if isinstance(error, GenerationError):
        return failed(f"the generation failed: {error}")
    log_fault(name, error)
    return failed("the generation failed; the server's log says more")
