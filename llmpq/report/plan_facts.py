"""The facts of a plan: terminal, notebook and page take every number and sentence from here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmpq.report.answers import (
    expert_remarks,
    job_answers,
    job_remarks,
    weight_remarks,
    what_is_planned,
)
from llmpq.report.formatting import (
    bit_runs,
    count,
    duration,
    gap,
    listed,
    number,
    per_second,
    percent,
    plural,
    seconds,
    times,
    whole_percent,
)
from llmpq.report.latency import kind_name, latencies, lengths, rates, requests_per_second, waiting
from llmpq.report.quality import QualityWord, loss, loss_head, quality_word, with_quality
from llmpq.report.reasons import LEAST_GAIN
from planner.options import PLAN_TIME
from planner.plan.parts import LatencyForecast
from planner.plan.spec import Baseline, PlanSpec, StagePlan, all_stages
from planner.scheduling import TOKEN_POLICIES
from planner.search.request import bits_of_format
from quant.scheme import BITWIDTHS

MOST_RUNS = 6  # of equal bits that are told in the order of the layers


@dataclass(frozen=True)
class PlanFacts:
    """A plan in words: what it is for, the verdict on it, what people ask of it, and what its
    figures rest on. `tiles` are the first figures by their names; `baselines` the simpler plans
    against this one.
    """

    title: str
    planned: str
    whole: str
    sentence: str
    tiles: Sequence[tuple[str, str]]
    rests_on: Sequence[str]
    warnings: Sequence[str]
    answers: Sequence[tuple[str, str]]
    remarks: Sequence[str]
    quality: QualityWord
    predicted: str
    searched: str
    priced: str
    baselines: Sequence[str]
    lengths: str


def facts_of(plan: PlanSpec) -> PlanFacts:
    quality = quality_word(plan)
    return PlanFacts(
        title=f"{plan.model.name} on {plan.cluster}",
        planned=f"{what_is_planned(plan)}; micro-batches {micro_batches(plan)}",
        whole=whole(plan),
        sentence=_sentence(plan, quality),
        tiles=_tiles(plan, quality),
        rests_on=[_times(plan), f"Quality: {quality.word} ({quality.basis}).", _search(plan)],
        warnings=_warnings(plan),
        answers=job_answers(plan),
        remarks=[
            *job_remarks(plan),
            *expert_remarks(plan),
            *weight_remarks(plan),
            *_format_remarks(plan),
        ],
        quality=quality,
        predicted=predicted(plan),
        searched=searched(plan),
        priced=_priced(plan),
        baselines=[beside(plan, each) for each in plan.baselines if each.name == "uniform"],
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
    runs = bit_runs(stage.bitwidths)
    if len(runs) <= MOST_RUNS:
        return [f"{bits}x{count}" for bits, count in runs]
    counts = Counter(stage.bitwidths)
    return [*(f"{bits}x{counts[bits]}" for bits in sorted(counts)), "(mixed)"]


def predicted(plan: PlanSpec) -> str:
    """Seconds and tokens/s, by phase where one follows the other; or requests/s and latency."""
    p = plan.predicted
    if plan.latency is not None:
        return f"{rates(plan.latency)}; {latencies(plan.latency)}"
    text = f"{duration(p.latency_s)} {_of_what(plan)}, {per_second(p.tokens_per_s)} tokens/s"
    if plan.job is not None:
        return text
    return f"{text} (prefill {duration(p.prefill_s)}, decode {duration(p.decode_s)})"


def searched(plan: PlanSpec) -> str:
    s = plan.solver
    if plan.latency is not None:
        schedules = plural(plan.latency.evaluations, "schedule")
        return f"{schedules} evaluated by branch and bound, {seconds(s.seconds)}"
    return (
        f"{s.method} with {s.solver}, {search_outcome(plan)}, gap {gap(s.gap)}, "
        f"{seconds(s.seconds)} for {plural(s.candidates, 'candidate')} of order and micro-batches "
        f"({s.solved:,} solved)"
    )


def _priced(plan: PlanSpec) -> str:
    """What bits cost the search: of stages that prefill alone by themselves."""
    text = f"theta {number(plan.solver.theta)}, sensitivity {number(plan.solver.sensitivity)}"
    if plan.prefill_plan is not None:
        text += f" (of prefill {number(plan.prefill_plan.solver.sensitivity)})"
    return f"{text} ({plan.sensitivity_source})"


def beside(plan: PlanSpec, baseline: Baseline) -> str:
    if baseline.latency_s is None or baseline.sensitivity is None:
        return f"{baseline.name}: no plan with one bitwidth"
    ratio = baseline.latency_s / plan.predicted.latency_s
    return (
        f"{baseline.name} ({baseline.bitwidth} bit): {duration(baseline.latency_s)} "
        f"{_of_what(plan)}, {loss_head(plan)} {loss(plan, baseline.sensitivity)}; this plan is "
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


LEAST_SHOWN_GAP = 5e-5  # less reads as 0.00 %


def _sentence(plan: PlanSpec, quality: QualityWord) -> str:
    devices = plural(len(all_stages(plan)), "device")
    place = f"{plan.model.name} runs on {devices} of {plan.cluster}"
    good = with_quality(quality)
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


def _tiles(plan: PlanSpec, quality: QualityWord) -> list[tuple[str, str]]:
    if plan.latency is not None:
        return _bounded_tiles(plan, plan.latency, quality)
    job, in_flight = plan.job, count(plan.workload.global_batch)
    took = duration(plan.predicted.latency_s) if job is None else duration(job.seconds)
    prompts = plan.workload.global_batch if job is None else job.job.prompts
    tiles = [
        (plural(prompts, "prompt"), took),
        ("new tokens per second", per_second(plan.predicted.tokens_per_s)),
        ("quality", quality.word),
    ]
    if job is None:
        return [*tiles, ("until all first tokens", duration(plan.predicted.prefill_s))]
    return [*tiles, ("prompts in flight", in_flight)]


def _bounded_tiles(
    plan: PlanSpec, forecast: LatencyForecast, quality: QualityWord
) -> list[tuple[str, str]]:
    schedule = plan.policy.schedule
    kind = [] if schedule is None else [("schedule", kind_name(schedule.kind))]
    return [
        ("requests per second", per_second(forecast.requests_per_s)),
        ("new tokens per second", per_second(forecast.tokens_per_s)),
        (f"{whole_percent(forecast.quantile)} of requests within", seconds(forecast.latency_s)),
        ("quality", quality.word),
        *kind,
    ]


def _format_remarks(plan: PlanSpec) -> Iterator[str]:
    """Yield which bits were left out for the format that the plan is to be written in."""
    origin = plan.origin
    if origin is None or origin.options.format is None or origin.options.bits:
        return
    held = bits_of_format(origin.cluster_spec(), origin.options.format)
    lacking = [str(bits) for bits in BITWIDTHS if bits not in held]
    yield f"without {listed(lacking)} bit, which format {origin.options.format} does not hold here"


def _times(plan: PlanSpec) -> str:
    stages = all_stages(plan)
    measured = [each for each in stages if not _is_estimated(each.provenance)]
    if not measured:
        return "Seconds: estimated from datasheets for every stage, simulated; nothing is measured."
    if len(measured) == len(stages):
        return "Seconds: from measured layer times of every stage, simulated."
    return (
        f"Seconds: from measured layer times of {len(measured)} of "
        f"{plural(len(stages), 'stage')}, the others estimated from datasheets; simulated."
    )


def search_outcome(plan: PlanSpec) -> str:
    """The outcome of the search: "optimal" to the gap, "best found", or best when "out of time"."""
    solver = plan.solver
    if solver.status != "time_limit":
        return solver.status
    limit_s = 0.0 if plan.origin is None else PLAN_TIME * plan.origin.options.search_time_limit
    return "best found" if plan.job is not None and solver.seconds < limit_s else "out of time"


def bottlenecks(plan: PlanSpec) -> str:
    """A sentence on the stages that work longest, and on how much of the time devices wait."""
    p = plan.predicted
    if len(plan.stages) == 1:
        return "There is one stage, so it is the bottleneck of both phases."
    first, second = plan.stages[p.prefill_bottleneck], plan.stages[p.decode_bottleneck]
    idle = 1 - sum(p.busy_share) / len(p.busy_share)
    where = (
        f"Stage {first.index} ({first.device}) is the slowest in both phases"
        if first is second
        else f"The slowest stage is {first.index} ({first.device}) in prefill and {second.index} "
        f"({second.device}) in decode"
    )
    return f"{where}; on average a device waits {percent(idle)} of the time."


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
    estimated = [each for each in all_stages(plan) if _is_estimated(each.provenance)]
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
