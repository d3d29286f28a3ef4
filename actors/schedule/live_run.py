"""Live runs, led by the first stage: requests come and go at any time, and tokens are told of as
they come back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Condition, Lock

from actors.logprobs import check_top_logprobs
from actors.messages import (
    Admission,
    Finished,
    HeadId,
    KnownLogprobs,
    MicroBatch,
    Progress,
    Request,
    Sampled,
    SlotTokens,
)
from actors.schedule.driver import LatencyRecord, Pipeline, PipelineDriver
from actors.schedule.heads import PromptHeads
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import make_scheduler
from actors.stage_figures import (
    NO_SUPERVISION,
    NOTHING_SHARED,
    QueueDepth,
    SharedPrompts,
    Supervision,
)
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError


@dataclass(frozen=True)
class Mail:
    """The content of an inbox; requests are given up once the new ones are added.

    `closed`: no more comes, and the run ends with its requests. `abandoned`: it ends now.
    """

    requests: tuple[Request, ...]
    cancelled: tuple[str, ...]
    closed: bool
    abandoned: bool


class Inbox:
    """Messages for the live run of this number, which any thread may leave."""

    def __init__(self, run: int) -> None:
        self.run = run
        self._changed = Condition()
        self._requests: list[Request] = []
        self._cancelled: list[str] = []
        self._closed = self._abandoned = False

    def put(self, requests: Sequence[Request]) -> None:
        with self._changed:
            self._requests += requests
            self._changed.notify()

    def cancel(self, custom_ids: Sequence[str]) -> None:
        with self._changed:
            self._cancelled += custom_ids
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify()

    def take(self, wait: bool) -> Mail:
        """Empty it; with `wait` as soon as there is something in it, or the run is to end."""
        with self._changed:
            while wait and not (
                self._requests or self._cancelled or self._closed or self._abandoned
            ):
                self._changed.wait()
            mail = Mail(
                tuple(self._requests), tuple(self._cancelled), self._closed, self._abandoned
            )
            self._requests, self._cancelled = [], []
            return mail


class UntoldTokens:
    """Collects tokens of `told_every` micro-batches, unless a request begins or ends there."""

    def __init__(self, told_every: int) -> None:
        self._told_every = told_every
        self._begun: set[str] = set()
        self._kept: dict[str, Progress] = {}
        self._micro_batches = 0

    def take(self, progress: Sequence[Progress]) -> tuple[Progress, ...]:
        """Take in what one micro-batch brought; returns what is to be told of now."""
        told: list[Progress] = []
        for each in progress:
            earlier = self._kept.pop(each.custom_id, None)
            joined = each if earlier is None else _joined(earlier, each)
            if joined.finish_reason is not None:
                self._begun.discard(each.custom_id)
                told.append(joined)
            elif each.custom_id in self._begun:
                self._kept[each.custom_id] = joined
            else:
                self._begun.add(each.custom_id)
                told.append(joined)
        self._micro_batches += 1
        if self._micro_batches >= self._told_every:
            told += self._kept.values()
            self._kept.clear()
            self._micro_batches = 0
        return tuple(told)

    def forget(self, custom_id: str) -> None:
        self._kept.pop(custom_id, None)
        self._begun.discard(custom_id)


def _joined(earlier: Progress, later: Progress) -> Progress:
    return replace(
        later,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
    )


class LiveRun:
    """Drives the scheduler of `driver` by what comes into `inbox`, until that is closed.

    A request may have at most `longest` tokens. The tokens of `told_every` micro-batches are told
    of together, but what begins and what ends is told of at once; with 0, nothing is told of a
    request before its end, and then all of its tokens, those that it came with among them, whose
    log-probabilities are not known any more. A run that `waits` has micro-batches as large as
    planned: as long as the scheduler wants requests and more may come, none is submitted; whoever
    sends them is asked for more by an empty event.
    """

    def __init__(
        self,
        driver: PipelineDriver,
        inbox: Inbox,
        longest: int,
        told_every: int = 1,
        waits: bool = False,
    ) -> None:
        self._driver = driver
        self._inbox = inbox
        self._longest = longest
        self._waits = waits
        self._tells_whole = not told_every
        self._names: dict[int, str] = {}  # by slot; none of requests that were given up
        self._shared: dict[int, int] = {}  # tokens that prompts share, by slot, until they are told
        self._untold = UntoldTokens(told_every)
        self._logprobs: dict[str, KnownLogprobs] = defaultdict(KnownLogprobs)  # told with all else

    def events(self) -> Iterator[tuple[Progress, ...]]:
        """Yield what each micro-batch has brought, and requests that cannot run; waits for work."""
        idle = False
        while True:
            mail = self._inbox.take(wait=idle)
            if mail.abandoned:
                return
            told = self._take_in(mail)
            if self._waits and not mail.closed and self._driver.wants_requests:
                idle = True
                yield told
                if told:
                    yield ()
                continue
            idle = False
            batch = self._driver.submit_next()
            if batch is not None:
                self._admit(batch.admitted)
            elif self._driver.under_way:
                told += self._told_of(*self._driver.take_back())
            else:
                idle = True
            if told:
                yield told
            if idle and mail.closed:
                return

    def _admit(self, admitted: Sequence[Admission]) -> None:
        for each in admitted:
            if not isinstance(each.custom_id, HeadId):
                self._names[each.slot] = each.custom_id
                shared = self._driver.shared_tokens(each.slot)
                self._shared[each.slot] = 0 if each.generated else shared

    def _take_in(self, mail: Mail) -> tuple[Progress, ...]:
        taken: list[Request] = []
        refused: list[Progress] = []
        for request in mail.requests:
            try:
                self._check(request)
                self._driver.expect((request,))
                taken.append(request)
            except SpecError as error:
                refused.append(Progress(request.custom_id, (), "error", str(error)))
        if taken:
            self._driver.add(taken)
        for custom_id in mail.cancelled:
            self._driver.cancel(custom_id)
            self._names = {slot: name for slot, name in self._names.items() if name != custom_id}
            self._untold.forget(custom_id)
            self._logprobs.pop(custom_id, None)
        return tuple(each for each in refused if each.custom_id not in mail.cancelled)

    def _check(self, request: Request) -> None:
        check_top_logprobs(request.top_logprobs)
        check_top_logprobs(request.prompt_logprobs, "prompt_logprobs")
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if not prompt or new < 1 or prompt + new > self._longest:
            raise SpecError(
                f"request {request.custom_id!r:.80} has {prompt} prompt and {new} new tokens; both "
                f"must be at least 1, and their sum at most {self._longest}"
            )

    def _told_of(
        self, batch: MicroBatch, sampled: Sampled, finished: Sequence[Finished]
    ) -> tuple[Progress, ...]:
        """What is told of now that `batch` has come back, with which some have `finished`."""
        if not self._tells_whole:
            return self._untold.take(self._tokens_of(batch, sampled))
        for one in self._tokens_of(batch, sampled) if sampled.logprobs is not None else ():
            if one.logprobs or one.prompt_logprobs:
                self._logprobs[one.custom_id].add(one)
        return tuple(map(self._whole, finished))

    def _whole(self, ended: Finished) -> Progress:
        known = self._logprobs.pop(ended.custom_id, KnownLogprobs())
        told = Progress(ended.custom_id, ended.token_ids, ended.finish_reason, ended.error)
        return replace(told, logprobs=tuple(known.own), prompt_logprobs=known.prompt)

    def _tokens_of(self, batch: MicroBatch, sampled: Sampled) -> tuple[Progress, ...]:
        """The tokens of `batch`; one that has no meaning is left out."""
        told: list[Progress] = []
        slots, tokens = batch.slots[batch.sampled_rows].tolist(), sampled.token_ids.tolist()
        found = sampled.logprobs
        logprobs = {} if found is None else found.between(0, len(slots)).by_row()
        each = zip(slots, tokens, sampled.finish_reasons, strict=True)
        for row, (slot, token, reason) in enumerate(each):
            name = self._names.get(slot)
            if name is None:
                continue
            if reason == "error":
                told.append(Progress(name, (), reason))
            else:
                known = (logprobs[row],) if row in logprobs else ()
                age_s = None if reason is None else self._driver.take_age_s(name)
                shared = self._shared.pop(slot, 0)
                prompt = self._driver.take_prompt_logprobs(slot)
                told.append(Progress(name, (token,), reason, None, known, age_s, shared, prompt))
            if reason is not None:
                del self._names[slot]
        return tuple(told)


class Leader:
    """The first stage's scheduler and driver in one run after the other.

    `earlier`: what leaders before it have done about outgrown reservations, and what prompts have
    `shared`. `latencies` are those of all leaders. Heads that prompts share stay from run to run.
    """

    def __init__(
        self,
        sizes: QueueSizes,
        pipeline: Pipeline,
        earlier: Supervision,
        latencies: LatencyRecord,
        shared: SharedPrompts = NOTHING_SHARED,
    ) -> None:
        self._sizes = sizes
        self._pipeline = pipeline
        self._run: int | None = None
        self._earlier = earlier  # of the runs before
        self._latencies = latencies
        self._heads = PromptHeads(sizes.head_tokens, shared)
        self._scheduler: Scheduler
        self._driver: PipelineDriver
        self._failed = False
        self._beginning = Lock()  # around what makes a scheduler, and changes its schedule

    @property
    def queue(self) -> QueueDepth | None:
        if self._run is None:
            return None
        return QueueDepth(
            self._driver.waiting,
            self._scheduler.in_slots,
            self._sizes.slots,
            self._driver.under_way,
            self.supervision,
            self._latencies.counts,
            self.shared,
        )

    @property
    def supervision(self) -> Supervision:
        own = NO_SUPERVISION if self._run is None else self._scheduler.supervision
        return own.after(self._earlier)

    @property
    def shared(self) -> SharedPrompts:
        return self._heads.counts

    def slot_tokens(self) -> SlotTokens:
        """Requests in slots, and their tokens; for any thread."""
        run = self._run
        return SlotTokens(run, {} if run is None else self._driver.slot_tokens())

    def follow(self, schedule: RequestSchedule) -> None:
        """Go by another schedule, in this run and later ones; for any thread."""
        with self._beginning:
            self._sizes = replace(self._sizes, schedule=schedule)
            if self._run is not None:
                self._driver.follow(schedule)

    def live(self, inbox: Inbox, told_every: int, waits: bool) -> Iterator[tuple[Progress, ...]]:
        self._begin(inbox.run)
        self._failed = True  # until it has come to its end
        longest = self._sizes.slot_tokens
        yield from LiveRun(self._driver, inbox, longest, told_every, waits).events()
        self._failed = False

    def _begin(self, run: int) -> None:
        if self._run is not None and not self._failed:
            self._driver.drop()
        earlier = self.supervision
        self._heads.begin(self._failed)
        with self._beginning:
            self._scheduler = make_scheduler(self._sizes, self._pipeline.stages)
            self._earlier = earlier  # after it: who reads meanwhile counts nothing twice
            self._driver = PipelineDriver(
                self._scheduler, self._pipeline, self._latencies, self._heads
            )
            self._run = run  # last: `queue` looks at what comes before
