"""Simulating a plan by the seconds in its file alone: a batch, or a few cycles of a schedule in its
steady state; and the trace of a real run.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from planner.costs.pass_times import PassSeconds
from planner.lengths import FloatArray, IntArray
from planner.plan.parts import LatencyForecast
from planner.plan.spec import PlanSpec, StagePlan
from planner.schedule.orca import MixedPass
from planner.schedule.passes import JobRows, Pass, computed_tokens, policy_sizes
from planner.scheduling import Phase, RequestSchedule
from planner.simulation.pictures import named_tracks, simulated_events, span
from planner.simulation.simulation import Simulated, simulate, simulate_passes
from planner.workload import Job
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file

FILLS_SHOWN = 3

APPROXIMATION = (
    "times of the plan's micro-batches: prefills in proportion to their tokens, every decode step "
    "as at the mean context"
)


def planned_s(plan: PlanSpec, stage: StagePlan, phase: Phase) -> float:
    """Seconds of a full micro-batch; 0 on emulated devices without a time scale."""
    seconds = stage.prefill_s if phase == "prefill" else stage.decode_s
    return seconds * plan.time_scale if stage.emulated else seconds


def simulate_plan(plan: PlanSpec) -> Simulated:
    """Simulate a batch, or the first `FILLS_SHOWN` fills of a job's slots or requests in flight, at
    the run's `time_scale`. Each pass takes its modelled time, else see `APPROXIMATION`.
    """
    scale = time_scale(plan)
    has_states = any(stage.state_bytes for stage in plan.stages)
    sizes = policy_sizes(plan.policy, plan.workload, plan.micro_batches, has_states)

    def seconds(each: Pass) -> PassSeconds:
        compute, transfer = zip(
            *(_seconds(plan, stage, each) for stage in plan.stages), strict=True
        )
        return PassSeconds(
            tuple(scale * own_s for own_s in compute), tuple(scale * hop_s for hop_s in transfer)
        )

    rows = _shown_rows(plan)
    return simulate(plan.workload, sizes, len(plan.stages), seconds, rows)


def _shown_rows(plan: PlanSpec) -> JobRows | None:
    schedule, slots = plan.policy.schedule, plan.workload.global_batch
    if schedule is not None:
        slots = schedule.decode_requests
    if plan.job is not None:
        return first_rows(plan.job.job, slots)
    if schedule is None or plan.latency is None:
        return None
    generator, lengths = np.random.default_rng(0), plan.latency.lengths
    prompts, outputs = (
        each.drawn(FILLS_SHOWN * slots, generator).tolist()
        for each in (lengths.prompts, lengths.outputs)
    )
    return JobRows(prompts, outputs)


def first_rows(job: Job | None, slots: int) -> JobRows | None:
    if job is None:
        return None
    count = min(job.prompts, FILLS_SHOWN * slots)
    return JobRows.of(job, count)


def _seconds(plan: PlanSpec, stage: StagePlan, each: Pass) -> tuple[float, float]:
    if isinstance(each, MixedPass):
        return _mixed_seconds(plan, stage, each)
    is_decode = each.phase == "decode"
    if stage.modelled is not None:
        length = each.context_length if is_decode else each.tokens
        lengths = np.array(each.prompts or (length,) * each.requests, dtype=np.int64)
        there = np.minimum(0 if is_decode else plan.workload.heads.shared_tokens, lengths - 1)
        hop_s = stage.modelled.transfer_s(each.all_tokens - int(there.sum()), each.requests)
        if there.any():
            return stage.modelled.pass_s(there, lengths - there), hop_s
        return stage.modelled.compute_s(is_decode, lengths), hop_s
    if is_decode:
        return stage.decode_s, stage.decode_comm_s
    share = computed_tokens(each, plan.workload.heads) / plan.timed_sizes[0]
    return share * stage.prefill_s, share * stage.prefill_comm_s


def _mixed_seconds(plan: PlanSpec, stage: StagePlan, each: MixedPass) -> tuple[float, float]:
    """Seconds of a pass of both phases: of modelled times all, else the sum of both."""
    prompt_tokens = each.all_tokens - each.decodes
    if stage.modelled is not None:
        steps = ((each.decode_context, 1),) * each.decodes
        starts, counts = np.array((*steps, *each.parts), dtype=np.int64).T
        hop_s = stage.modelled.transfer_s(each.all_tokens, each.requests)
        return stage.modelled.pass_s(starts, counts), hop_s
    share = prompt_tokens / plan.timed_sizes[0]
    has_steps = min(1, each.decodes)
    compute_s = share * stage.prefill_s + has_steps * stage.decode_s
    return compute_s, share * stage.prefill_comm_s + has_steps * stage.decode_comm_s


def time_scale(plan: PlanSpec) -> float:
    emulated = all(stage.emulated for stage in plan.stages)
    return plan.time_scale if emulated and plan.time_scale else 1.0


RUN_PROCESS, FIRST_SIMULATED_PROCESS = 0, 1

SHOWN_S = 2e-5  # waits and sends that are shorter are in the numbers of their micro-batch only


@dataclass(frozen=True, eq=False)
class MeasuredStage:
    """Micro-batches of a stage in order `[M]`, in seconds of one clock: computed from `began_s` to
    `ended_s`, passed on until `sent_s`; `dropped` came later. `clock_error_s`: how far the stage
    may be shifted.
    """

    began_s: FloatArray
    ended_s: FloatArray
    sent_s: FloatArray
    requests: IntArray
    decode_requests: IntArray
    tokens: IntArray
    context_length: IntArray
    dropped: int
    clock_offset_s: float
    clock_error_s: float


def run_trace(plan: PlanSpec, stages: Sequence[MeasuredStage | None]) -> str:
    """JSON in Chrome's trace format, from 0 on; None: a stage that did not answer."""
    labels = [stage.label for stage in plan.stages]
    starts = [s.began_s[0] for s in stages if s is not None and len(s.began_s)]
    zero_s = float(min(starts, default=0.0))
    events = [*named_tracks(RUN_PROCESS, "run", labels)]
    for index, stage in enumerate(stages):
        if stage is not None:
            events += _events(index, stage, zero_s)
    scale = time_scale(plan)
    title = "simulated" if scale == 1.0 else f"simulated (time scale {scale:g})"
    events += simulated_events(simulate_plan(plan), labels, title, FIRST_SIMULATED_PROCESS)
    content = {"displayTimeUnit": "ms", "otherData": _notes(plan, stages), "traceEvents": events}
    return json.dumps(content, separators=(",", ":"))


