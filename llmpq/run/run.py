"""One run of a plan over rows on Ray: tokenize, batch, generate, turn into text, plan again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from actors.messages import Request
from actors.recovery.policy import EventKind, OnEvent, RecoveryEvent
from actors.stage_figures import LatencyCounts
from llmpq.jobs.row_database import Tally
from llmpq.report.latency import LatencyFigures
from llmpq.rows.results import Result
from llmpq.rows.row import BadRow, Row
from llmpq.rows.sampling import JobSampling
from llmpq.run.engine import RunResources
from llmpq.run.expected_lengths import NO_PREDICTOR
from llmpq.run.meter import RunMeter, RunState
from llmpq.run.replan import (
    replan_after_loss,
    replan_measured,
    replanned_text,
    reschedule_measured,
    rescheduled_text,
    stages_text,
)
from llmpq.run.rows_in_flight import RowsInFlight, in_random_order, until
from llmpq.run.summary import RunPart, RunSummary, planned_latency, planned_rate
from llmpq.run.switching import DriftControl, Measured, RowsToGo, Switch
from planner.lengths import RequestLengths
from planner.plan.spec import PlanSpec, undivided
from quant.common.errors import DeviceLostError

if TYPE_CHECKING:
    from actors.live_group import LiveGroup
    from llmpq.remote.local_ray import GiveUp
    from llmpq.run.monitor import LoadingState

UNDISTURBED: tuple[EventKind, ...] = ("tokenizer", "predictor", "drift", "long rows", "rescheduled")
"""Events that cost the stages no time."""


class Run:
    """A run of a plan over rows; afterwards `summary` holds the figures.

    `shared` is the model, the tokenizer and the stages, of this run alone or of others too;
    `sampling` that of rows without their own, where it is not that of `shared`. The functions in
    `on_event` are called with every fault, those in `on_loading` and then in `on_state` with the
    state about once a second, those in `on_plan` with the plan that takes the place of `plan`: when
    devices are lost, when another one is faster, and when only long rows are left. `give_up`: how
    to end the process where a local Ray that is gone blocks it. `rows` holds counts and the first
    error, once results are asked for.
    """

    def __init__(
        self,
        shared: RunResources,
        sampling: JobSampling | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.plan = shared.plan
        self.sampling = sampling or shared.sampling
        self.on_event = [] if on_event is None else [on_event]
        self.on_plan: list[Callable[[PlanSpec], None]] = []
        self.on_state: list[Callable[[RunState], None]] = []
        self.on_loading: list[Callable[[LoadingState], None]] = []
        self.give_up: GiveUp | None = None
        self.summary: RunSummary | None = None
        self._shared, self._options = shared, shared.options
        self._expected = shared.expected
        self._begin(None)

    def _begin(self, size: Tally | None) -> None:
        """Count from nothing."""
        self._maker = self._shared.request_maker(self.sampling.sampling)
        self._meter = RunMeter(*((size.left, size.max_tokens) if size else (None, None)))
        self.rows = RowsInFlight(self._maker, self._meter)
        self._pace, self._size = self._new_pace(), size
        self._is_long = False  # whether long rows run, the last ones
        self._began_s = 0.0
        self._loaded_s: float | None = None
        self._parts: list[RunPart] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what the model's settings decide: where answers end, how tokens are chosen."""
        found = (self.sampling.note, self.sampling.limit_note)
        return (*self._shared.notes, *filter(None, found))

    @property
    def name(self) -> str:
        """What metrics call it."""
        return self._shared.job

    def close(self) -> None:
        """End tokenizing and predicting, where results were not asked for to the end."""
        self._shared.end_run()

    def results(self, rows: Iterable[Row | BadRow], size: Tally | None = None) -> Generator[Result]:
        """Yield every row's result once, as they finish; rows are taken in as they are needed.

        Leaving the iteration early frees the actors. Where no row can run, none are started.
        """
        self.plan = self._shared.plan  # a run before may have put another there meanwhile
        self._shared.begin_run(self._notify)
        self._begin(size)
        made = self._maker.requests(self.rows.taken_in(rows))
        if self._expected is not None:
            made = self._expected.attach(made)
            if self._options.predictor is None:
                self._expected.say(NO_PREDICTOR)
        try:
            for item in made:
                if isinstance(item, BadRow):
                    yield self.rows.bad_result(item)
                elif not self.rows.wait_if_long(item):
                    yield from self._generate(chain((item,), made))
                    break
            else:
                yield from self._generate(iter(()))
            self.summary = self._summary()
            if not self._shared.kept:
                self._shared.end_predicting()
        finally:
            self.rows.long.close()
            self.close()

    def _generate(self, items: Iterator[Request | BadRow]) -> Generator[Result]:
        """Results of all `items`, and then of long rows; without Ray where there is neither."""
        first = next(items, None)
        if first is None and not self.rows.long.prompts:
            return
        with self._shared.stages.joined(self.give_up):
            self._began_s = time.perf_counter()
            if first is not None:
                items = chain((first,), items)
                if self._options.takes_random_order(self.plan):
                    items = in_random_order(items)
                yield from self._generate_all(self.rows.requests(items))
            if self.rows.long.prompts:
                self._take_long_plan()
                yield from self._generate_all(self.rows.long_requests())

    def _generate_all(self, requests: Iterator[Request | None]) -> Generator[Result]:
        """Results of all `requests`, with another plan where devices are lost or it is faster."""
        while (first := (yield from self._next(requests))) is not None:
            requests = chain((first,), requests)
            group = self._shared.stages.of(self.plan)
            try:
                switch = yield from self._generate_in(group, requests)
            except DeviceLostError as error:
                if self._options.on_device_loss != "replan":
                    raise
                self._plan_again(error)
            else:
                if switch is not None:
                    self._switch(switch)
            requests = chain(group.unfinished(), requests)

    def _next(self, requests: Iterator[Request | None]) -> Generator[Result, None, Request | None]:
        """The next request, after results of rows that cannot run; None where none is left."""
        for request in requests:
            yield from self.rows.bad_results()
            if request is not None:
                return request
        yield from self.rows.bad_results()
        return None

    def _generate_in(
        self, group: LiveGroup, requests: Iterator[Request | None]
    ) -> Generator[Result, None, Switch | None]:
        """Run `requests` in a group; returns a switch to another plan, or `DeviceLostError`."""
        from llmpq.run.monitor import loading_watch, monitored

        trace = None if self._is_long else self._options.trace_path
        switch: Switch | None = None
        is_over = threading.Event()
        show = [*self.on_state, self._see]
        stages, shown = self._shared.stages, undivided(self.plan)
        with (
            stages.lent(group, loading_watch(group, self.on_loading)),
            monitored(group, shown, self._meter, show, trace) as figures,
            nullcontext() if self._shared.tracer is None else self._shared.tracer.following(group),
        ):
            began_s, tokens = time.perf_counter(), self.rows.tokens
            self._loaded_s = self._loaded_s or began_s
            self._pace.begin(self.plan, stages.start_s, self._has_schedule(group))
            wanted = until(is_over, requests)
            tracer = self._shared.tracer
            for finished in group.generate(tracer.submitting(wanted) if tracer else wanted):
                yield from self.rows.bad_results()
                if tracer:
                    tracer.rows(finished)
                yield from self.rows.results(finished)
                if self._expected is not None:
                    self._expected.note(finished)
                switch = switch or self._pace.switch(partial(self._progress, group))
                if switch is not None and switch.how == "follow":
                    self._follow(group, switch)
                    switch = None
                if switch is None or is_over.is_set():
                    continue
                is_over.set()
                if switch.how == "replay":
                    yield from self.rows.results(group.halt())
                    break
            yield from self.rows.bad_results()
            seconds = time.perf_counter() - began_s
            part = RunPart(shown, figures() or (), seconds, self.rows.tokens - tokens)
            self._parts.append(part)
        return switch

    def _summary(self) -> RunSummary:
        loaded_s, planned = self._loaded_s, planned_latency(self.plan)
        longest = max(self._parts, key=lambda part: part.tokens, default=None)
        return RunSummary(
            prompts=self.rows.ended,
            errors=self.rows.errors,
            generated_tokens=self.rows.tokens,
            load_s=0.0 if loaded_s is None else loaded_s - self._began_s,
            seconds=0.0 if loaded_s is None else time.perf_counter() - loaded_s,
            stages=() if longest is None else longest.stages,
            resumed=self._size.resumed if self._size else 0,
            plan=None if longest is None else longest.plan,
            stages_s=None if longest is None else longest.seconds,
            planned_tokens_per_s=planned_rate(self._parts),
            latency=None if planned is None else LatencyFigures.of([self.latencies], planned),
        )

    @property
    def latencies(self) -> LatencyCounts:
        return self._meter.state().latencies

    def _new_pace(self) -> DriftControl:
        def again(plan: PlanSpec, measured: Measured) -> PlanSpec:
            return replan_measured(plan, measured, self._shared.model_folder)

        def other(plan: PlanSpec, lengths: RequestLengths, margin: float | None) -> PlanSpec:
            return reschedule_measured(plan, lengths, margin, self._shared.model_folder)

        options = self._options
        follows = options.follows_schedule(self.plan)
        return DriftControl(
            self.rows.record,
            options.drift,
            partial(self._shared.tell, "drift", 0.0),
            again if options.replan == "auto" else None,
            other if follows and options.replan != "never" else None,
        )

    def _has_schedule(self, group: LiveGroup) -> bool:
        """Whether `group` follows the schedule of its plan, and may follow another."""
        return self._options.follows_schedule(self.plan) and group.can_follow

    def _follow(self, group: LiveGroup, switch: Switch) -> None:
        group.follow(switch.plan)
        stages = self._shared.stages
        stages.keep_for(switch.plan)
        text = rescheduled_text(self.plan, switch.plan)
        self._take(switch.plan, "rescheduled", 0.0, text)
        self._pace.begin(self.plan, stages.start_s, has_schedule=True)

    def _see(self, state: RunState) -> None:
        self._pace.see(state, self.rows.in_flight)

    def _progress(self, group: LiveGroup) -> RowsToGo:
        rows = self.rows
        left = None
        if self._size is not None:
            left = max(0, self._size.left - rows.ended - rows.in_flight - rows.long.prompts)
        if self._is_long:
            left = rows.long.prompts
        return RowsToGo(left, rows.in_flight, tuple(group.tokens_in_flight().values()))

    def _plan_again(self, lost: DeviceLostError) -> None:
        """Take the best plan for what is left; raises `DeviceLostError` where there is none."""
        began_s = time.perf_counter()
        folder = self._shared.model_folder
        plan = replan_after_loss(self.plan, lost, folder)
        if self._is_long and self._shared.kept:  # the next run begins with the others
            self._shared.plan = replan_after_loss(self._shared.plan, lost, folder)
        lost_s = time.perf_counter() - began_s
        self._take(plan, "replanned", lost_s, replanned_text(plan))

    def _switch(self, switch: Switch) -> None:
        text = (
            f"planned again from what was measured, which should save {switch.saved_s:.0f} s for "
            f"{switch.cost_s:.0f} s that the switch takes: {stages_text(switch.plan)}"
        )
        self._take(switch.plan, "replanned", 0.0, text)

    def _take_long_plan(self) -> None:
        plan = self.plan.long_rows
        assert plan is not None, "rows wait for a plan that there is"
        self._is_long = True
        rows, room = self.rows.long.prompts, self.plan.workload
        limits = f"of more than {room.prompt_length} tokens, {room.new_tokens} new ones"
        if room.slot_tokens is not None:
            limits += f", or {room.slot_tokens} of both"
        text = f"{rows} long prompts ({limits}) run now: {stages_text(plan)}"
        self._take(plan, "long rows", 0.0, text)

    def _take(self, plan: PlanSpec, kind: EventKind, lost_s: float, text: str) -> None:
        self.plan = plan
        if not self._is_long:
            self._shared.plan = plan
        for on_plan in self.on_plan:
            on_plan(undivided(plan))
        self._shared.tell(kind, lost_s, text)

    def _notify(self, event: RecoveryEvent) -> None:
        if event.kind not in UNDISTURBED:
            self._pace.disturb()
        for on_event in self.on_event:
            on_event(event)
