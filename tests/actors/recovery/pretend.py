"""A pretend cluster for repair: stages that die, hang and fail when told to, by a pretend clock.

Every stage has the face of a `StageHandle`; what it is asked returns a `Reference`, for which the
pretend `Answers` wait by moving the clock. The first stage gives each request in a slot a token a
step; token `k` of a request is told by its id, whatever happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.live_group import WholeAnswers
from actors.messages import Finished, Request, Sampling
from actors.processes.answers import StageDiedError
from actors.processes.health import BatchFailure, Heartbeat, RunReport
from actors.recovery.generation import LiveGeneration
from actors.recovery.pipeline import StagePipeline
from actors.recovery.policy import Recovery, RecoveryEvent
from actors.recovery.repair import Repair
from actors.schedule.live_run import Inbox
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError
from tests.actors.recovery.pretend_leader import Leader, LiveStream

TICK_S = 0.25  # of the clock
START_S = 6.0  # of a process
LOAD_S = 3.0
LINK_S = 1.0
KILL_FROZEN_S = 5.0  # until a stopped process is gone
DAY_S = 86400.0
HANG_S = 20.0


def tokens_of(request: Request) -> tuple[int, ...]:
    """All tokens that a request must end with."""
    return tuple(100 * int(request.custom_id) + k for k in range(request.max_new_tokens))


def requests(count: int, new_tokens: int = 5) -> list[Request]:
    return [Request(str(i), (3,), 1 + i % new_tokens, Sampling()) for i in range(count)]


@dataclass(eq=False)
class Process:
    """What a stage runs in; `up_s` is when it answers for the first time."""

    up_s: float
    dead_s: float = DAY_S
    frozen: bool = False
    stuck_s: float | None = None  # since when it computes one micro-batch
    failure: BatchFailure | None = None
    leader: Leader | None = None
    inbox: Inbox | None = None
    links_broken: bool = False
    is_loaded: bool = False


@dataclass(eq=False)
class Reference:
    """What stands for the answer of a process, which is `there` some time after it was asked."""

    cluster: Cluster
    stage: int
    process: Process
    answer: Callable[[], Any]
    there: Callable[[], bool]
    known: list[Any] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return self.cluster.now_s >= self.process.dead_s

    def is_ready(self) -> bool:
        if self.known or self.is_dead:
            return True
        process = self.process
        return not process.frozen and self.cluster.now_s >= process.up_s and self.there()

    def get(self) -> Any:
        if not self.known and self.is_dead:
            raise StageDiedError(f"stage {self.stage}'s process died")
        self.known = self.known or [self.answer()]
        return self.known[0]


class Stage:
    """The face of a `StageHandle`. `start_s`, `load_s` and `loading` say how the next process comes
    up; `starts` counts them.
    """

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster, self.index = cluster, index
        self.devices = (f"node/gpu:{index}",)
        self.name = f"stage {index} ({self.devices[0]})"
        self.start_s, self.load_s = START_S, LOAD_S
        self.loading: Callable[[], None] = lambda: None
        self.connecting: Callable[[], None] = lambda: None
        self.device_back_s = 0.0  # the device is there from then on
        self.starts = 0
        self.process = Process(0.0)
        self.actor = None

    def start(self) -> None:
        self.kill()
        self.starts += 1
        self.process = Process(max(self.cluster.now_s, self.device_back_s) + self.start_s)

    def has_device(self) -> bool:
        return self.cluster.now_s >= self.device_back_s

    def kill(self) -> None:
        self.die(KILL_FROZEN_S if self.process.frozen else 0.0)

    def die(self, after_s: float = 0.0) -> None:
        self.process.dead_s = min(self.process.dead_s, self.cluster.now_s + after_s)

    def freeze(self) -> None:
        self.process.frozen = True

    def lose_device(self, for_s: float) -> None:
        self.device_back_s = self.cluster.now_s + for_s
        self.die()

    def _ask(
        self,
        answer: Callable[[], Any] = lambda: None,
        after_s: float = 0.0,
        free: Callable[[], bool] = lambda: True,
    ) -> Reference:
        process = self.process
        asked_s = max(self.cluster.now_s, process.up_s)
        return Reference(
            self.cluster,
            self.index,
            process,
            answer,
            lambda: self.cluster.now_s >= asked_s + after_s and free(),
        )

    def load(self) -> Reference:
        process = self.process

        def loaded() -> None:
            self.loading()
            process.is_loaded = True

        return self._ask(loaded, self.load_s)

    def begin(self, epoch: int) -> Reference:
        assert self.process.is_loaded
        self.process.links_broken = False
        return self._ask(lambda: "10.0.0.1")

    def open_rendezvous(self, rendezvous: object) -> Reference:
        return self._ask()

    def connect(self, rendezvous: object, first: Stage, sizes: QueueSizes) -> Reference:
        return self._ask(lambda: self.connecting(), LINK_S)

    def lead(self, sizes: QueueSizes, following: object) -> Reference:
        self.process.leader = Leader(self.cluster, sizes)
        return self._ask()

    def serve(self) -> Reference:
        process = self.process

        def broken() -> None:
            raise StageLostError("a neighbour cannot be reached")

        return self._ask(broken, free=lambda: process.links_broken or self.cluster.is_broken())

    def submit(self, run: int, requests: Sequence[Request]) -> Reference:
        return self._ask_inbox(run, lambda inbox: inbox.put(requests))

    def cancel(self, run: int, custom_ids: Sequence[str]) -> Reference:
        return self._ask_inbox(run, lambda inbox: inbox.cancel(custom_ids))

    def close_live(self, run: int) -> Reference:
        return self._ask_inbox(run, lambda inbox: inbox.close())

    def _ask_inbox(self, run: int, change: Callable[[Inbox], None]) -> Reference:
        if self.process.inbox is None or self.process.inbox.run < run:
            self.process.inbox = Inbox(run)
        change(self.process.inbox)
        return self._ask()

    def live(self, run: int, told_every: int = 1, waits: bool = False) -> LiveStream:
        assert self.process.leader is not None
        assert self.process.inbox is not None
        stream = LiveStream(self, self.process.leader, self.process.inbox, not told_every, waits)
        self.cluster.streams.append(stream)
        return stream

    def stop(self) -> Reference:
        return self._ask()

    def leave_run(self) -> Reference:
        process = self.process

        def report() -> RunReport:
            tokens = process.leader.tokens() if process.leader is not None else None
            failure, process.failure, process.leader = process.failure, None, None
            process.links_broken = True
            return RunReport(failure, tokens)

        waits = self.cluster.is_waited_for if self.index == 0 else lambda: False
        return self._ask(report, free=lambda: process.stuck_s is None and not waits())

    def ready(self) -> Reference:
        return self._ask()

    def heartbeat(self, with_tokens: bool = False) -> Reference:
        process = self.process

        def beat() -> Heartbeat:
            leader = process.leader
            tokens = leader.tokens() if with_tokens and leader is not None else None
            now_s, stuck_s = self.cluster.now_s, process.stuck_s
            return Heartbeat(
                self.cluster.steps, 0.0 if stuck_s is None else now_s - stuck_s, tokens
            )

        return self._ask(beat)


class Answers:
    """As `StageAnswers`: whoever waits moves the clock."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def now_s(self) -> float:
        return self._cluster.now_s

    def ready(self, references: list[Any], timeout_s: float, fetch: bool = True) -> list[Any]:
        ends_s = self._cluster.now_s + timeout_s
        while True:
            done = [reference for reference in references if reference.is_ready()]
            if done or self._cluster.now_s >= ends_s:
                return done
            self._cluster.tick(min(TICK_S, ends_s - self._cluster.now_s))

    def get(self, reference: Reference) -> Any:
        while not reference.is_ready():
            self._cluster.tick(TICK_S)
        return reference.get()

    def streamed(self, stream: LiveStream) -> Iterator[Reference]:
        while True:
            while not stream.is_ready():
                self._cluster.tick(TICK_S)
            try:
                yield next(stream)
            except StopIteration:
                return


