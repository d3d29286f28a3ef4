"""Live generation: requests come and go at any time, tokens are given out as they are sampled, and
none is given twice though stages fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import RLock

from ray import ObjectRefGenerator
from ray.exceptions import RayTaskError

from actors.messages import Finished, Progress, Request
from actors.processes.ray_head import check_head
from actors.recovery.diagnosis import diagnose, requests_in
from actors.recovery.faults import RunInterruptedError, lost_by
from actors.recovery.liveness import LivenessCheck
from actors.recovery.repair import Repair
from actors.recovery.streams import RunStreams
from actors.recovery.suspects import RequestLedger
from quant.common.errors import SpecError, StageLostError


class LiveGeneration:
    """Runs requests through the pipeline of `repair` from when they are submitted, and goes on
    after faults as `Generation` does: what has not ended is replayed with the tokens that were
    given out.

    One thread reads `events`; any thread may call the other methods meanwhile. While suspects of
    killing stages run alone, other requests wait. Tokens of `told_every` micro-batches come
    together, but a request's first ones and its end at once. One with a `host_key` and tokens goes
    on from what lies there only while the pipeline is linked as it was then: else all of them are
    computed.
    """

    def __init__(self, repair: Repair, told_every: int = 1) -> None:
        recovery = repair.recovery
        self._repair = repair
        self._pipeline = repair.pipeline
        self._recovery = recovery
        self._told_every = told_every
        self._is_interrupted = False
        self._lock = RLock()  # around all that follows
        self._queue: dict[str, Request] = {}  # submitted, but not in the ledger yet
        self._tokens: dict[str, list[int]] = {}  # given out, of all that have not ended
        self._ledger = RequestLedger(self._arrivals(), recovery.retries, recovery.restarts)
        self._closed = False
        self._run = 0
        self._takes_more = False  # whether the present run does

    def submit(self, request: Request) -> None:
        """Have `request` run as soon as there is room. Its custom_id must be unlike those of all
        requests under way, and of all that were cancelled.

        Raises `SpecError` for one that is under way. What else is wrong with it becomes an event
        with an error.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("a live generation takes no requests after close()")
            if request.custom_id in self._tokens:
                raise SpecError(f"custom_id {request.custom_id!r:.80} is in the run twice")
            self._tokens[request.custom_id] = list(request.generated)
            self._queue[request.custom_id] = request
            self._feed()

    def cancel(self, custom_id: str) -> None:
        """Give up a request: its memory is free at the next iteration, and no more events tell of
        it but those that were read. One that has ended is ignored.
        """
        with self._lock:
            if self._tokens.pop(custom_id, None) is None:
                return
            if self._queue.pop(custom_id, None) is None:
                self._ledger.cancel(custom_id)
                self._pipeline.stages[0].cancel(self._run, (custom_id,))

    def close(self) -> None:
        """Take no more requests; `events` ends when all have ended."""
        with self._lock:
            self._closed = True
            self._feed()

    def interrupt(self) -> None:
        """Have `events`, which another thread waits in, raise `RunInterruptedError` within about a
        second; but what it repairs is repaired first.
        """
        self._is_interrupted = True

    @property
    def under_way(self) -> int:
        """Number of requests that were submitted and have neither ended nor been cancelled."""
        return len(self._tokens)

    def events(self) -> Iterator[tuple[Progress, ...]]:
        """Yield new tokens as they come, and the ends of requests.

        Raises `StageLostError` when there is no point in going on, its `DeviceLostError` when a
        device is gone, and `RunInterruptedError`.
        """
        while self._begin_turn():
            hang_s, stages = self._recovery.hang_s, self._pipeline.stages
            check = LivenessCheck(stages, self._pipeline.answers, hang_s, needs_progress=True)
            streams = RunStreams[Progress](self._pipeline, self._recovery)
            stream = stages[0].live(self._run, self._told_every)

            def look(check: LivenessCheck = check) -> None:
                if self._is_interrupted:
                    raise RunInterruptedError
                check.look(is_idle=not self._tokens)

            try:
                for told in streams.items(stream, look, check.interval_s):
                    yield from self._new(told)
            except (StageLostError, RayTaskError) as error:
                if not self._recovery.retries:
                    raise
                caught = error
            else:
                continue
            check_head()  # stages die with it, and nothing starts them again
            yield from self._recover(caught, streams, () if streams.has_gap else (stream,))

    def _arrivals(self) -> Iterator[Request | None]:
        """Yield what was submitted, and None where no more has come yet."""
        while self._queue or not self._closed:
            yield self._queue.pop(next(iter(self._queue))) if self._queue else None

    def _begin_turn(self) -> bool:
        with self._lock:
            if not self._ledger.next_turn():
                return False
            self._run = self._pipeline.next_run()
            self._takes_more = True
            # The first stage must know of the run before it can be told to stop.
            self._pipeline.stages[0].submit(self._run, ())
            self._feed()
            return True

    def _feed(self) -> None:
        """Hand the run what the ledger has for it; where no more can come, it ends with that."""
        if not self._takes_more:
            return
        first, new = self._pipeline.stages[0], set(self._queue)
        requests = [self._with_valid_key(each) for each in self._ledger.take(sys.maxsize)]
        if requests:  # of one that comes again, the first stage knows the age, or nobody
            aged = [r if r.custom_id in new else replace(r, age_s=None) for r in requests]
            first.submit(self._run, aged)
        if not self._ledger.paused:
            self._takes_more = False
            first.close_live(self._run)

    def _with_valid_key(self, request: Request) -> Request:
        """The request, without its key where nothing lies under that any more, nor will."""
        key = request.host_key
        if key is None or not request.generated or key.epoch == self._pipeline.epoch:
            return request
        return replace(request, host_key=None)

    def _new(self, told: Sequence[Progress]) -> Iterator[tuple[Progress, ...]]:
        """Note what was told; yield that of requests which were not given up."""
        with self._lock:
            new = tuple(each for each in told if each.custom_id in self._tokens)
            for each in new:
                self._tokens[each.custom_id] += each.token_ids
                if each.finish_reason is not None:
                    tokens = tuple(self._tokens.pop(each.custom_id))
                    self._ledger.finish((Finished(each.custom_id, tokens, each.finish_reason),))
        if new:
            yield new

    def _recover(
        self, error: Exception, streams: RunStreams[Progress], unread: Sequence[ObjectRefGenerator]
    ) -> Iterator[tuple[Progress, ...]]:
        """Stop the run, find what happened, and repair the pipeline."""
        answers, events = self._pipeline.answers, self._repair.events
        began_s = answers.now_s()
        with self._lock:
            self._takes_more = False
        stopped = self._repair.stop_run(lost_by(error))
        yield from self._new(streams.left_in(unread))
        in_flight = requests_in(stopped, self._run)
        fault = diagnose(self._pipeline, stopped, error, in_flight)
        with self._lock:
            self._ledger.progress(self._tokens)
            given_up = () if fault.has_remedy else self._ledger.fault(fault)
            for each in given_up:
                del self._tokens[each.custom_id]
        for each in given_up:
            text = f"{each.custom_id!r:.80}: {each.error}"
            events.tell("given up", fault.stage, 0.0, text)
        if given_up:
            yield tuple(Progress(each.custom_id, (), "error", each.error) for each in given_up)
        self._repair.restore(stopped)
        lost_s = answers.now_s() - began_s
        replayed = len(self._ledger.unfinished if in_flight is None else in_flight)
        text = f"{fault.text}; going on after {lost_s:.1f} s, {replayed} requests are replayed"
        events.tell(fault.kind, fault.stage, lost_s, text)
