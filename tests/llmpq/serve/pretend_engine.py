"""An engine whose tokens are the bytes of UTF-8, and whose answers the tests decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actors.logprobs import LogprobRows, TokenLogprobs
from actors.messages import Request
from actors.sampling_options import Sampling
from llmpq.rows.row import Row
from llmpq.serve.engine import (
    EngineLimits,
    EngineStatus,
    FormError,
    PromptError,
    PromptTooLongError,
    QueueState,
    TokenEvent,
)
from llmpq.tokenizing.reasoning import Markers
from llmpq.tokenizing.tool_calls import CallReading, call_reading

END = 256
IDLE = QueueState(0, 0, 4, 0, 1000)
LIMITS = EngineLimits(200, 100, 250, 50, 257)


def repeated(request: Request) -> bytes:
    """The prompt once more, or what depends on seed and draw where tokens are drawn."""
    if request.sampling.temperature == 0:
        return bytes(request.prompt_ids)
    return f"<{request.sampling.seed} {request.draw_id}>".encode()


@dataclass
class PretendEngine:
    """Answers each request by the bytes that `answer` gives, then by the end token.

    `hold_after`: tokens after which generations wait for `go_on`; `fault` is raised after as many.
    `shared_tokens`: those of each prompt that are not computed. `live` are the ids of generations
    that run, `seen` all requests, `tokens` those given out, `forms` what was said of reasoning
    before the forms that were asked about.
    """

    answer: Callable[[Request], bytes] = repeated
    limits: EngineLimits = LIMITS
    sampling: Sampling = field(default_factory=Sampling)
    markers: Markers | None = None
    tool_parser: str | None = "hermes"
    status: EngineStatus = "ready"
    queue: QueueState = IDLE
    adapters: tuple[str, ...] = ()
    hold_after: int | None = None
    fault: Exception | None = None
    fault_after: int = 0
    model_name: str = "pretend"
    logprob: float = -0.5
    shared_tokens: int = 0
    created_s: int = 1_700_000_000
    live: set[str] = field(default_factory=set)
    seen: list[Request] = field(default_factory=list)
    forms: list[bool | None] = field(default_factory=list)
    tokens: int = 0
    is_holding: bool = False
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def encode(self, row: Row) -> tuple[int, ...]:
        """The bytes of the prompt; messages become `role: content` a line."""
        if row.token_ids is not None:
            return row.token_ids
        text = row.text
        if row.messages is not None:
            text = "".join(f"{m['role']}: {m['content']}\n" for m in row.messages)
        assert text is not None
        if "\0" in text:
            raise PromptError("the tokenizer takes no NUL")
        if len(text) > 10 * self.limits.prompt_tokens:
            raise PromptTooLongError(f"{len(text)} characters")
        return tuple(text.encode())

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of bytes."""
        return bytes(each for each in token_ids if each < END).decode("utf-8", "replace")

    def call_reading(self, options: Mapping[str, Any]) -> CallReading | None:
        return call_reading(options, self.tool_parser, {})

    async def kept_form(self, form: str, has_begun: bool | None = None) -> str:
        if "impossible" in form:
            raise FormError("no text has this form")
        self.forms.append(has_begun)
        return form

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The bytes of the answer, one token each."""
        self.seen.append(request)
        self.live.add(request.custom_id)
        try:
            answer = [*self.answer(request), END][: request.max_new_tokens]
            for number, token_id in enumerate(answer):
                if number == self.hold_after:
                    self.is_holding = True
                    await self.go_on.wait()
                if self.fault is not None and number == self.fault_after:
                    raise self.fault
                last = "length" if number == request.max_new_tokens - 1 else None
                self.tokens += 1
                ends = token_id in (END, *request.sampling.stop_token_ids)
                reason = "stop" if ends else last
                event = self._event(token_id, reason, request.top_logprobs)
                if not number:
                    event = replace(
                        event,
                        shared_tokens=self.shared_tokens,
                        prompt_logprobs=self._of_prompt(request),
                    )
                yield event
                await asyncio.sleep(0)
        finally:
            self.live.discard(request.custom_id)

    def _of_prompt(self, request: Request) -> LogprobRows | None:
        """That of the byte at place n is -n, its rank n + 1; the next bytes are more probable."""
        if request.prompt_logprobs is None or len(request.prompt_ids) == 1:
            return None
        places = np.arange(1, len(request.prompt_ids))
        best = np.arange(1, request.prompt_logprobs + 1)
        top_ids = (np.array(request.prompt_ids[1:])[:, None] + best) % END
        top = np.broadcast_to(-best / 10, top_ids.shape).astype(np.float32)
        return LogprobRows(places, -places.astype(np.float32), places + 1, top_ids, top)

    def _event(self, token_id: int, reason: str | None, top_logprobs: int | None) -> TokenEvent:
        if top_logprobs is None:
            return TokenEvent(token_id, reason)
        ids = ((token_id + step) % END for step in range(top_logprobs))
        top = tuple((each, self.logprob - step) for step, each in enumerate(ids))
        return TokenEvent(token_id, reason, TokenLogprobs(self.logprob, top))
