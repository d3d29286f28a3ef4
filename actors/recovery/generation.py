"""Generating on through the faults of stages: what is in flight is replayed, and nothing is given
out twice.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.messages import Chunk, Finished, Request
from actors.processes.health import BatchFailure, SoFar
from actors.processes.ray_head import check_head, references_of
from actors.recovery.ledger import Fault, Ledger
from actors.recovery.liveness import Watch
from actors.recovery.policy import EventKind, OnEvent, Recovery, RecoveryEvent
from actors.recovery.repair import Aftermath, Stages, hung_by, mend, settle
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError

CHUNKS_AHEAD = 2  # one that the first stage works on, and one that waits there
LEAST_CHUNK_REQUESTS = 64  # a call takes about a millisecond: spread over this many requests


@dataclass(frozen=True)
class _Verdict:
    """What a fault was: its kind and stage, and what the ledger must know (None: nothing)."""

    kind: EventKind
    stage: int | None
    text: str
    fault: Fault | None


class Generation:
    """The requests of `ledger` through `stages`: watched, and begun again after every fault."""

    def __init__(
        self, stages: Stages, ledger: Ledger, recovery: Recovery, on_event: OnEvent
    ) -> None:
        self._stages = stages
        self._ledger = ledger
        self._recovery = recovery
        self._on_event = on_event
        self._streams: deque[Any] = deque()
        self._run = 0
        self._watch: Watch

    def results(self) -> Iterator[tuple[Finished, ...]]:
        """What finished, each request once; nothing where the source pauses.

        Raises `StageLostError` when there is no point in going on, and its `DeviceLostError` when a
        device is gone.
        """
        while self._ledger.next_turn():
            try:
                for finished in self._turn():
                    new = self._ledger.finish(finished)
                    if new or not finished:
                        yield new
            except (StageLostError, RayTaskError) as error:
                if self._ledger.reading or not self._recovery.retries:
                    raise
                caught = error
            else:
                continue
            yield from self._recover(caught)

    def _turn(self) -> Iterator[tuple[Finished, ...]]:
        self._run = self._stages.next_run()
        self._watch = Watch(self._stages.actors, self._recovery.hang_s, self._stages.get)
        self._streams.clear()
        for chunk in self._chunks():
            if chunk is None:
                yield ()
                continue
            self._streams.append(self._stages.generate_chunk(chunk))
            if len(self._streams) == CHUNKS_AHEAD:
                yield from self._finished()
        while self._streams:
            yield from self._finished()

    def _chunks(self) -> Iterator[Chunk | None]:
        """The first one fills all slots; None where the source pauses while one is filled."""
        size = max(self._stages.sizes.slots, LEAST_CHUNK_REQUESTS)
        taken: tuple[Request, ...] = ()
        last = False
        while not last:
            taken += self._ledger.take(size - len(taken))
            if self._ledger.paused:
                yield None
                continue
            last = len(taken) < size
            yield Chunk(self._run, taken, last)
            taken = ()

    def _finished(self) -> Iterator[tuple[Finished, ...]]:
        """What the oldest stream has; raises as soon as any stage fails that it may wait for."""
        stream = self._streams[0]
        while True:
            awaited = [stream, *self._stages.serving]
            done, _ = ray.wait(awaited, timeout=self._watch.interval_s, fetch_local=False)
            self._watch.look()
            if not done:
                continue
            if stream not in done:
                self._raise_failure()
            try:
                finished = self._stages.get(next(stream))
            except StopIteration:
                break
            except StageLostError as error:
                self._raise_failure(error)
            yield finished
        self._streams.popleft()

    def _raise_failure(self, *noticed: StageLostError) -> None:
        """Who is to blame is found while mending; only where nobody mends, at once."""
        if not self._recovery.retries:
            self._stages.raise_failure(*noticed)
        raise noticed[0] if noticed else StageLostError("a stage left the run")

    def _recover(self, error: Exception) -> Iterator[tuple[Finished, ...]]:
        """Bring all stages to rest, judge what happened, and link them again."""
        check_head()  # stages die with it, and nothing starts them again
        began_s = time.monotonic()
        after = settle(self._stages, hung_by(error), self._recovery)
        new = self._ledger.finish(self._rest_of_streams())
        if new:
            yield new
        in_flight = self._note_progress(after)
        verdict = self._judge(after, error, in_flight)
        if verdict.fault is not None:
            given_up = self._ledger.fault(verdict.fault)
            for each in given_up:
                self._tell("given up", verdict.stage, 0.0, f"{each.custom_id!r:.80}: {each.error}")
            if given_up:
                yield given_up
        mend(self._stages, after, self._recovery, self._on_event)
        lost_s = time.monotonic() - began_s
        replayed = len(self._ledger.unfinished if in_flight is None else in_flight)
        text = f"{verdict.text}; going on after {lost_s:.1f} s, {replayed} requests are replayed"
        self._tell(verdict.kind, verdict.stage, lost_s, text)

    def _rest_of_streams(self) -> list[Finished]:
        """What had finished before the fault; also notices a mistake of the user's."""
        finished: list[Finished] = []
        for stream in self._streams:
            try:
                for reference in references_of(stream):
                    finished += self._stages.get(reference)
            except (StageLostError, RayTaskError):
                continue
        for reference in self._stages.serving:
            try:
                self._stages.get(reference)
            except (StageLostError, RayTaskError):
                continue
        return finished

    def _note_progress(self, after: Aftermath) -> dict[int, str] | None:
        """Which request was in which slot (None: the first stage cannot say)."""
        last = after.so_far or self._watch.so_far
        if last is not None and last.run == self._run:
            self._ledger.progress({i: tokens.tolist() for i, tokens in last.slots.values()})
        return None if after.so_far is None else self._slots_of(after.so_far)

    def _slots_of(self, so_far: SoFar) -> dict[int, str]:
        if so_far.run != self._run:
            return {}
        return {slot: custom_id for slot, (custom_id, _) in so_far.slots.items()}

    def _judge(
        self, after: Aftermath, error: Exception, in_flight: dict[int, str] | None
    ) -> _Verdict:
        everyone = None if in_flight is None else frozenset(in_flight.values())
        for stage, why in after.dead.items():
            text = f"{self._stages.name(stage)} {why}"
            kind: EventKind = "hung" if why.startswith("hung") else "died"
            return _Verdict(kind, stage, text, Fault(text, everyone))
        for stage, failure in after.failures.items():
            return self._judge_failure(stage, failure, in_flight)
        return _Verdict("broken", None, str(error), Fault(str(error), everyone))

    def _judge_failure(
        self, stage: int, failure: BatchFailure, in_flight: dict[int, str] | None
    ) -> _Verdict:
        name, size = self._stages.name(stage), len(failure.slots)
        slots = in_flight or {}
        ids = frozenset(slots[slot] for slot in failure.slots if slot in slots) or None
        if not failure.short_of_memory:
            text = f"{name} failed at a {failure.phase} of {size} requests: {failure.text}"
            return _Verdict("failed", stage, text, Fault(text, ids))
        text = (
            f"{name} ran out of memory at a {failure.phase} of {size} requests: it held "
            f"{failure.held_bytes} bytes and asked for {failure.asked_bytes or 'more'}"
        )
        if size == 1:
            return _Verdict("memory", stage, text, Fault(text, ids, short_of_memory=True))
        self._stages.sizes = halved(self._stages.sizes, failure)
        text += f"; its micro-batches are halved to {size // 2}"
        warnings.warn(text, stacklevel=2)
        return _Verdict("memory", stage, text, None)

    def _tell(self, kind: EventKind, stage: int | None, lost_s: float, text: str) -> None:
        self._on_event(RecoveryEvent(time.time(), kind, stage, lost_s, text))


def halved(sizes: QueueSizes, failure: BatchFailure) -> QueueSizes:
    """`sizes` with half of the failed micro-batch for its phase."""
    half = max(1, len(failure.slots) // 2)
    if failure.phase == "prefill":
        return replace(sizes, prefill_micro_batch=min(half, sizes.prefill_micro_batch))
    return replace(sizes, decode_micro_batch=min(half, sizes.decode_micro_batch))