def check_trace_path(path: Path, taken: Sequence[Path] = ()) -> None:
    """Raise InputError before a run whose trace could not be written, or would replace `taken`."""
    if path.resolve() in [other.resolve() for other in taken]:
        raise InputError(f"the trace would replace {str(path)!r}; give it a file of its own")
    if not names_a_file(path):
        raise InputError(
            f"cannot write the trace to {str(path)!r}; give a file in a folder that exists"
        )


def _notes(plan: PlanSpec, stages: Sequence[MeasuredStage | None]) -> dict[str, object]:
    approximate = any(stage.modelled is None for stage in plan.stages)
    return {
        "simulated": APPROXIMATION if approximate else "the plan's modelled times",
        "stages": [
            "did not answer"
            if stage is None
            else {
                "micro_batches": len(stage.began_s),
                "micro_batches_dropped": stage.dropped,
                "clock_offset_s": stage.clock_offset_s,
                "clock_error_s": stage.clock_error_s,
            }
            for stage in stages
        ],
    }


def _events(index: int, stage: MeasuredStage, zero_s: float) -> Iterator[dict[str, object]]:
    free_s, track = zero_s, (RUN_PROCESS, index)
    numbers: Counter[str] = Counter()
    columns = (stage.began_s, stage.ended_s, stage.sent_s, stage.decode_requests, stage.requests)
    rows = (*columns, stage.tokens, stage.context_length)
    for began_s, ended_s, sent_s, decodes, *sizes in zip(
        *(column.tolist() for column in rows), strict=True
    ):
        kind = ("decode" if decodes == sizes[0] else "mixed") if decodes else "prefill"
        details = dict(zip(("requests", "tokens", "context_length"), sizes, strict=True))
        details |= {"wait_ms": (began_s - free_s) * 1e3, "send_ms": (sent_s - ended_s) * 1e3}
        if began_s - free_s >= SHOWN_S:
            yield span(track, "wait", "wait", free_s - zero_s, began_s - zero_s)
        name = f"{kind} {numbers[kind]}"
        yield span(track, name, kind, began_s - zero_s, ended_s - zero_s) | {"args": details}
        if sent_s - ended_s >= SHOWN_S:
            yield span(track, "send", "send", ended_s - zero_s, sent_s - zero_s)
        numbers[kind] += 1
        free_s = sent_s


