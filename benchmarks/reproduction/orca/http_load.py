"""A trace against an OpenAI server: streams of the `openai` client, each begun when it is due.

Prompts go as token ids, so that every server computes the same tokens; each request asks for
exactly the tokens of the trace (`ignore_eos`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.reproduction.orca.traces import Arrival, Lengths, Trace
from benchmarks.speed.throughput_cases import VOCABULARY

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Limits:
    """What users accept: seconds to the first token, and a mean of seconds for each further one."""

    first_s: float = 2.0
    per_token_s: float = 0.1


@dataclass(frozen=True)
class Answer:
    """An answered request: seconds from its arrival to its first token and to its end."""

    lengths: Lengths
    arrived_s: float
    first_s: float
    latency_s: float
    tokens: int

    @property
    def per_token_s(self) -> float:
        """Mean seconds for each token after the first; 0 where there is none."""
        return (self.latency_s - self.first_s) / max(1, self.tokens - 1)

    def meets(self, limits: Limits) -> bool:
        """Whether it is as quick as wanted."""
        return self.first_s <= limits.first_s and self.per_token_s <= limits.per_token_s


@dataclass(frozen=True)
class Pass:
    """A trace that was played: requests and tokens a second, and percentiles in milliseconds."""

    good_per_s: float
    good_share: float
    tokens_per_s: float
    first_ms: tuple[float, float]
    """50th and 99th percentile of the time to the first token."""
    per_token_ms: tuple[float, float]
    """The same of requests' mean times for a further token."""

    @classmethod
    def of(cls, answers: Sequence[Answer], limits: Limits) -> Pass:
        """The figures of a pass, which lasts until its last token."""
        seconds = max(a.arrived_s + a.latency_s for a in answers)
        good = sum(a.meets(limits) for a in answers)
        first = np.percentile([1e3 * a.first_s for a in answers], (50, 99))
        longer = [1e3 * a.per_token_s for a in answers if a.tokens > 1]
        token = np.percentile(longer, (50, 99))
        return cls(
            good / seconds,
            good / len(answers),
            sum(a.tokens for a in answers) / seconds,
            (float(first[0]), float(first[1])),
            (float(token[0]), float(token[1])),
        )


def prompt_ids(lengths: Lengths, number: int, turn: int) -> tuple[int, ...]:
    """Random tokens: no two prompts of any turn share a beginning."""
    draw = np.random.default_rng([turn, number])
    return tuple(draw.integers(3, VOCABULARY, lengths.prompt).tolist())


def play_http(url: str, model: str, trace: Trace, turn: int) -> list[Answer]:
    """Play a trace against the server at `url`."""
    return asyncio.run(_play(url, model, trace, turn))


async def _play(url: str, model: str, trace: Trace, turn: int) -> list[Answer]:
    from openai import AsyncOpenAI

    prompts = [list(prompt_ids(a.lengths, i, turn)) for i, a in enumerate(trace)]
    async with AsyncOpenAI(
        base_url=url, api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        await client.models.list()  # imports and a connection
        began_s = time.perf_counter()

        async def one(arrival: Arrival, prompt: list[int]) -> Answer:
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            stream = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=arrival.lengths.new,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            first_s = last_s = 0.0
            tokens = 0
            async for chunk in stream:
                now_s = time.perf_counter() - began_s - arrival.at_s
                if chunk.choices:
                    first_s, last_s = first_s or now_s, now_s
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            if tokens != arrival.lengths.new:
                raise RuntimeError(f"{url} gave {tokens} tokens, not {arrival.lengths.new}")
            return Answer(arrival.lengths, arrival.at_s, first_s, last_s, tokens)

        return list(await asyncio.gather(*(one(a, p) for a, p in zip(trace, prompts, strict=True))))
