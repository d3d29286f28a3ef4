"""Stages that generate, in one pipeline or in several: what all of them offer, and whole answers by
a live run of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol, Self

from actors.messages import Finished, KnownLogprobs, Progress, Request
from actors.processes.observer import Observer, StageTrace
from actors.processes.request_log import RequestTimes
from actors.stage_figures import LayersLoaded, QueueDepth, StageStats
from planner.plan.spec import PlanSpec
from quant.common.errors import SpecError


class Live(Protocol):
    """A run to which requests may be submitted at any time; one thread reads its `events`."""

    @property
    def under_way(self) -> int:
        """Number of requests that were submitted and have neither ended nor been cancelled."""

    @property
    def wanted(self) -> int:
        """How many requests should be submitted together now, where there are as many: first as
        many as there are slots, then so many that the next ones are there when they are needed.
        """

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The requests under way, with the tokens that are known of them."""

    @property
    def tokens_in_flight(self) -> dict[str, int]:
        """The number of new tokens of each request in a slot, a second ago or so."""

    def submit(self, *requests: Request) -> None:
        """Have `requests` run as soon as there is room; several come together, none is scheduled
        before the others. Their custom_ids must be unlike those of all requests under way, and of
        all that were cancelled.

        Raises `SpecError` for one that is under way. What else is wrong with it becomes an event
        with an error.
        """

    def cancel(self, custom_id: str) -> None:
        """Give up a request, if it has not ended; its memory is free at the next iteration."""

    def close(self) -> None:
        """Take no more requests; `events` ends when all have ended."""

    def interrupt(self) -> None:
        """Have `events` raise `RunInterruptedError` within a second, or when repairs are done."""

    def events(self) -> Generator[tuple[Progress, ...]]:
        """Yield new tokens as they come, and the ends of requests; nothing where more requests are
        wanted at once.

        Raises `StageLostError` when there is no point in going on, its `DeviceLostError` when a
        device is gone, and `RunInterruptedError`.
        """

    def halt(self) -> tuple[Progress, ...]:
        """Stop for good, while nobody waits for events; return those that nobody has read."""


class JoinedObserver:
    """Asks the stages of several pipelines, which have so many `stages` each, as `Observer` asks
    those of one.

    `observers` gives that of each, those of pipelines that still load on demand; None where nobody
    answers now: then its last figures are told, with an empty queue. The first stage of each has a
    queue, by which its figures begin.
    """

    def __init__(
        self, observers: Callable[[bool], Sequence[AnyObserver | None]], stages: Sequence[int]
    ) -> None:
        self._observers, self._stages = observers, tuple(stages)
        idle = StageStats()
        self._latest = [(with_queue(idle), *(idle,) * (count - 1)) for count in stages]

    def figures(self) -> tuple[StageStats, ...] | None:
        for index, observer in enumerate(self._observers(False)):
            found = observer.figures() if observer else None
            first, *others = found or self._latest[index]
            if not found or first.queue is None:
                first = with_queue(first)
            self._latest[index] = (first, *others)
        return tuple(stats for each in self._latest for stats in each)

    def loading(self) -> Sequence[LayersLoaded | None]:
        asked = zip(self._observers(True), self._stages, strict=True)
        return [each for one, n in asked for each in (one.loading() if one else (None,) * n)]

    def align(self) -> None:
        for observer in self._observers(False):
            if observer is not None:
                observer.align()

    def traces(self) -> tuple[StageTrace | None, ...]:
        asked = zip(self._observers(False), self._stages, strict=True)
        return tuple(each for one, n in asked for each in (one.traces() if one else (None,) * n))

    def take_requests(self, custom_ids: Sequence[str]) -> tuple[dict[str, RequestTimes], ...]:
        asked = zip(self._observers(False), self._stages, strict=True)
        found = [one.take_requests(custom_ids) if one else ({},) * n for one, n in asked]
        return tuple(each for stages in found for each in stages)


AnyObserver = Observer | JoinedObserver


def with_queue(stats: StageStats) -> StageStats:
    """The figures of a first stage that has not led a run yet."""
    return replace(stats, queue=QueueDepth(0, 0, 0, 0))


