"""A few cycles of a plan's schedule in its steady state, to be drawn: what each stage does when.

The seconds are those of the plan's file: prefills in proportion to their tokens, every decode step
as of a group of mean size. Of `waa-c` and `waa-m` the stages that prefill come first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from planner.costs.pass_times import PassSeconds
from planner.lengths import FloatArray
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec
from planner.schedule.passes import Pass
from planner.scheduling import RequestSchedule
from planner.simulation.simulation import Simulated, simulate_passes
from quant.common.errors import SpecError

SETTLING, SHOWN = 2, 2
"""Cycles before those that are shown, in which the pipeline fills, and cycles that are shown."""

MOST_TURNS = 4
"""Turns of newcomers that are shown of stages that only prefill, whose cycles are short."""


def simulated_cycles(plan: PlanSpec) -> tuple[Simulated, tuple[str, ...]]:
    """What all stages of a plan under a bound on latency do, from the middle of a run on, and their
    labels [N]; SpecError for a plan of another policy.
    """
    schedule, forecast = plan.policy.schedule, plan.latency
    if schedule is None or forecast is None:
        raise SpecError(f"a plan of policy {plan.policy.name} has no cycles; plan with a bound")
    if plan.prefill_plan is None:
        return _in_turns(plan, schedule)
    return _apart(plan, plan.prefill_plan, schedule, forecast)


def _in_turns(plan: PlanSpec, schedule: RequestSchedule) -> tuple[Simulated, tuple[str, ...]]:
    passes = tuple(_turns_and_steps(schedule, SETTLING + SHOWN + 1))
    simulated = simulate_passes(
        plan.workload,
        passes,
        [_seconds(plan, each, schedule.mean_prompt_tokens) for each in passes],
    )
    begins_s = simulated.stage_start_s[:, 0]
    first = [row for row, each in enumerate(passes) if each.phase == "prefill"]
    turn = len(first) // (SETTLING + SHOWN + 1)
    start_s, end_s = (float(begins_s[first[turn * count]]) for count in (SETTLING, -1))
    return _part(simulated, start_s, end_s), tuple(stage.label for stage in plan.stages)


def _turns_and_steps(schedule: RequestSchedule, cycles: int) -> Iterator[Pass]:
    """Yield the passes of so many cycles; groups follow each other in one order for ever."""
    groups, steps = schedule.decode_micro_batches, schedule.decode_steps
    size = max(1, round(schedule.decode_requests / groups))
    waiting = deque((group, 0, 0) for group in range(groups))
    submitted = prefills = 0
    while waiting:
        group, done, results_before = waiting.popleft()
        cycle, step = divmod(done, steps + 1)
        if cycle == cycles:
            continue
        if step:
            yield Pass("decode", group, cycle * steps + step, size, 1, 0, results_before)
            submitted += 1
        for requests in () if step else _micro_batches(_newcomers(schedule, group), schedule):
            yield Pass("prefill", prefills, 0, requests, 1, 0, results_before)
            submitted, prefills = submitted + 1, prefills + 1
        waiting.append((group, done + 1, submitted))


def _newcomers(schedule: RequestSchedule, group: int) -> int:
    groups, all_groups = schedule.decode_micro_batches, schedule.prefill_requests
    return all_groups * (group + 1) // groups - all_groups * group // groups


def _micro_batches(requests: int, schedule: RequestSchedule) -> list[int]:
    count = -(-requests // schedule.prefill_micro_batch)
    return [requests * (i + 1) // count - requests * i // count for i in range(count)]


def _apart(
    plan: PlanSpec, prefills: PlanSpec, schedule: RequestSchedule, forecast: LatencyForecast
) -> tuple[Simulated, tuple[str, ...]]:
    turn_s = schedule.prefill_requests / forecast.requests_per_s
    sizes = _micro_batches(schedule.prefill_requests, schedule)
    turn = tuple(Pass("prefill", i, 0, size, 1, 0, 0) for i, size in enumerate(sizes))
    prompt_tokens = schedule.mean_prompt_tokens
    seconds = [_seconds(prefills, each, prompt_tokens) for each in turn]
    one = simulate_passes(prefills.workload, turn, seconds)
    start_s = (SETTLING + float(np.ceil(one.latency_s / turn_s))) * turn_s
    end_s = start_s + MOST_TURNS * turn_s
    rounds = _rounds(plan, schedule, end_s)
    count = int(np.ceil(rounds.latency_s / turn_s))
    shift_s = np.repeat(np.arange(count) * turn_s, len(turn))[:, np.newaxis]

    def joined(name: str) -> FloatArray:
        own = np.tile(getattr(one, name), (count, 1)) + shift_s
        others: FloatArray = getattr(rounds, name)
        above = np.hstack([own, np.zeros((len(own), rounds.stages))])
        below = np.hstack([np.zeros((len(others), one.stages)), others])
        return np.asarray(np.vstack([above, below]))

    simulated = Simulated(
        plan.workload,
        (*turn * count, *rounds.passes),
        joined("stage_start_s"),
        joined("stage_end_s"),
        joined("link_start_s"),
        joined("link_end_s"),
    )
    roles = (("prefill", prefills), ("decode", plan))
    labels = tuple(f"{role}, {stage.label}" for role, part in roles for stage in part.stages)
    return _part(simulated, start_s, end_s), labels


def _part(simulated: Simulated, start_s: float, end_s: float) -> Simulated:
    ends = simulated.link_end_s.max(axis=1) > start_s
    begins = np.where(simulated.stage_end_s > 0, simulated.stage_start_s, np.inf).min(axis=1)
    rows = np.flatnonzero(ends & (begins < end_s))
    rows = np.append(rows, rows[-1] + 1)  # a pass after the end, so that the part ends there

    def cut(times_s: FloatArray) -> FloatArray:
        return np.asarray(np.clip(times_s[rows] - start_s, 0.0, end_s - start_s))

    return Simulated(
        simulated.workload,
        tuple(simulated.passes[row] for row in rows),
        cut(simulated.stage_start_s),
        cut(simulated.stage_end_s),
        cut(simulated.link_start_s),
        cut(simulated.link_end_s),
    )


def _rounds(plan: PlanSpec, schedule: RequestSchedule, until_s: float) -> Simulated:
    groups = schedule.decode_micro_batches
    size = max(1, round(schedule.decode_requests / groups))
    first = Pass("decode", 0, 1, size, 1, 0, 0)
    seconds = _seconds(plan, first, schedule.mean_prompt_tokens)
    way_s = sum(seconds.compute) + sum(seconds.transfer)
    round_s = max(way_s, groups * max(*seconds.compute, *seconds.transfer))
    steps = int(until_s / round_s) + 2
    passes = tuple(
        Pass("decode", group, step + 1, size, 1, 0, max(0, step * groups + group - groups + 1))
        for step in range(steps)
        for group in range(groups)
    )
    return simulate_passes(plan.workload, passes, [seconds] * len(passes))


def _seconds(plan: PlanSpec, each: Pass, prompt_tokens: float) -> PassSeconds:
    if each.phase == "decode":
        compute = tuple(stage.decode_s for stage in plan.stages)
        return PassSeconds(compute, tuple(stage.decode_comm_s for stage in plan.stages))
    tokens, _ = plan.timed_sizes
    share = each.requests * prompt_tokens / tokens
    compute = tuple(share * stage.prefill_s for stage in plan.stages)
    return PassSeconds(compute, tuple(share * stage.prefill_comm_s for stage in plan.stages))
