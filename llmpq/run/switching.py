"""What a run does about drift: it says so, plans again in the background, and switches where that
saves more time than it costs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llmpq.run.drift import Drift, DriftWatch, LengthRecord
from llmpq.run.meter import RunState
from planner.cluster.device import Slowdown
from planner.lengths import Lengths, RequestLengths
from planner.plan.simulate import time_scale
from planner.plan.spec import PlanSpec, StagePlan, undivided
from planner.scheduling import PHASES, Phase
from quant.common.errors import LlmpqError

EVERY_S = 600.0
"""Seconds between two times of planning again: a run settles, and is measured anew, in minutes."""

MOST_PLANS = 3
"""Times that a run plans again at most: what drifts still is not what a plan can follow."""

RESCHEDULE_EVERY_S = 60.0
"""Seconds between two times of looking for another schedule, which takes seconds, and to which
stages change without loading anything; after one that was not found, `EVERY_S`."""

LOOK_S = 1.0
"""Seconds between two comparisons: stages report as often."""


@dataclass(frozen=True)
class Measured:
    """What to plan again from: prompts left, lengths, and measured slowdown by device."""

    prompts_left: int
    lengths: Lengths | None
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)


NOTHING = Measured(0, None)


@dataclass(frozen=True)
class RowsToGo:
    """How far a run is: rows that no stage has yet (None: not known), requests that stages have
    (`in_flight`), and the tokens so far of those in slots (`running`).
    """

    rows_left: int | None
    in_flight: int
    running: tuple[int, ...]


class DriftControl:
    """Watches one plan after the other; `switch` is asked between the results of a run.

    A `share` counts as drift; `say` is given each line. `plan_again` makes another plan, and
    `reschedule` another schedule for the stages of a plan that follows one, which is not made
    again, for lengths and a margin (None: the plan's), unless they are None.
    """

    def __init__(
        self,
        record: LengthRecord,
        share: float,
        say: Callable[[str], None],
        plan_again: Callable[[PlanSpec, Measured], PlanSpec] | None = None,
        reschedule: Callable[[PlanSpec, RequestLengths, float | None], PlanSpec] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record, self._share, self._tell, self._clock = record, share, say, clock
        self._plan_again, self._reschedule = plan_again, reschedule
        self._plan: PlanSpec | None = None
        self._watch: DriftWatch | None = None
        self._start_s = 0.0
        self._said: set[str] = set()
        self._looked_s = float("-inf")
        self._planned_s = float("-inf")
        self._plans = 0
        self._search: _Search | None = None
        self._has_switched = False
        self._has_schedule = False

    def begin(self, plan: PlanSpec, start_s: float, has_schedule: bool = False) -> None:
        """Watch a run of `plan`; `start_s` of its stages; `has_schedule`: it may get another."""
        self._plan, self._start_s, self._has_schedule = plan, start_s, has_schedule
        self._watch = DriftWatch(undivided(plan), self._record, self._share)
        self._said.clear()
        self._search = None
        self._has_switched = False

    def see(self, state: RunState, in_flight: int) -> None:
        if self._watch is not None:
            self._watch.see(state, in_flight)

    def disturb(self) -> None:
        """Leave out what was measured before a fault."""
        if self._watch is not None:
            self._watch.disturb()

    def switch(self, progress: Callable[[], RowsToGo]) -> Switch | None:
        """A switch to make now, once for each plan that is watched; says what drifts."""
        now_s = self._clock()
        if self._plan is None or self._watch is None or self._has_switched:
            return None
        if now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        so_far = progress()
        drift = self._watch.found(so_far.running)
        if drift is not None:
            self._say(drift)
        if self._has_schedule:
            return self._other_schedule(self._plan, self._watch, drift)
        if self._search is not None:
            return self._take(self._search, drift, so_far)
        if drift is not None and drift.is_explained:
            self._begin_search(self._plan, drift, so_far)
        return None

    def _other_schedule(
        self, plan: PlanSpec, watch: DriftWatch, drift: Drift | None
    ) -> Switch | None:
        """The schedule that a search has led to; begins one where lengths drift, or requests are
        late: it leaves as much of the bound as they were.
        """
        now_s, reschedule, search = self._looked_s, self._reschedule, self._search
        if search is not None:
            if not search.is_done:
                return None
            self._search = None
            if search.found is not None:
                return Switch(search.found, "follow")
            self._planned_s = now_s + EVERY_S - RESCHEDULE_EVERY_S
            self._tell(f"no other schedule: {search.error}; the run goes on as it is")
            return None
        if reschedule is None or now_s - self._planned_s < RESCHEDULE_EVERY_S:
            return None
        if drift is None or plan.latency is None:
            return None
        lengths, margin = plan.latency.lengths, drift.margin
        if drift.has_other_lengths and drift.outputs is not None:
            lengths, margin = watch.measured(drift.outputs), None
        elif margin is None:
            return None
        self._planned_s = now_s
        self._search = _Search(lambda: reschedule(plan, lengths, margin))
        return None

    def _say(self, drift: Drift) -> None:
        new = drift.without(self._said)
        if new.deviations:
            self._said.update(each.what for each in new.deviations)
            may_replan = self._plan is None or self._plan.origin is not None
            self._tell(new.text(self._looks_for, may_replan))

    @property
    def _looks_for(self) -> str:
        """What is looked for where lengths or speeds differ; "" for nothing."""
        if self._has_schedule:
            return "" if self._reschedule is None else "schedule"
        return "" if self._plan_again is None else "plan"

    def _begin_search(self, plan: PlanSpec, drift: Drift, progress: RowsToGo) -> None:
        """Plan again, where that is asked for and has not been done too often or just now."""
        plan_again, now_s = self._plan_again, self._looked_s
        if plan_again is None or self._plans == MOST_PLANS or now_s - self._planned_s < EVERY_S:
            return
        self._planned_s, self._plans = now_s, self._plans + 1
        lengths = None if drift.outputs is None else drift.outputs.lengths(plan.workload)
        left = max(1, self._rows_left(progress) + progress.in_flight)
        measured = Measured(left, lengths, slowdowns_of(plan, drift))
        self._search = _Search(lambda: plan_again(plan, measured), measured)

    def _rows_left(self, progress: RowsToGo) -> int:
        """Rows that no stage has yet; where that is not known, as many as have ended."""
        return self._record.ended if progress.rows_left is None else progress.rows_left

    def _take(self, search: _Search, drift: Drift | None, progress: RowsToGo) -> Switch | None:
        """The switch that a search has led to, if it is worth it."""
        if not search.is_done or self._plan is None:
            return None
        outputs = None if drift is None else drift.outputs
        rate = None if drift is None else drift.tokens_per_s
        if search.error is None and drift is not None and (outputs is None or rate is None):
            return None  # until they are known again
        self._search = None
        if search.found is None:
            self._tell(f"no other plan: {search.error}; the run goes on as it is")
            return None
        if drift is None or outputs is None or rate is None:
            return None
        if is_same(self._plan, search.found):
            self._tell("planned again from what was measured: the same plan, which goes on")
            return None
        slots, prompt = self._plan.workload.global_batch, self._record.mean_prompt
        lengths = RunLengths(prompt, outputs.mean, outputs.longest, outputs.mean_so_far)
        outlook = Outlook(
            self._rows_left(progress),
            max(0, progress.in_flight - slots),
            lengths,
            rate,
            self._start_s,
            search.measured.slowdowns,
        )
        switch = best_switch(self._plan, search.found, outlook)
        if not switch.is_worth_it:
            self._tell(
                f"another plan would save {max(0.0, switch.saved_s):.0f} s, and the switch costs "
                f"about {switch.cost_s:.0f} s; the run goes on as it is"
            )
            return None
        self._has_switched = True
        return switch


class _Search:
    def __init__(self, plan: Callable[[], PlanSpec], measured: Measured = NOTHING) -> None:
        self.measured = measured
        self.found: PlanSpec | None = None
        self.error: str | None = None
        self._plan = plan
        self._thread = threading.Thread(target=self._run, name="llmpq-planning", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.found = self._plan()
        except LlmpqError as error:
            self.error = str(error)
        except Exception as error:  # the run goes on without another plan, whatever it was
            self.error = f"{type(error).__name__}: {error}"

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()


def slowdowns_of(plan: PlanSpec, drift: Drift) -> Mapping[str, Slowdown]:
    """The measured share of the planned seconds of each slow device that is not emulated."""
    factors: dict[str, dict[Phase, float]] = {}
    for slow in drift.slow:
        stage, share = plan.stages[slow.stage], slow.measured_s / slow.planned_s
        for name in () if stage.emulated else stage.device_names:
            factors.setdefault(name, dict.fromkeys(PHASES, 1.0))[slow.phase] = share
    return {
        device: Slowdown(shares["prefill"], shares["decode"]) for device, shares in factors.items()
    }


MARGIN = 1.5
"""A switch has to save so many times its cost: both are estimates, and a start may take longer."""


@dataclass(frozen=True)
class RunLengths:
    """Mean prompt and output, longest output, and what rows in flight have and lack: tokens."""

    prompt: float
    output: float
    longest: float
    so_far: float


@dataclass(frozen=True)
class Outlook:
    """What is left of a run: `rows_left` that no stage has yet, `waiting` ones that wait for a
    slot, and how the present plan gets on.

    `tokens_per_s` is measured, `start_s` are the seconds in which the stages started before,
    `slowdowns` the measured shares of the planned seconds by device.
    """

    rows_left: int
    waiting: int
    lengths: RunLengths
    tokens_per_s: float
    start_s: float
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)


@dataclass(frozen=True)
class Switch:
    """A switch to `plan`: what is in flight is finished first ("drain"), or goes on from its tokens
    so far ("replay"). It saves `saved_s`, and costs `cost_s` of these. Where nothing but the
    schedule differs, the same stages go on by it ("follow"): that costs nothing.
    """

    plan: PlanSpec
    how: Literal["drain", "replay", "follow"]
    saved_s: float = 0.0
    cost_s: float = 0.0

    @property
    def is_worth_it(self) -> bool:
        return self.saved_s > MARGIN * self.cost_s


def best_switch(old: PlanSpec, new: PlanSpec, outlook: Outlook) -> Switch:
    """The cheaper way from `old` to `new`.

    Both plans' seconds are by one formula, in proportion to what was measured of the old one: what
    the formula leaves out slows both. Few rows take as long as a turn of all slots.
    """
    lengths, slots = outlook.lengths, old.workload.global_batch
    old_s = seconds_per_row(old, lengths, outlook.slowdowns)
    new_s = seconds_per_row(new, lengths, {})
    by_formula = lengths.output / outlook.tokens_per_s / old_s

    def saved_s(rows: float) -> float:
        took_s = max(rows, slots) * old_s
        return by_formula * (took_s - max(rows, new.workload.global_batch) * new_s)

    token_s = slots / outlook.tokens_per_s  # for each row in flight
    idle_s = (lengths.longest - lengths.so_far) * token_s
    left = outlook.rows_left
    drain = Switch(new, "drain", saved_s(left) if left else 0.0, outlook.start_s + idle_s)
    again_s = slots * _prefill_s_per_row(new, lengths.prompt + lengths.so_far, {})
    left_in_slots = slots * (1 - lengths.so_far / lengths.output)
    rows = left + outlook.waiting + left_in_slots
    replay = Switch(new, "replay", saved_s(rows), outlook.start_s + again_s)
    return max(drain, replay, key=lambda switch: switch.saved_s - switch.cost_s)


def seconds_per_row(
    plan: PlanSpec, lengths: RunLengths, slowdowns: Mapping[str, Slowdown]
) -> float:
    """Seconds of a row with all slots in use, by the slowest stage or the way round all."""
    slots, sizes = plan.workload.global_batch, plan.micro_batches
    groups = -(-slots // sizes.decode)
    decode_s = [
        _decode_s(plan, stage, lengths) * _factor(slowdowns, stage).decode for stage in plan.stages
    ]
    hops_s = sum(stage.decode_comm_s for stage in plan.stages)
    round_s = max(groups * max(decode_s), sum(decode_s) + hops_s)
    requests = min(slots, groups * plan.timed_sizes[1])
    decode_row_s = (lengths.output - 1) * round_s * time_scale(plan) / requests
    return _prefill_s_per_row(plan, lengths.prompt, slowdowns) + decode_row_s


def _prefill_s_per_row(plan: PlanSpec, tokens: float, slowdowns: Mapping[str, Slowdown]) -> float:
    """Seconds of the slowest stage for a prompt of so many tokens in a planned micro-batch; what it
    shares with others is not computed.
    """
    tokens = plan.workload.heads.computed(tokens)
    slowest_s = max(
        _prefill_s(plan, stage, tokens) * _factor(slowdowns, stage).prefill for stage in plan.stages
    )
    return slowest_s * time_scale(plan)


def _prefill_s(plan: PlanSpec, stage: StagePlan, tokens: float) -> float:
    if stage.modelled is None:
        return stage.prefill_s * tokens / plan.timed_sizes[0]
    size = plan.micro_batches.prefill
    return stage.modelled.compute_s(False, np.full(size, round(tokens))) / size


def _decode_s(plan: PlanSpec, stage: StagePlan, lengths: RunLengths) -> float:
    if stage.modelled is None:
        return stage.decode_s
    requests, context = max(1, round(plan.timed_sizes[1])), round(lengths.prompt + lengths.so_far)
    return stage.modelled.compute_s(True, np.full(requests, context))


def _factor(slowdowns: Mapping[str, Slowdown], stage: StagePlan) -> Slowdown:
    return slowdowns.get(stage.device, Slowdown())


def is_same(old: PlanSpec, new: PlanSpec) -> bool:
    """Whether both plans run the same: devices, layers, bits, slots, micro-batches and policy."""
    return _runs(old) == _runs(new)


def _runs(plan: PlanSpec) -> object:
    stages = [
        (stage.device_names, stage.layers, stage.choices, stage.dtype) for stage in plan.stages
    ]
    sizes = plan.workload, plan.micro_batches, plan.policy
    return stages, sizes, plan.kv_bits, plan.head_bits, plan.head_on_first
