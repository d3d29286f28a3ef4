"""The verdict on a plan: how long, how fast, how good, what that rests on, and what to mind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.figures import expected_perplexity, searched, sensitivity, whole
from llmpq.report.formatting import (
    count,
    duration,
    gap,
    listed,
    per_second,
    plural,
    seconds,
    whole_percent,
)
from llmpq.report.latency import kind_name, latencies, requests_per_second, waiting
from llmpq.report.sentences import LEAST_GAIN, search_outcome
from planner.plan.forecasts import LatencyForecast
from planner.plan.spec import PlanSpec, StagePlan
from quant.scheme import FULL_BITS, NEAR_FULL_BITS

LEAST_SHOWN_GAP = 5e-5  # less reads as 0.00 %


@dataclass(frozen=True)
class QualityWord:
    """How good a plan's answers are, in a word, and what that rests on."""

    word: str
    basis: str


@dataclass(frozen=True)
class Tile:
    """A figure that is shown large, under its name."""

    name: str
    figure: str


@dataclass(frozen=True)
class Verdict:
    """What a page begins with."""

    sentence: str
    tiles: Sequence[Tile]
    rests_on: Sequence[str]
    warnings: Sequence[str]


def quality_word(plan: PlanSpec) -> QualityWord:
    """The expected rise of perplexity where points were measured, else a word for the bits."""
    if plan.perplexity is not None:
        rise = f"perplexity {plan.perplexity.increase:+.3g}"
        return QualityWord(rise, f"perplexity: {expected_perplexity(plan.perplexity)}")
    counts = _counts(plan)
    told = f"{_shares(counts)} of {plural(plan.model.layers, 'layer')}"
    if plan.prefill_plan is not None:
        prefills = _counts(plan.prefill_plan)
        told += f" where stages decode, {_shares(prefills)} where they prefill"
        counts = min(counts, prefills, key=lambda each: sorted(each.elements()))
    if set(counts) == {FULL_BITS}:
        return QualityWord("that of 16 bit", f"{told}: nothing is quantized")
    return QualityWord(
        _word(counts),
        f"{told}, {sensitivity(plan)}; a word for the bits, no measurement of this model: llmpq "
        "indicator --perplexity gives one",
    )


def _counts(plan: PlanSpec) -> Counter[int]:
    """How many layers have which bits."""
    return Counter(bits for stage in plan.stages for bits in stage.bitwidths)


def _shares(counts: Counter[int]) -> str:
    return listed([f"{counts[bits]} at {bits} bit" for bits in sorted(counts, reverse=True)])


def _word(counts: Counter[int]) -> str:
    """A word for the bits that layers have; by the layers of 4 and 3 bit, which lose most."""
    layers = counts.total()
    if min(counts) >= NEAR_FULL_BITS:
        return "close to 16 bit"
    if min(counts) == 4:
        return "a little below 16 bit" if counts[4] < layers / 2 else "below 16 bit"
    return "below 16 bit" if counts[3] < layers / 4 else "clearly below 16 bit"


def verdict(plan: PlanSpec) -> Verdict:
    """The verdict on a plan, which fits, as it was made."""
    quality = quality_word(plan)
    return Verdict(
        sentence=_sentence(plan, quality),
        tiles=_tiles(plan, quality),
        rests_on=[_times(plan), f"Quality: {quality.basis}.", _search(plan)],
        warnings=_warnings(plan),
    )


def _sentence(plan: PlanSpec, quality: QualityWord) -> str:
    devices = plural(len(_stages(plan)), "device")
    place = f"{plan.model.name} runs on {devices} of {plan.cluster}"
    if plan.perplexity is None:
        good = f"at a quality {quality.word}"
    else:
        good = f"with {quality.word} expected"
    if plan.latency is not None:
        return (
            f"{place}. It should answer {requests_per_second(plan.latency.requests_per_s)}, "
            f"{per_second(plan.latency.tokens_per_s)} new tokens per second, {good}: "
            f"{latencies(plan.latency)}."
        )
    speed = f"{per_second(plan.predicted.tokens_per_s)} new tokens per second"
    if plan.job is None:
        prompts = f"a batch of {plural(plan.workload.global_batch, 'prompt')}"
        took = duration(plan.predicted.latency_s)
    else:
        prompts, took = plural(plan.job.job.prompts, "prompt"), duration(plan.job.seconds)
    return f"{place}. It should finish {prompts} in {took}, {speed}, {good}."


