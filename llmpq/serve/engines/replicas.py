"""Several pipelines behind one server, copies of one or a fleet: each request goes to that with the
least load.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from actors.sampling_options import Sampling
from llmpq.rows.row import Row
from llmpq.serve.engine import (
    Engine,
    EngineLimits,
    EngineStatus,
    EngineStoppingError,
    GenerationRequest,
    QueueState,
    TokenEvent,
)
from llmpq.tokenizing.reasoning import Markers


class Replica(Engine, Protocol):
    """An engine that loads its stages in the background."""

    def start(self) -> None:
        """Begin to load."""

    def wait_loaded(self) -> None:
        """Wait until `status` is no more "loading", or the engine is being closed."""

    def close(self) -> None:
        """End what was loaded, and the generations that there are."""


class ReplicatedEngine:
    """An engine of several that have room for the same requests: copies of one plan, or the
    pipelines of a fleet.

    They load one after another, so that the later ones find packed layers where a cache keeps
    them; the first that is ready makes this one ready. One that is lost ends its own generations
    alone, and new ones go to the others.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._reserved = [0] * len(self._replicas)
        self._closing = threading.Event()
        self._loading = threading.Thread(target=self._load, name="llmpq-replicas", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._loading.start()

    def close(self) -> None:
        """End all of them, at the same time."""
        self._closing.set()
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            list(pool.map(lambda each: each.close(), self._replicas))

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._replicas[0].model_name

    @property
    def created_s(self) -> int:
        """Unix time at which the first of them was made."""
        return self._replicas[0].created_s

    @property
    def limits(self) -> EngineLimits:
        """Lengths that fit, which are those of each."""
        return self._replicas[0].limits

    @property
    def sampling(self) -> Sampling:
        """Sampling of requests where they name none of their own."""
        return self._replicas[0].sampling

    @property
    def markers(self) -> Markers | None:
        """What the model's reasoning stands between, if it has such tokens."""
        return self._replicas[0].markers

    @property
    def status(self) -> EngineStatus:
        """Ready as long as one of them is; failed when none can become so any more."""
        found = {each.status for each in self._replicas}
        order: tuple[EngineStatus, ...] = ("ready", "loading", "draining")
        return next((each for each in order if each in found), "failed")

    @property
    def queue(self) -> QueueState:
        """The load of those that take requests."""
        queues = [each.queue for each in self._replicas if each.status == "ready"]
        return QueueState(
            waiting=sum(each.waiting for each in queues),
            running=sum(each.running for each in queues),
            slots=sum(each.slots for each in queues),
            kv_tokens_used=sum(each.kv_tokens_used for each in queues),
            kv_tokens=sum(each.kv_tokens for each in queues),
        )

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids of a prompt, as `Engine.encode`."""
        return await self._replicas[0].encode(row)

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of token ids, as `Engine.decode`."""
        return await self._replicas[0].decode(token_ids, before)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """The tokens of an answer, as `Engine.generate`, from one of them."""
        tokens = len(request.prompt_ids) + request.max_new_tokens
        index = self._least_loaded()
        self._reserved[index] += tokens
        generation = self._replicas[index].generate(request)
        try:
            async for event in generation:
                yield event
        finally:
            self._reserved[index] -= tokens
            await generation.aclose()

    def _least_loaded(self) -> int:
        """The one that has the fewest tokens to do for its token slots, waiting requests' too."""
        ready = [i for i, each in enumerate(self._replicas) if each.status == "ready"]
        if not ready:
            raise EngineStoppingError("no replica takes requests now")
        return min(ready, key=lambda i: self._reserved[i] / self._replicas[i].queue.kv_tokens)

    def _load(self) -> None:
        for each in self._replicas:
            if self._closing.is_set():
                return
            each.start()
            each.wait_loaded()