CYCLES_BEFORE, CYCLES_SHOWN = 2, 2
"""Cycles before those that are shown, in which the pipeline fills, and cycles that are shown."""

SIMULATED_TIMES = ("stage_start_s", "stage_end_s", "link_start_s", "link_end_s")

TURNS_SHOWN = 4
"""Turns of newcomers that are shown of stages that only prefill, whose cycles are short."""


def simulated_cycles(plan: PlanSpec) -> tuple[Simulated, tuple[str, ...]]:
    """What all stages of a plan under a bound on latency do, from the middle of a run on, and their
    labels [N]; of `waa-c` and `waa-m` the stages that prefill come first. Prefills take time in
    proportion to their tokens, every decode step as of a group of mean size. SpecError for a plan
    of another policy.
    """
    schedule, forecast = plan.policy.schedule, plan.latency
    if schedule is None or forecast is None:
        raise SpecError(f"a plan of policy {plan.policy.name} has no cycles; plan with a bound")
    if plan.prefill_plan is None:
        return _in_turns(plan, schedule)
    return _divided(plan, plan.prefill_plan, schedule, forecast)


def _in_turns(plan: PlanSpec, schedule: RequestSchedule) -> tuple[Simulated, tuple[str, ...]]:
    passes = tuple(_turns_and_steps(schedule, CYCLES_BEFORE + CYCLES_SHOWN + 1))
    simulated = simulate_passes(
        plan.workload,
        passes,
        [_steady_seconds(plan, each, schedule.mean_prompt_tokens) for each in passes],
    )
    begins_s = simulated.stage_start_s[:, 0]
    first = [row for row, each in enumerate(passes) if each.phase == "prefill"]
    turn = len(first) // (CYCLES_BEFORE + CYCLES_SHOWN + 1)
    start_s, end_s = (float(begins_s[first[turn * count]]) for count in (CYCLES_BEFORE, -1))
    return _cut(simulated, start_s, end_s), tuple(stage.label for stage in plan.stages)


def _turns_and_steps(schedule: RequestSchedule, cycles: int) -> Iterator[Pass]:
    """Yield the passes of so many cycles; groups follow each other in one order for ever."""
    groups, steps = schedule.decode_micro_batches, schedule.decode_steps
    size = max(1, round(schedule.decode_requests / groups))
    newcomers = _shares(schedule.prefill_requests, groups)
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
        for requests in () if step else _micro_batches(newcomers[group], schedule):
            yield Pass("prefill", prefills, 0, requests, 1, 0, results_before)
            submitted, prefills = submitted + 1, prefills + 1
        waiting.append((group, done + 1, submitted))


