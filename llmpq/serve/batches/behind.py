"""The engine as batches have it: they generate only with room that online requests leave.

A generation is handed to the engine while no online answer waits, as long as the answers and
generations in flight are fewer than the engine's slots, and only few of these have no token yet.
So none waits in the engine's own queue, where it would be before an online request that comes
later: that one waits for one slot to become free at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from actors.sampling_options import Sampling
from llmpq.rows.row import Row
from llmpq.serve.access import Gate
from llmpq.serve.engine import (
    Engine,
    EngineLimits,
    EngineStatus,
    GenerationRequest,
    QueueState,
    TokenEvent,
)
from llmpq.tokenizing.reasoning import Markers

STARTING_SHARE = 4
"""One in so many slots may hold a batch's generation that has no token yet: an online request that
comes just then has few prompts before its own.
"""

LOOK_S = 0.25
"""Seconds after which room is looked for again where nothing tells of any."""


class BehindOnline:
    """An `Engine` whose generations wait for room, first come, first served."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._starting = 0
        self._first = asyncio.Lock()
        self._encoding = asyncio.Lock()
        self._changed = asyncio.Event()
        gate.on_room = self._changed.set

    @property
    def has_room(self) -> bool:
        """Whether a generation may be handed to the engine now."""
        gate, queue = self._gate, self._engine.queue
        if gate.status != "ready":
            return False
        online = max(gate.answers, queue.waiting + queue.running - gate.background)
        most_starting = max(1, queue.slots // STARTING_SHARE)
        return online + gate.background < queue.slots and self._starting < most_starting

    async def room(self) -> None:
        while not self.has_room:
            await self.pause()

    async def pause(self) -> None:
        """Wait until something changes, or for a moment."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._changed.wait()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """The tokens of an answer, as `Engine.generate`, once there is room."""
        async with self._first:
            await self.room()
            self._gate.background += 1
            self._starting += 1
        is_starting = True
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if is_starting:
                        is_starting = False
                        self._starting -= 1
                        self._changed.set()
                    yield event
        finally:
            self._gate.background -= 1
            self._starting -= is_starting
            self._changed.set()

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids, as `Engine.encode`; one prompt at a time, so that online ones come between."""
        async with self._encoding:
            return await self._engine.encode(row)

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        return await self._engine.decode(token_ids, before)

    @property
    def model_name(self) -> str:
        return self._engine.model_name

    @property
    def created_s(self) -> int:
        return self._engine.created_s

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def sampling(self) -> Sampling:
        return self._engine.sampling

    @property
    def markers(self) -> Markers | None:
        return self._engine.markers

    @property
    def status(self) -> EngineStatus:
        return self._engine.status

    @property
    def queue(self) -> QueueState:
        return self._engine.queue
