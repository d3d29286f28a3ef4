"""Live generation: requests come and go at any time, and none is lost or told of twice though
stages fail.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from threading import RLock

from ray import ObjectRefGenerator
from ray.exceptions import RayTaskError

from actors.messages import HeadId, Progress, Request
from actors.processes.health import BatchFailure
from actors.processes.ray_head import check_head
from actors.recovery.faults import Fault, RequestLedger, RunInterruptedError, StoppedRun, lost_by
from actors.recovery.pipeline import LivenessCheck, StagePipeline
from actors.recovery.policy import RecoveryEvent
from actors.recovery.repair import Repair
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import SpecError, StageLostError

LEAST_TOGETHER = 64  # requests: a call takes about a millisecond, spread over this many
MOST_AHEAD = 8  # times what is taken together: a source that was slow once is not read to its end


class LiveGeneration:
    """A `Live` over the pipeline of `repair`. What has not ended is replayed after a fault, with
    the tokens that it had; nothing is told of twice.

    While suspects of killing stages run alone, other requests wait. Tokens of `told_every`
    micro-batches come together, but a request's first ones and its end at once; with 0, all of them
    come with its end. `waits`: whoever reads the events submits as many requests as are `wanted`
    between them, until it calls `close`, and micro-batches are as large as planned.

    A request with a `host_key` and tokens goes on from what lies there only while the pipeline is
    linked as it was then: else all of them are computed.
    """

    def __init__(self, repair: Repair, told_every: int = 1, waits: bool = False) -> None:
        self._repair, self._pipeline, self._recovery = repair, repair.pipeline, repair.recovery
        self._answers = repair.pipeline.answers
        self._told_every, self._waits = told_every, waits
        self._slots = repair.pipeline.sizes.slots
        self._together = self._ahead = max(self._slots, LEAST_TOGETHER)
        self._is_interrupted = False
        self._lock = RLock()  # around all that follows
        self._queue: dict[str, Request] = {}  # submitted, but not in the ledger yet
        self._tokens: dict[str, list[int]] = {}  # known, of all that have not ended
        self._ledger = RequestLedger(self._recovery.retries, self._recovery.restarts)
        self._closed = False
        self._run = 0
        self._takes_more = False  # whether the present run does
        self._stream: ObjectRefGenerator | None = None  # of the present run, while it can be read
        self._check = self._new_check()

    def submit(self, *requests: Request) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("a live generation takes no requests after close()")
            for request in requests:
                if request.custom_id in self._tokens:
                    raise SpecError(f"custom_id {request.custom_id!r:.80} is in the run twice")
                self._tokens[request.custom_id] = list(request.generated)
                self._queue[request.custom_id] = request
            self._feed()

    def cancel(self, custom_id: str) -> None:
        with self._lock:
            if self._tokens.pop(custom_id, None) is None:
                return
            if self._queue.pop(custom_id, None) is None:
                self._ledger.cancel(custom_id)
                self._pipeline.stages[0].cancel(self._run, (custom_id,))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._feed()

    def interrupt(self) -> None:
        self._is_interrupted = True

    @property
    def under_way(self) -> int:
        return len(self._tokens)

    @property
    def wanted(self) -> int:
        return self._together if self.under_way < self._slots + self._ahead else 0

    @property
    def unfinished(self) -> tuple[Request, ...]:
        with self._lock:
            self._ledger.progress(self._tokens)
            return (*self._ledger.unfinished, *self._queue.values())

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        latest = self._check.tokens
        if latest is None or latest.run != self._run:
            return {}
        slots = latest.slots.values()
        return {name: len(tokens) for name, tokens in slots if not isinstance(name, HeadId)}

    def events(self) -> Generator[tuple[Progress, ...]]:
        while self._begin_turn():
            self._check = self._new_check()
            stream = self._pipeline.stages[0].live(self._run, self._told_every, self._waits)
            self._stream = stream
            try:
                for told in self._items(stream):
                    if not told:
                        self._ahead = min(self._ahead + self._together, MOST_AHEAD * self._together)
                    new = self._new(told)
                    if new or not told:
                        yield new
            except (StageLostError, RayTaskError) as error:
                if not self._recovery.retries:
                    raise
                caught = error
            else:
                continue
            check_head()  # stages die with it, and nothing starts them again
            yield from self._recover(caught)

    def halt(self) -> tuple[Progress, ...]:
        with self._lock:
            self._closed, self._takes_more = True, False
        stopped = self._repair.stop_run({})
        return (*self._new(self._left()), *self._more_tokens(stopped))

    def _new_check(self) -> LivenessCheck:
        hang_s = self._recovery.hang_s
        return LivenessCheck(self._pipeline.stages, self._answers, hang_s, needs_progress=True)

    def _look(self) -> None:
        if self._is_interrupted:
            raise RunInterruptedError
        self._check.look(is_idle=not self._tokens)

    def _begin_turn(self) -> bool:
        with self._lock:
            again = self._ledger.next_turn()
            if self._closed and not again and not self._queue:
                return False
            self._run = self._pipeline.next_run()
            self._takes_more = True
            # The first stage must know of the run before it can be told to stop.
            self._pipeline.stages[0].submit(self._run, ())
            # Of one that comes again, the first stage knows the age, or nobody.
            self._feed([replace(each, age_s=None) for each in again])
            return True

    def _feed(self, again: Sequence[Request] = ()) -> None:
        """Hand the run what comes `again` and what was submitted; the last of it ends it."""
        if not self._takes_more:
            return
        first, requests = self._pipeline.stages[0], [*again]
        if not self._ledger.has_suspects:
            requests += self._queue.values()
            self._ledger.add(self._queue.values())
            self._queue.clear()
        if requests:
            first.submit(self._run, [self._with_valid_key(each) for each in requests])
        if self._closed or self._ledger.has_suspects:
            self._takes_more = False
            first.close_live(self._run)

    def _with_valid_key(self, request: Request) -> Request:
        """The request, without its key where nothing lies under that any more, nor will."""
        key = request.host_key
        if key is None or not request.generated or key.epoch == self._pipeline.epoch:
            return request
        return replace(request, host_key=None)

    def _items(self, stream: ObjectRefGenerator) -> Iterator[tuple[Progress, ...]]:
        """Yield what `stream` has; raises as soon as any stage of the run fails."""
        while True:
            awaited = [stream, *self._pipeline.serving]
            ready = self._answers.ready(awaited, self._check.interval_s, fetch=False)
            self._look()
            if not ready:
                continue
            if stream not in ready:
                self._raise_failure()
            try:
                item: tuple[Progress, ...] = self._answers.get(next(stream))
            except StopIteration:
                return
            except (StageLostError, RayTaskError) as error:
                self._stream = None  # an item is missing, and later ones may be there
                if isinstance(error, RayTaskError):
                    raise
                self._raise_failure(error)
            yield item

    def _raise_failure(self, *noticed: StageLostError) -> None:
        """Raise what was noticed: repair finds who is to blame, and where there is none, we do."""
        if not self._recovery.retries:
            self._pipeline.raise_failure(*noticed)
        raise noticed[0] if noticed else StageLostError("a stage left the run")

    def _left(self) -> list[Progress]:
        """Return what a stopped run gave out that was not read; raises a mistake of the user's."""
        left: list[Progress] = []
        stream, self._stream = self._stream, None
        try:
            for reference in () if stream is None else self._answers.streamed(stream):
                left += self._answers.get(reference)
        except (StageLostError, RayTaskError):
            pass
        for served in self._pipeline.serving:
            try:
                self._answers.get(served)
            except (StageLostError, RayTaskError):
                continue
        return left

    def _new(self, told: Sequence[Progress]) -> tuple[Progress, ...]:
        """Note what was told; return that of requests which were not given up."""
        new: list[Progress] = []
        with self._lock:
            for each in told:
                known = self._tokens.get(each.custom_id)
                if known is None:
                    continue
                if not self._told_every:  # of those that it came with, too
                    each = replace(each, token_ids=each.token_ids[len(known) :])
                known += each.token_ids
                if each.finish_reason is not None:
                    del self._tokens[each.custom_id]
                    self._ledger.finish(each.custom_id)
                new.append(each)
        return tuple(new)

    def _more_tokens(self, stopped: StoppedRun) -> tuple[Progress, ...]:
        """Note and return new tokens of requests in slots: what is replayed goes on from them, but
        not where their log-probabilities are lost.
        """
        more: list[Progress] = []
        latest = stopped.tokens or self._check.tokens
        with self._lock:
            if not self._told_every and latest is not None and latest.run == self._run:
                lost = {r.custom_id for r in self._ledger.unfinished if r.wants_logprobs}
                for name, tokens in latest.slots.values():
                    known = None if name in lost else self._tokens.get(name)
                    if known is not None and len(tokens) > len(known):
                        more.append(Progress(name, tuple(tokens[len(known) :].tolist())))
                        known += more[-1].token_ids
            self._ledger.progress(self._tokens)
        return tuple(more)

    def _recover(self, error: Exception) -> Iterator[tuple[Progress, ...]]:
        tell, began_s = self._repair.on_event, self._answers.now_s()
        with self._lock:
            self._takes_more = False
        stopped = self._repair.stop_run(lost_by(error))
        if told := (*self._new(self._left()), *self._more_tokens(stopped)):
            yield told
        in_flight = _requests_in(stopped, self._run)
        fault = _diagnose(self._pipeline, stopped, error, in_flight)
        if self._ledger.in_vain or any(isinstance(i, HeadId) for i in (in_flight or {}).values()):
            # a head may be to blame, whose prompts would be held suspect for it
            self._pipeline.sizes = replace(self._pipeline.sizes, head_tokens=0)
        with self._lock:
            given_up = () if fault.has_remedy else self._ledger.fault(fault)
            for each in given_up:
                del self._tokens[each.custom_id]
        for each in given_up:
            why = f"{each.custom_id!r:.80}: {each.error}"
            tell(RecoveryEvent("given up", fault.stage, 0.0, why))
        if given_up:
            yield tuple(Progress(each.custom_id, (), "error", each.error) for each in given_up)
        self._repair.restore(stopped)
        lost_s = self._answers.now_s() - began_s
        replayed = len(self._ledger.unfinished if in_flight is None else in_flight)
        text = f"{fault.text}; going on after {lost_s:.1f} s, {replayed} requests are replayed"
        tell(RecoveryEvent(fault.kind, fault.stage, lost_s, text))


def _requests_in(stopped: StoppedRun, run: int) -> dict[int, str] | None:
    """Return the request in each slot when `run` was stopped; None: the first stage is lost."""
    if stopped.tokens is None:
        return None
    if stopped.tokens.run != run:
        return {}
    return {slot: custom_id for slot, (custom_id, _) in stopped.tokens.slots.items()}


def _diagnose(
    pipeline: StagePipeline, stopped: StoppedRun, error: Exception, in_flight: dict[int, str] | None
) -> Fault:
    """Return the fault of `error`; where memory was short, micro-batches are halved."""
    everyone = None if in_flight is None else frozenset(in_flight.values())
    for stage, loss in stopped.lost.items():
        return Fault(loss.kind, stage, f"{pipeline.stages[stage].name} {loss.text}", everyone)
    for stage, failure in stopped.failures.items():
        return _diagnose_failure(pipeline, stage, failure, in_flight or {})
    return Fault("broken", None, str(error), everyone)


def _diagnose_failure(
    pipeline: StagePipeline, stage: int, failure: BatchFailure, in_flight: dict[int, str]
) -> Fault:
    name, size = pipeline.stages[stage].name, len(failure.slots)
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
    pipeline.sizes = halved(pipeline.sizes, failure)
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
