"""Generating on through the faults of stages: what is in flight is replayed, and nothing is given
out twice.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ray import ObjectRefGenerator
from ray.exceptions import RayTaskError

from actors.messages import Chunk, Finished, Request
from actors.processes.health import BatchFailure, SlotTokens
from actors.processes.ray_head import check_head
from actors.recovery.faults import Fault, StoppedRun, lost_by
from actors.recovery.liveness import LivenessCheck
from actors.recovery.repair import Repair
from actors.recovery.suspects import RequestLedger
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError

CHUNKS_AHEAD = 2  # one that the first stage works on, and one that waits there
LEAST_CHUNK_REQUESTS = 64  # a call takes about a millisecond: spread over this many requests


class Generation:
    """Runs the requests of `ledger` through the pipeline of `repair`, again after every fault."""

    def __init__(self, repair: Repair, ledger: RequestLedger) -> None:
        self._repair = repair
        self._pipeline = repair.pipeline
        self._answers = repair.pipeline.answers
        self._recovery = repair.recovery
        self._ledger = ledger
        self._streams: deque[ObjectRefGenerator] = deque()
        self._run = 0
        self._check = self._new_check()

    def results(self) -> Iterator[tuple[Finished, ...]]:
        """Yield what finished, each request once, and nothing where the source pauses.

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

    def _new_check(self) -> LivenessCheck:
        hang_s = self._recovery.hang_s
        return LivenessCheck(self._pipeline.stages, self._answers, hang_s, needs_progress=True)

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        """The number of new tokens of each request in a slot, a second ago or so."""
        latest = self._check.tokens
        if latest is None or latest.run != self._run:
            return {}
        return {custom_id: len(tokens) for custom_id, tokens in latest.slots.values()}

    def halt(self) -> tuple[Finished, ...]:
        """Stop the run for good and note the tokens of what is in flight; return what had finished
        and was not given out. May be called while `results` waits to be asked on.
        """
        stopped = self._repair.stop_run({})
        finished = self._ledger.finish(self._left_in_streams())
        self._note_progress(stopped)
        return finished

    def _turn(self) -> Iterator[tuple[Finished, ...]]:
        self._run = self._pipeline.next_run()
        self._check = self._new_check()
        self._streams.clear()
        for chunk in self._chunks():
            if chunk is None:
                yield ()
                continue
            self._streams.append(self._pipeline.generate(chunk))
            if len(self._streams) == CHUNKS_AHEAD:
                yield from self._finished()
        while self._streams:
            yield from self._finished()

    def _chunks(self) -> Iterator[Chunk | None]:
        """Yield chunks, the first of which fills all slots; None where the source pauses."""
        size = max(self._pipeline.sizes.slots, LEAST_CHUNK_REQUESTS)
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
        """Yield what the oldest stream has; raises as soon as any stage of the run fails."""
        stream = self._streams[0]
        while True:
            awaited = [stream, *self._pipeline.serving]
            ready = self._answers.ready(awaited, self._check.interval_s, fetch=False)
            self._check.look()
            if not ready:
                continue
            if stream not in ready:
                self._raise_failure()
            try:
                finished = self._answers.get(next(stream))
            except StopIteration:
                break
            except StageLostError as error:
                self._raise_failure(error)
            yield finished
        self._streams.popleft()

    def _raise_failure(self, *noticed: StageLostError) -> None:
        """Raise what was noticed: repair finds who is to blame, and where there is none, we do."""
        if not self._recovery.retries:
            self._pipeline.raise_failure(*noticed)
        raise noticed[0] if noticed else StageLostError("a stage left the run")

    def _recover(self, error: Exception) -> Iterator[tuple[Finished, ...]]:
        """Stop the run, find what happened, and repair the pipeline."""
        check_head()  # stages die with it, and nothing starts them again
        began_s = self._answers.now_s()
        stopped = self._repair.stop_run(lost_by(error))
        new = self._ledger.finish(self._left_in_streams())
        if new:
            yield new
        in_flight = self._note_progress(stopped)
        fault = self._diagnose(stopped, error, in_flight)
        given_up = () if fault.has_remedy else self._ledger.fault(fault)
        for each in given_up:
            text = f"{each.custom_id!r:.80}: {each.error}"
            self._repair.events.tell("given up", fault.stage, 0.0, text)
        if given_up:
            yield given_up
        self._repair.restore(stopped)
        lost_s = self._answers.now_s() - began_s
        replayed = len(self._ledger.unfinished if in_flight is None else in_flight)
        text = f"{fault.text}; going on after {lost_s:.1f} s, {replayed} requests are replayed"
        self._repair.events.tell(fault.kind, fault.stage, lost_s, text)

    def _left_in_streams(self) -> list[Finished]:
        """Return what had finished before the fault; raises a mistake of the user's."""
        finished: list[Finished] = []
        for stream in self._streams:
            try:
                for reference in self._answers.streamed(stream):
                    finished += self._answers.get(reference)
            except (StageLostError, RayTaskError):
                continue
        for served in self._pipeline.serving:
            try:
                self._answers.get(served)
            except (StageLostError, RayTaskError):
                continue
        return finished

    def _note_progress(self, stopped: StoppedRun) -> dict[int, str] | None:
        """Note the tokens so far; return the request in each slot (None: stage 0 is lost)."""
        latest = stopped.tokens or self._check.tokens
        if latest is not None and latest.run == self._run:
            self._ledger.progress({i: tokens.tolist() for i, tokens in latest.slots.values()})
        return None if stopped.tokens is None else self._requests_in(stopped.tokens)

    def _requests_in(self, tokens: SlotTokens) -> dict[int, str]:
        if tokens.run != self._run:
            return {}
        return {slot: custom_id for slot, (custom_id, _) in tokens.slots.items()}

    def _diagnose(
        self, stopped: StoppedRun, error: Exception, in_flight: dict[int, str] | None
    ) -> Fault:
        everyone = None if in_flight is None else frozenset(in_flight.values())
        for stage, loss in stopped.lost.items():
            text = f"{self._pipeline.stages[stage].name} {loss.text}"
            return Fault(loss.kind, stage, text, everyone)
        for stage, failure in stopped.failures.items():
            return self._diagnose_failure(stage, failure, in_flight or {})
        return Fault("broken", None, str(error), everyone)

    def _diagnose_failure(
        self, stage: int, failure: BatchFailure, in_flight: dict[int, str]
    ) -> Fault:
        name, size = self._pipeline.stages[stage].name, len(failure.slots)
        ids = frozenset(in_flight[slot] for slot in failure.slots if slot in in_flight) or None
        if failure.kind != "memory":
            text = f"{name} failed at a {failure.batch_kind} of {size} requests: {failure.text}"
            return Fault("failed", stage, text, ids)
        text = (
            f"{name} ran out of memory at a {failure.batch_kind} of {size} requests: it held "
            f"{failure.held_bytes} bytes and asked for {failure.asked_bytes or 'more'}"
        )
        if size == 1:
            return Fault("memory", stage, text, ids)
        self._pipeline.sizes = halved(self._pipeline.sizes, failure)
        text += f"; its micro-batches are halved to {size // 2}"
        warnings.warn(text, stacklevel=2)
        return Fault("memory", stage, text, ids, has_remedy=True)


def halved(sizes: QueueSizes, failure: BatchFailure) -> QueueSizes:
    """Return `sizes` with half of the failed micro-batch for the phases that it had."""
    half = max(1, len(failure.slots) // 2)
    prefill, decode = sizes.prefill_micro_batch, sizes.decode_micro_batch
    if sizes.max_batch_size:
        return replace(sizes, max_batch_size=min(half, sizes.max_batch_size))
    if failure.batch_kind == "mixed":  # its share of each is not known
        return replace(
            sizes, prefill_micro_batch=max(1, prefill // 2), decode_micro_batch=max(1, decode // 2)
        )
    if failure.batch_kind == "prefill":
        return replace(sizes, prefill_micro_batch=min(half, prefill))
    return replace(sizes, decode_micro_batch=min(half, decode))