class Cluster:
    """`count` stages, a pipeline and its repair; `plan_at` and `on_compute` say what goes wrong."""

    def __init__(
        self,
        recovery: Recovery,
        sizes: QueueSizes = QueueSizes(8, 4, 4, 64),  # noqa: B008  (frozen)
        transport: str = "gloo",
        count: int = 3,
    ) -> None:
        self.now_s, self.steps = 1000.0, 0
        self.stages = [Stage(self, i) for i in range(count)]
        self.events: list[RecoveryEvent] = []
        self.on_compute: Callable[[tuple[str, ...]], None] = lambda ids: None
        self.pipeline = StagePipeline(
            self.stages,  # type: ignore[arg-type]
            Answers(self),  # type: ignore[arg-type]
            sizes,
            transport,  # type: ignore[arg-type]
            meeting_s=30.0,
            hang_s=recovery.hang_s,
        )
        self.repair = Repair(self.pipeline, recovery, self.events.append)
        self.answers: WholeAnswers
        self._planned: list[tuple[float, Callable[[], None]]] = []
        self.streams: list[LiveStream] = []  # computed one after the other

    def plan_in(self, seconds: float, action: Callable[[], None]) -> None:
        """Have `action` happen in so many seconds."""
        self._planned.append((self.now_s + seconds, action))

    def start(self, limit_s: float = 600.0) -> None:
        """Start, load and link all stages."""
        for stage in self.stages:
            stage.start()
        self.repair.load_and_link(limit_s)

    def whole_answers(self, source: Iterable[Request]) -> WholeAnswers:
        return WholeAnswers(LiveGeneration(self.repair, told_every=0, waits=True), source)

    def generate(self, source: Iterable[Request], pause_s: float = 0.0) -> dict[str, Finished]:
        """Run all of `source`; every request must end once. Whoever takes the results pauses."""
        self.answers = self.whole_answers(source)
        ended: dict[str, Finished] = {}
        for finished in self.answers.results():
            for each in finished:
                assert each.custom_id not in ended
                ended[each.custom_id] = each
            if pause_s:
                self.tick(pause_s)
        return ended

    def check_all(
        self, source: Sequence[Request], but: tuple[str, ...] = (), pause_s: float = 0.0
    ) -> None:
        """Run; every request ends with all its tokens, `but` those that end with an error."""
        ended = self.generate(source, pause_s)
        errors = [i for i, each in ended.items() if each.finish_reason == "error"]
        assert sorted(errors) == sorted(but)
        for request in source:
            if request.custom_id not in but:
                assert ended[request.custom_id].token_ids == tokens_of(request)
        assert len(ended) == len(source)
        assert self.answers.unfinished == ()

    def kinds(self) -> list[tuple[str, int | None]]:
        return [(event.kind, event.stage) for event in self.events]

    def tick(self, seconds: float) -> None:
        """Let time pass, in steps of `TICK_S` at most."""
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            self.now_s = min(ends_s, self.now_s + TICK_S)
            self._work()

    def _work(self) -> None:
        for planned in [each for each in self._planned if each[0] <= self.now_s]:
            self._planned.remove(planned)
            planned[1]()
        for stream in self.streams:
            stream.advance()
            if not stream.has_ended:
                break
        self.streams = [stream for stream in self.streams if not stream.has_ended]

    def is_broken(self) -> bool:
        """Whether a linked process is dead or has left the run."""
        processes = [stage.process for stage in self.stages]
        return any(self.now_s >= each.dead_s or each.links_broken for each in processes)

    def is_waited_for(self) -> bool:
        """Whether a stage keeps the others waiting."""
        processes = [stage.process for stage in self.stages]
        return any(
            (each.frozen or each.stuck_s is not None) and self.now_s < each.dead_s
            for each in processes
        )

    def fail(self, stage: int, kind: str, slots: tuple[int, ...]) -> None:
        """A micro-batch of `slots` fails on `stage`."""
        failure = BatchFailure(kind, "decode", slots, "an error", 64, 4096)  # type: ignore[arg-type]
        self.stages[stage].process.failure = failure
        raise StageLostError(f"stage {stage} broke the run off")

    def compute(self, slots: tuple[int, ...], custom_ids: tuple[str, ...]) -> None:
        self.computing = slots
        self.on_compute(custom_ids)


def started(recovery: Recovery | None = None, **options: Any) -> Cluster:
    """A cluster whose stages are loaded and linked."""
    cluster = Cluster(recovery or Recovery(hang_s=HANG_S), **options)
    cluster.start()
    return cluster