def _tiles(plan: PlanSpec, quality: QualityWord) -> list[Tile]:
    if plan.latency is not None:
        return _bounded_tiles(plan, plan.latency, quality)
    job, in_flight = plan.job, count(plan.workload.global_batch)
    took = duration(plan.predicted.latency_s) if job is None else duration(job.seconds)
    prompts = plan.workload.global_batch if job is None else job.job.prompts
    tiles = [
        Tile(plural(prompts, "prompt"), took),
        Tile("new tokens per second", per_second(plan.predicted.tokens_per_s)),
        Tile("quality", quality.word),
    ]
    if job is None:
        return [*tiles, Tile("until all first tokens", duration(plan.predicted.prefill_s))]
    return [*tiles, Tile("prompts in flight", in_flight)]


def _bounded_tiles(plan: PlanSpec, forecast: LatencyForecast, quality: QualityWord) -> list[Tile]:
    schedule = plan.policy.schedule
    kind = [] if schedule is None else [Tile("schedule", kind_name(schedule.kind))]
    return [
        Tile("requests per second", per_second(forecast.requests_per_s)),
        Tile("new tokens per second", per_second(forecast.tokens_per_s)),
        Tile(f"{whole_percent(forecast.quantile)} of requests within", seconds(forecast.latency_s)),
        Tile("quality", quality.word),
        *kind,
    ]


def _times(plan: PlanSpec) -> str:
    """What the seconds rest on: stages that were measured and stages that were not."""
    measured = [each for each in _stages(plan) if not _is_estimated(each.provenance)]
    if not measured:
        return "Seconds: estimated from datasheets for every stage, simulated; nothing is measured."
    if len(measured) == len(_stages(plan)):
        return "Seconds: from measured layer times of every stage, simulated."
    return (
        f"Seconds: from measured layer times of {len(measured)} of "
        f"{plural(len(_stages(plan)), 'stage')}, the others estimated from datasheets; simulated."
    )


def _stages(plan: PlanSpec) -> tuple[StagePlan, ...]:
    """The stages of a plan, and those that prefill for them."""
    return plan.stages + (plan.prefill_plan.stages if plan.prefill_plan is not None else ())


def _is_estimated(provenance: str) -> bool:
    return "estimated" in provenance


def _search(plan: PlanSpec) -> str:
    s = plan.solver
    if plan.latency is not None:
        return f"Search: {searched(plan)}."
    proven = f"proven to be within {gap(s.gap)} of the best plan that was looked for"
    if s.gap < LEAST_SHOWN_GAP:
        proven = "proven to be the best plan that was looked for"
    return f"Search: {search_outcome(plan)}, {proven}, by {s.method} with {s.solver}."


def _warnings(plan: PlanSpec) -> list[str]:
    """What may make the figures wrong, or a better plan possible."""
    found: list[str] = []
    estimated = [each for each in _stages(plan) if _is_estimated(each.provenance)]
    if estimated:
        kinds = listed(list(dict.fromkeys(each.accelerator for each in estimated)))
        found.append(
            f"Times of {kinds} are estimates from datasheets: llmpq profile measures them on the "
            "devices, and --profiles FILE plans with them."
        )
    if plan.latency is not None:
        found.append(f"Latency is {waiting(plan.latency)}.")
    if plan.latency is None and plan.solver.gap >= LEAST_GAIN:
        found.append(
            f"The search ended before it had proven more: a plan up to {gap(plan.solver.gap)} "
            "better may exist; --search_time_limit S gives it more time."
        )
    if any(stage.emulated for stage in plan.stages):
        found.append(
            "Some devices are emulated on CPUs: the seconds are those of the devices that they "
            f"stand for, and the {whole(plan)} takes longer here."
        )
    if plan.unused_devices:
        found.append(f"Not used: {', '.join(plan.unused_devices)}.")
    return found
