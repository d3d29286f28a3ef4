"""The figures of a plan in words: terminal and page take every number from here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llmpq.report.formatting import duration, gap, number, per_second, plural, seconds, times
from llmpq.report.job_answers import what_is_planned
from llmpq.report.latency import latencies, lengths, rates
from llmpq.report.sentences import search_outcome
from planner.plan.forecasts import PerplexityForecast
from planner.plan.spec import Baseline, PlanSpec, StagePlan
from planner.scheduling import TOKEN_POLICIES

MOST_RUNS = 6  # of equal bits that are told in the order of the layers


@dataclass(frozen=True)
class Facts:
    """Lines that the terminal has too, by what they are about."""

    headline: str
    predicted: str
    searched: str
    priced: str
    baselines: Sequence[str]
    lengths: str = ""


def facts_of(plan: PlanSpec) -> Facts:
    """The lines on a plan."""
    return Facts(
        headline=f"{what_is_planned(plan)}; micro-batches {micro_batches(plan)}",
        predicted=predicted(plan),
        searched=searched(plan),
        priced=priced(plan),
        baselines=[beside(plan, b) for b in plan.baselines if b.name == "uniform"],
        lengths="" if plan.latency is None else lengths(plan.latency),
    )


def whole(plan: PlanSpec) -> str:
    """What the seconds of a plan are of."""
    if plan.latency is not None:
        return "request"
    return "batch" if plan.job is None else "job"


def micro_batches(plan: PlanSpec) -> str:
    """How many requests the stages take at once."""
    sizes, policy = plan.micro_batches, plan.policy
    if policy.name not in TOKEN_POLICIES:
        prefills = (plan.prefill_plan or plan).micro_batches
        return f"{prefills.prefill} (prefill), {sizes.decode} (decode)"
    parts = f", prompts in parts of {policy.prefill_chunk_tokens} tokens"
    most = f"of up to {policy.max_batch_size} requests of both phases (policy {policy.name}"
    return f"{most}{parts if policy.prefill_chunk_tokens else ''})"


def bits_of(stage: StagePlan) -> list[str]:
    """Runs of equal bits in layer order, or counts where there are too many runs to read."""
    runs = [(bits, len(list(group))) for bits, group in groupby(stage.bitwidths)]
    if len(runs) <= MOST_RUNS:
        return [f"{bits}x{count}" for bits, count in runs]
    counts = Counter(stage.bitwidths)
    return [*(f"{bits}x{counts[bits]}" for bits in sorted(counts)), "(mixed)"]


def predicted(plan: PlanSpec) -> str:
    """Seconds and tokens per second; of the two phases where they follow one another. Under a bound
    on latency requests per second, and the latency.
    """
    p = plan.predicted
    if plan.latency is not None:
        return f"{rates(plan.latency)}; {latencies(plan.latency)}"
    text = f"{duration(p.latency_s)} {_of_what(plan)}, {per_second(p.tokens_per_s)} tokens/s"
    if plan.job is not None:
        return text
    return f"{text} (prefill {duration(p.prefill_s)}, decode {duration(p.decode_s)})"


def searched(plan: PlanSpec) -> str:
    """How the plan was found, and how far from the best it can be."""
    s = plan.solver
    if plan.latency is not None:
        schedules = plural(plan.latency.evaluations, "schedule")
        return f"{schedules} evaluated by branch and bound, {seconds(s.seconds)}"
    return (
        f"{s.method} with {s.solver}, {search_outcome(plan)}, gap {gap(s.gap)}, "
        f"{seconds(s.seconds)} for {plural(s.candidates, 'candidate')} of order and micro-batches "
        f"({s.solved:,} solved)"
    )


def priced(plan: PlanSpec) -> str:
    """The price of quality, and how much the plan loses."""
    s = plan.solver
    return f"theta {number(s.theta)}, {sensitivity(plan)} ({plan.sensitivity_source})"


def sensitivity(plan: PlanSpec) -> str:
    """How much the bits of layers lose, those of stages that only prefill by themselves."""
    text = f"sensitivity {number(plan.solver.sensitivity)}"
    if plan.prefill_plan is None:
        return text
    return f"{text} (of prefill {number(plan.prefill_plan.solver.sensitivity)})"


def expected_perplexity(forecast: PerplexityForecast) -> str:
    """The rise of perplexity, its interval, and the bound where one was asked for."""
    text = (
        f"{forecast.increase:+.3g} over {number(forecast.baseline)} at 16 bit expected "
        f"({forecast.low:+.3g} to {forecast.high:+.3g}, from {forecast.points} measured points)"
    )
    if forecast.max_increase is None or forecast.max_omega is None:
        return text
    return (
        f"{text}; at most {forecast.max_increase:+.3g} asked for, which is a sensitivity of "
        f"{number(forecast.max_omega)}"
    )


def beside(plan: PlanSpec, baseline: Baseline) -> str:
    """A simpler plan against this one."""
    if baseline.latency_s is None or baseline.sensitivity is None:
        return f"{baseline.name}: does not fit at any bitwidth"
    ratio = baseline.latency_s / plan.predicted.latency_s
    return (
        f"{baseline.name} ({baseline.bitwidth} bit): {duration(baseline.latency_s)} "
        f"{_of_what(plan)}, sensitivity {number(baseline.sensitivity)}; this plan is "
        f"{times(ratio)} as fast"
    )


def times_from(plan: PlanSpec) -> list[str]:
    """Lines that say where the stages' times come from; stages of one source share a line."""
    stages: dict[str, list[str]] = {}
    prefills = () if plan.prefill_plan is None else plan.prefill_plan.stages
    for stage in (*prefills, *plan.stages):
        phase = "" if stage.role == "both" else f"{stage.role} "
        stages.setdefault(stage.provenance, []).append(f"{phase}stage {stage.index}")
    if len(stages) == 1:
        return [f"times: {source}" for source in stages]
    return [f"times of {_together(of)}: {source}" for source, of in stages.items()]


def _together(stages: list[str]) -> str:
    """Numbers of stages behind what they are: "stage 0, 2"."""
    kinds: dict[str, list[str]] = {}
    for kind, _, index in (stage.rpartition(" ") for stage in stages):
        kinds.setdefault(kind, []).append(index)
    return ", ".join(f"{kind} {', '.join(numbers)}" for kind, numbers in kinds.items())


def _of_what(plan: PlanSpec) -> str:
    return "a batch" if plan.job is None else "for the job"