class LiveGroup(ABC):
    """A context manager over loaded stages, whose `observer` looks at them. One live run at a time
    goes through them, and is read to its end or given up by `abandon`.
    """

    observer: AnyObserver
    can_follow = True
    """Whether another plan may be put in force for the same stages while they generate."""

    def __init__(self, plan: PlanSpec) -> None:
        self._plan = plan
        self._whole: WholeAnswers | None = None

    @property
    def plan(self) -> PlanSpec:
        """The plan of the stages, one with those of all pipelines."""
        return self._plan

    @property
    def ready_plans(self) -> Sequence[PlanSpec]:
        """The plans of the pipelines that take requests now, once they are loaded."""
        return (self.plan,)

    def __enter__(self) -> Self:
        """Place and load all stages; on any error nothing stays behind."""
        try:
            self._start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @abstractmethod
    def _start(self) -> None:
        """Place and load all stages."""

    @abstractmethod
    def _release(self) -> None:
        """Free actors and placement groups."""

    def follow(self, plan: PlanSpec) -> None:
        """Go on by `plan`, another schedule for these stages; SpecError where they cannot."""
        raise SpecError("several pipelines keep the schedule they were started with; start again")

    @abstractmethod
    def live(self) -> Live:
        """Return a run that takes requests at any time and tells tokens as they are sampled."""

    @abstractmethod
    def whole_answers(self, waits: bool = True) -> Live:
        """Return a run for whole answers to many requests, which may tell of tokens late. With
        `waits` the stages wait for requests that are `wanted`, so that micro-batches are as large
        as planned; where they come from elsewhere, they do not.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Give up what is in flight; stages are ready for another run. Raises as `generate`."""

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[Finished, ...]]:
        """Generate for any number of requests, taken in as they are needed; yields those that
        ended, and nothing in return for a None, by which the iterable gets its turn.

        An iterable that is slower than the pipeline makes the pipeline wait.
        """
        self._whole = WholeAnswers(self.whole_answers(), requests)
        return self._whole.results()

    def interrupt(self) -> None:
        """Have the `generate` that another thread waits in raise `RunInterruptedError` soon."""
        if self._whole is not None:
            self._whole.live.interrupt()

    def halt(self) -> tuple[Finished, ...]:
        """Stop the last `generate`; return what finished and was not given out."""
        return () if self._whole is None else self._whole.halt()

    def unfinished(self) -> tuple[Request, ...]:
        """The requests that the last `generate` took and did not give out, with their tokens."""
        return () if self._whole is None else self._whole.unfinished

    def tokens_in_flight(self) -> dict[str, int]:
        """Return the number of new tokens of each request in a KV slot, a second ago or so."""
        return {} if self._whole is None else self._whole.live.tokens_in_flight


class WholeAnswers:
    """Runs the requests of a source through `live`, which nobody else reads."""

    def __init__(self, live: Live, source: Iterable[Request | None]) -> None:
        self.live = live
        self._source = iter(source)
        self._is_read = False
        self._taken: list[Request] = []  # and not submitted yet
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, KnownLogprobs] = {}  # of those that ask for them

    def results(self) -> Iterator[tuple[Finished, ...]]:
        """Yield what finished, each request once, and nothing where the source pauses."""
        with closing(self.live.events()) as events:
            while True:
                while self._take_in():
                    yield ()
                told = next(events, None)
                if told is None:
                    return
                if finished := self._finished(told):
                    yield finished

    def _take_in(self) -> bool:
        """Submit as many requests as are wanted; returns whether the source has paused."""
        while not self._is_read and (wanted := self.live.wanted):
            while len(self._taken) < wanted and not self._is_read:
                try:
                    request = next(self._source)
                except StopIteration:
                    self._is_read = True
                    break
                if request is None:
                    return True
                self._taken.append(request)
            taken, self._taken = self._taken, []
            self.live.submit(*taken)
            self._tokens |= {each.custom_id: list(each.generated) for each in taken}
            asking = (each.custom_id for each in taken if each.wants_logprobs)
            self._logprobs |= {name: KnownLogprobs() for name in asking}
            if self._is_read:
                self.live.close()
        return False

    def _finished(self, told: Sequence[Progress]) -> tuple[Finished, ...]:
        """Take in new tokens; returns the requests that ended with them."""
        ended: list[Finished] = []
        for each in told:
            self._tokens[each.custom_id] += each.token_ids
            if each.custom_id in self._logprobs:
                self._logprobs[each.custom_id].add(each)
            if each.finish_reason is not None:
                tokens = tuple(self._tokens.pop(each.custom_id))
                known = self._logprobs.pop(each.custom_id, KnownLogprobs())
                made = Finished(each.custom_id, tokens, each.finish_reason, each.error)
                ended.append(replace(made, logprobs=tuple(known.own), prompt_logprobs=known.prompt))
        return tuple(ended)

    def halt(self) -> tuple[Finished, ...]:
        """Stop for good, while nobody asks for results; return those that were not given out."""
        return self._finished(self.live.halt())

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """The requests that were read and not given out, with the tokens that are known of them;
        those that ask for log-probabilities, which end with the run, begin anew.
        """
        known = (replace(r, generated=()) if r.wants_logprobs else r for r in self.live.unfinished)
        return (*known, *self._taken)
