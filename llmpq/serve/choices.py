"""The choices of an answer while their tokens come, each with what is told of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from actors.logprobs import LogprobRows
from actors.messages import Request
from llmpq.rows.answers import TextPiece
from llmpq.serve.access import ApiError, failed, log_fault, tasks, unavailable
from llmpq.serve.engine import Engine, EngineStoppingError, GenerationError
from llmpq.serve.metrics import AnswerTimer
from llmpq.tokenizing.answer_text import AnswerText, Decode, echoed_tokens, prompt_content
from quant.common.text import MOST_BEFORE

MOST_BUFFERED = 16
"""Pieces of a request that wait for its client; the engine is not asked for more meanwhile."""


@dataclass(frozen=True)
class PromptTold:
    """What is told of a prompt with its answer: its text as `echo` before the answer, each token
    with at most `echoed_logprobs` others where the answer's are told too, and `logprobs` with so
    many (None: not). `is_alone`: the answer itself is left out.
    """

    echo: str | None = None
    echoed_logprobs: int | None = None
    logprobs: int | None = None
    is_alone: bool = False

    @property
    def most_logprobs(self) -> int | None:
        """The others beside each token of the prompt that stages are asked for."""
        asked = [each for each in (self.echoed_logprobs, self.logprobs) if each is not None]
        return max(asked, default=None)


NOTHING_TOLD = PromptTold()


async def _each(decode: Decode, token_ids: Sequence[int], before: Sequence[int]) -> list[str]:
    return await asyncio.gather(*(decode([each], before) for each in token_ids))


async def _of_prompt(
    decode: Decode, request: Request, index: int, told: PromptTold, found: LogprobRows | None
) -> TextPiece:
    """The first piece of a choice."""
    ids, each = request.prompt_ids, partial(_each, decode)
    firsts = {token: place for place, token in reversed([*enumerate(ids)])}
    befores = ((token, ids[max(0, n - MOST_BEFORE) : n]) for token, n in firsts.items())
    await asyncio.gather(*(decode([token], before) for token, before in befores))  # together
    piece = TextPiece(index, told.echo or "", 0)
    if told.echoed_logprobs is not None:
        tokens = await echoed_tokens(decode, each, ids, found, told.echoed_logprobs)
        piece = replace(piece, tokens=tokens)
    if told.logprobs is not None:
        content = await prompt_content(each, ids, found, told.logprobs)
        piece = replace(piece, prompt_logprobs=content)
    return piece


async def _pieces(
    engine: Engine, request: Request, index: int, told: PromptTold, timer: AnswerTimer
) -> AsyncGenerator[TextPiece, None]:
    """The pieces of one choice; the last has a finish reason."""
    decode, offset, is_first = engine.decode, len(told.echo or ""), True
    choice = AnswerText(decode, partial(_each, decode), request, index, offset)
    timer.custom_id = request.custom_id
    with timer:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                timer.note_token()
                if is_first and told != NOTHING_TOLD:
                    yield await _of_prompt(decode, request, index, told, event.prompt_logprobs)
                is_first = False
                piece = await choice.add(event)
                if told.is_alone:
                    piece = TextPiece(index, "", 0, finish_reason="length")
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
    told: Sequence[PromptTold],
    given_up: asyncio.Event,
    timer: Callable[[], AnswerTimer],
) -> AsyncGenerator[TextPiece, None]:
    """The pieces of all `requests` as they come, with what is `told` of the prompt of each; closing
    it ends every generation.

    Raises `ApiError` for the first of them that fails, and ends the others; also once `given_up`
    is set. `timer` makes one for each answer.
    """
    queue: asyncio.Queue[TextPiece | ApiError] = asyncio.Queue(MOST_BUFFERED)

    async def feed(request: Request, index: int) -> None:
        try:
            async with aclosing(_pieces(engine, request, index, told[index], timer())) as made:
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