def _shares(requests: int, count: int) -> list[int]:
    return [requests * (i + 1) // count - requests * i // count for i in range(count)]


def _micro_batches(requests: int, schedule: RequestSchedule) -> list[int]:
    return _shares(requests, -(-requests // schedule.prefill_micro_batch))


def _divided(
    plan: PlanSpec, prefills: PlanSpec, schedule: RequestSchedule, forecast: LatencyForecast
) -> tuple[Simulated, tuple[str, ...]]:
    turn_s = schedule.prefill_requests / forecast.requests_per_s
    sizes = _micro_batches(schedule.prefill_requests, schedule)
    turn = tuple(Pass("prefill", i, 0, size, 1, 0, 0) for i, size in enumerate(sizes))
    prompt_tokens = schedule.mean_prompt_tokens
    seconds = [_steady_seconds(prefills, each, prompt_tokens) for each in turn]
    one = simulate_passes(prefills.workload, turn, seconds)
    start_s = (CYCLES_BEFORE + float(np.ceil(one.latency_s / turn_s))) * turn_s
    end_s = start_s + TURNS_SHOWN * turn_s
    rounds = _decode_rounds(plan, schedule, end_s)
    count = int(np.ceil(rounds.latency_s / turn_s))
    shift_s = np.repeat(np.arange(count) * turn_s, len(turn))[:, np.newaxis]

    def joined(name: str) -> FloatArray:
        own = np.tile(getattr(one, name), (count, 1)) + shift_s
        others: FloatArray = getattr(rounds, name)
        above = np.hstack([own, np.zeros((len(own), rounds.stages))])
        below = np.hstack([np.zeros((len(others), one.stages)), others])
        return np.asarray(np.vstack([above, below]))

    passes = (*turn * count, *rounds.passes)
    simulated = Simulated(plan.workload, passes, *map(joined, SIMULATED_TIMES))
    roles = (("prefill", prefills), ("decode", plan))
    labels = tuple(f"{role}, {stage.label}" for role, part in roles for stage in part.stages)
    return _cut(simulated, start_s, end_s), labels


def _cut(simulated: Simulated, start_s: float, end_s: float) -> Simulated:
    ends = simulated.link_end_s.max(axis=1) > start_s
    begins = np.where(simulated.stage_end_s > 0, simulated.stage_start_s, np.inf).min(axis=1)
    rows = np.flatnonzero(ends & (begins < end_s))
    rows = np.append(rows, rows[-1] + 1)  # a pass after the end, so that the part ends there
    times_s = (getattr(simulated, name)[rows] - start_s for name in SIMULATED_TIMES)
    cut_s = (np.clip(each, 0.0, end_s - start_s) for each in times_s)
    passes = tuple(simulated.passes[row] for row in rows)
    return Simulated(simulated.workload, passes, *cut_s)


def _decode_rounds(plan: PlanSpec, schedule: RequestSchedule, until_s: float) -> Simulated:
    groups = schedule.decode_micro_batches
    size = max(1, round(schedule.decode_requests / groups))
    first = Pass("decode", 0, 1, size, 1, 0, 0)
    seconds = _steady_seconds(plan, first, schedule.mean_prompt_tokens)
    way_s = sum(seconds.compute) + sum(seconds.transfer)
    round_s = max(way_s, groups * max(*seconds.compute, *seconds.transfer))
    steps = int(until_s / round_s) + 2
    passes = tuple(
        Pass("decode", group, step + 1, size, 1, 0, max(0, step * groups + group - groups + 1))
        for step in range(steps)
        for group in range(groups)
    )
    return simulate_passes(plan.workload, passes, [seconds] * len(passes))


def _steady_seconds(plan: PlanSpec, each: Pass, prompt_tokens: float) -> PassSeconds:
    if each.phase == "decode":
        compute = tuple(stage.decode_s for stage in plan.stages)
        return PassSeconds(compute, tuple(stage.decode_comm_s for stage in plan.stages))
    tokens, _ = plan.timed_sizes
    share = each.requests * plan.workload.heads.computed(prompt_tokens) / tokens
    compute = tuple(share * stage.prefill_s for stage in plan.stages)
    return PassSeconds(compute, tuple(share * stage.prefill_comm_s for stage in plan.stages))
