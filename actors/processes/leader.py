"""The first stage's part in a run: its scheduler and its driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from threading import Lock

from actors.messages import Progress
from actors.processes.health import SlotTokens
from actors.schedule.driver import Pipeline, PipelineDriver
from actors.schedule.latencies import LatencyRecord
from actors.schedule.live_run import Inbox, LiveRun
from actors.schedule.scheduler import QueueSizes, Scheduler
from actors.schedule.table import make_scheduler
from actors.stage_figures import NO_SUPERVISION, QueueDepth, Supervision
from planner.scheduling import RequestSchedule


class Leader:
    """The first stage's scheduler and driver in one run after the other.

    `earlier`: what leaders before it have done about outgrown reservations. `latencies` are those
    of all leaders.
    """

    def __init__(
        self,
        sizes: QueueSizes,
        pipeline: Pipeline,
        earlier: Supervision = NO_SUPERVISION,
        latencies: LatencyRecord | None = None,
    ) -> None:
        self._sizes = sizes
        self._pipeline = pipeline
        self._run: int | None = None
        self._earlier = earlier  # of the runs before
        self._latencies = latencies or LatencyRecord()
        self._scheduler: Scheduler
        self._driver: PipelineDriver
        self._failed = False
        self._beginning = Lock()  # around what makes a scheduler, and changes its schedule

    @property
    def queue(self) -> QueueDepth | None:
        """Requests and micro-batches in the queue; None before the first run."""
        if self._run is None:
            return None
        return QueueDepth(
            self._scheduler.waiting,
            self._scheduler.in_slots,
            self._sizes.slots,
            self._driver.under_way,
            self.supervision,
            self._latencies.counts,
        )

    @property
    def supervision(self) -> Supervision:
        """What was done about requests that outgrew their reservation, in all runs."""
        own = NO_SUPERVISION if self._run is None else self._scheduler.supervision
        return own.after(self._earlier)

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

    def live(
        self, inbox: Inbox, told_every: int = 1, waits: bool = False
    ) -> Iterator[tuple[Progress, ...]]:
        """Run `StageActor.live`."""
        self._begin(inbox.run)
        self._failed = True  # until it has come to its end
        longest = self._sizes.slot_tokens
        yield from LiveRun(self._driver, inbox, longest, told_every, waits).events()
        self._failed = False

    def _begin(self, run: int) -> None:
        if self._run is not None and not self._failed:
            self._driver.drop()
        earlier = self.supervision
        with self._beginning:
            self._scheduler = make_scheduler(self._sizes, self._pipeline.stages)
            self._earlier = earlier  # after it: who reads meanwhile counts nothing twice
            self._driver = PipelineDriver(self._scheduler, self._pipeline, self._latencies)
            self._run = run  # last: `queue` looks at what comes before
