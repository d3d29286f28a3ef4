"""Generating on through the faults of stages: what is in flight is replayed, and nothing is given
out twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ray import ObjectRefGenerator
from ray.exceptions import RayTaskError

from actors.messages import Chunk, Finished, Request
from actors.processes.ray_head import check_head
from actors.recovery.diagnosis import diagnose, requests_in
from actors.recovery.faults import RunInterruptedError, StoppedRun, lost_by
from actors.recovery.liveness import LivenessCheck
from actors.recovery.repair import Repair
from actors.recovery.streams import RunStreams
from actors.recovery.suspects import RequestLedger
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError

CHUNKS_AHEAD = 2  # one that the first stage works on, and one that waits there
LEAST_CHUNK_REQUESTS = 64  # a call takes about a millisecond: spread over this many requests

FEW_SHARE = 8
"""The share of the slots that a chunk has where others take requests from the same source: with two
chunks ahead a quarter of a fill waits here when there is nothing left for the others."""


class Generation:
    """Runs the requests of `ledger` through the pipeline of `repair`, again after every fault.

    `few`: it takes few requests ahead of its slots, as others take from the same source.
    """

    def __init__(self, repair: Repair, ledger: RequestLedger, few: bool = False) -> None:
        self._repair = repair
        self._pipeline = repair.pipeline
        self._answers = repair.pipeline.answers
        self._recovery = repair.recovery
        self._ledger = ledger
        self._few = few
        self._is_interrupted = False
        self._streams: deque[ObjectRefGenerator] = deque()
        self._run = 0
        self._check = self._new_check()
        self._watch = RunStreams[Finished](self._pipeline, self._recovery)

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
        finished = self._ledger.finish(self._watch.left_in(self._streams))
        self._note_progress(stopped)
        return finished

    def interrupt(self) -> None:
        """Have `results`, which another thread waits in, raise `RunInterruptedError` within about a
        second; but what it repairs is repaired first.
        """
        self._is_interrupted = True

    def _look(self) -> None:
        if self._is_interrupted:
            raise RunInterruptedError
        self._check.look()

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

    def _finished(self) -> Iterator[tuple[Finished, ...]]:
        """Yield what the oldest stream has."""
        yield from self._watch.items(self._streams[0], self._look, self._check.interval_s)
        self._streams.popleft()

    def _chunks(self) -> Iterator[Chunk | None]:
        """Yield chunks, the first of which fills all slots; None where the source pauses."""
        sizes = self._pipeline.sizes
        size = sizes.slots if self._few else max(sizes.slots, LEAST_CHUNK_REQUESTS)
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
            if self._few:
                size = few_requests(sizes)

    def _recover(self, error: Exception) -> Iterator[tuple[Finished, ...]]:
        """Stop the run, find what happened, and repair the pipeline."""
        check_head()  # stages die with it, and nothing starts them again
        began_s = self._answers.now_s()
        stopped = self._repair.stop_run(lost_by(error))
        new = self._ledger.finish(self._watch.left_in(self._streams))
        if new:
            yield new
        in_flight = self._note_progress(stopped)
        fault = diagnose(self._pipeline, stopped, error, in_flight)
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

    def _note_progress(self, stopped: StoppedRun) -> dict[int, str] | None:
        """Note the tokens so far; return the request in each slot (None: stage 0 is lost)."""
        latest = stopped.tokens or self._check.tokens
        if latest is not None and latest.run == self._run:
            self._ledger.progress({i: tokens.tolist() for i, tokens in latest.slots.values()})
        return requests_in(stopped, self._run)


def few_requests(sizes: QueueSizes) -> int:
    """Requests of a chunk behind the first one, where few are to be taken ahead."""
    return max(sizes.prefill_micro_batch, -(-sizes.slots // FEW_SHARE))
