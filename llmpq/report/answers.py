"""What people ask of a plan, answered in sentences, and the other plans that can be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from llmpq.report.formatting import (
    count,
    duration,
    listed,
    per_second,
    percent,
    plain,
    plural,
    size,
    times,
)
from llmpq.report.latency import latency_answers, what_is_bounded
from llmpq.report.quality import loss, loss_head
from llmpq.report.reasons import LEAST_GAIN
from planner.assumed_predictor import LONGEST, ORACLE, AssumedPredictor
from planner.model.stored_bits import ADDED_ERRORS, MOST_ADDED
from planner.plan.builder import plan_choice
from planner.plan.parts import JobForecast, MoreDevices, PlanChoice
from planner.plan.spec import PlanSpec, StagePlan, all_stages
from planner.scheduling import FORESEEING, PREDICTING, TOKEN_POLICIES
from quant.scheme import BITWIDTHS

EQUAL_SPEED = 0.005  # less than a percent that is shown


def job_answers(plan: PlanSpec) -> list[tuple[str, str]]:
    """Return questions with their answers: how long, at which quality, how much slower without
    quantization, what groups and one more device would bring, what it costs, and what predicted
    lengths save; of a plan of one batch only what is known beside it. Of a plan under a bound on
    latency first how it keeps that.
    """
    if plan.latency is not None:
        return [*latency_answers(plan, plan.latency), *_answers(plan, None)]
    return _answers(plan, plan.job)


def _answers(plan: PlanSpec, job: JobForecast | None) -> list[tuple[str, str]]:
    found = (
        ("How long?", _how_long(plan, job) if job is not None else ""),
        ("At which quality?", _qualities(plan)),
        ("And in full precision?", _full_precision(plan)),
        ("Under which policy?", _policies(plan)),
        ("In groups of devices?", _grouped(plan)),
        ("With more devices?", _more_devices(plan)),
        ("At which cost?", _cost(plan, job) if job is not None else ""),
        ("What do predicted lengths save?", _prediction(plan, job) if job is not None else ""),
    )
    return [(question, text) for question, text in found if text]


def job_remarks(plan: PlanSpec) -> list[str]:
    """Sentences on the job that the answers rest on: a better plan, its long rows, its lengths."""
    job = plan.job
    remarks = [beaten(plan)]
    if job is not None and plan.latency is None:
        remarks += [_long_rows(plan, job), _lengths(job)]
    return [each for each in remarks if each]


def expert_remarks(plan: PlanSpec) -> Iterator[str]:
    """Yield sentences on where a plan has the experts of its layers, and at which bits."""
    apart = Counter(
        choice.expert_bits
        for stage in plan.stages
        if stage.expert_bitwidths
        for choice in stage.choices
        if choice.expert_bits != choice.bits
    )
    if apart:
        each = [f"{apart[bits]} at {bits} bit" for bits in sorted(apart, reverse=True)]
        yield f"experts of other bits than the rest of their layers: {listed(each)}"
    yield from (_hosted(stage) for stage in plan.stages if stage.hosted_experts)


def weight_remarks(plan: PlanSpec) -> Iterator[str]:
    """Yield a sentence on what becomes of weights that are stored quantized, and what it costs."""
    weights = plan.weights
    if weights is None:
        return
    rounded, layers = weights.rounded, plural(plan.model.layers, "layer")
    parts = [f"{weights.kept} of {layers} keep their codes"] if weights.kept else []
    parts += [
        f"{rounded[bits]} {'are rounded again' if weights.kept else f'of {layers} are rounded'} to "
        f"{bits} bit, which adds an error of up to {percent(ADDED_ERRORS[bits])}"
        for bits in sorted(rounded, reverse=True)
    ]
    left = plan.model.layers - weights.kept - sum(rounded.values())
    parts += [f"{left} computed in 16 bit lose nothing"] if left else []
    lost = f"; {loss_head(plan)} of all {loss(plan, plan.solver.sensitivity)}" if rounded else ""
    yield f"weights are stored as {weights.stored}: {listed(parts)}{lost}"
    if rounded and ADDED_ERRORS[min(rounded)] > MOST_ADDED:
        yield (
            f"what {min(rounded)} bit adds is more than {percent(MOST_ADDED)} of the weights: a "
            "checkpoint of AWQ, GPTQ or W4A16 with codes that are kept loses it once; --bits 6 8 "
            "16 and more memory add less"
        )


def _hosted(stage: StagePlan) -> str:
    layers = plural(len(stage.hosted_experts), "layer")
    text = f"experts of {layers} of stage {stage.index} in host memory ({size(stage.host_bytes)})"
    if stage.streams_from == 1:
        return f"{text}, sent to the device when they are asked"
    text += ", computed there"
    if not stage.emulated:  # else its threads are those of the process that plays it
        text += f" by {plural(stage.threads, 'thread')}"
    if stage.streams_from is not None:
        text += f"; for {stage.streams_from:,} tokens at once and more sent to the device"
    return text


def what_is_planned(plan: PlanSpec) -> str:
    """A job's prompts, those in flight, and their lengths, or the bound on the latency."""
    if plan.latency is not None:
        return f"{what_is_bounded(plan.latency)}; {count(plan.workload.global_batch)} in flight"
    if plan.job is None:
        w = plan.workload
        return f"{plural(w.global_batch, 'prompt')} of {w.prompt_length} tokens, {w.new_tokens} new"
    job, lengths, slots = plan.job.job, plan.job.job.lengths, plan.workload
    mean = job.lengths.mean_prompt - job.computed_tokens
    shared = f", {mean:,.0f} of them shared" if job.heads.shared_tokens else ""
    prompts = f"{plural(plan.job.job.prompts, 'prompt')}, {count(slots.global_batch)} in flight"
    if lengths.are_alike:
        each = f"{lengths.longest_prompt} prompt tokens{shared}, {lengths.longest_output} new"
        return f"{prompts} ({each})"
    room = f"slots of {count(slots.total_length)} tokens"
    if plan.policy.name in TOKEN_POLICIES:
        room = f"{count(slots.kv_tokens)} token slots for all"
    return (
        f"{prompts} (mean {lengths.mean_prompt:,.0f} prompt tokens{shared}, "
        f"{lengths.mean_output:,.0f} new; {room})"
    )


def beaten(plan: PlanSpec) -> str:
    """A sentence on the plan that has more tokens per second and less sensitivity, if there is."""
    better, present = plan.beside.beaten_by, plan_choice(plan)
    if better is None or better.tokens_per_s < present.tokens_per_s * (1 + LEAST_GAIN):
        return ""
    gives = _gives(plan, better)
    return f"{count(better.in_flight)} in flight {gives}: leave out --global_bz"


def _policies(plan: PlanSpec) -> str:
    """The policy that was taken by its forecast, beside the other one."""
    other = plan.beside.other_policy
    if other is None:
        return ""
    times = plan.predicted.tokens_per_s / other.plan.tokens_per_s
    return (
        f"policy {plan.policy.name}: forecast {times:.2f} times {other.policy}, "
        f"{per_second(other.plan.tokens_per_s)} tokens/s (--policy {other.policy})"
    )


def _grouped(plan: PlanSpec) -> str:
    found = plan.beside.grouped
    if found is None:
        return ""
    gives = _gives(plan, found)
    return f"devices of a node that share every layer {gives}: {_IN_GROUPS}"


_IN_GROUPS = "--tensor_parallel auto"


def _gives(plan: PlanSpec, other: PlanChoice) -> str:
    present = plan_choice(plan)
    return (
        f"would give {per_second(other.tokens_per_s)} tokens/s (this plan "
        f"{per_second(present.tokens_per_s)}) at {loss_head(plan)} "
        f"{loss(plan, other.sensitivity)} ({loss(plan, present.sensitivity)})"
    )


def _how_long(plan: PlanSpec, job: JobForecast) -> str:
    return (
        f"{plural(job.job.prompts, 'prompt')}: {duration(job.seconds)} at "
        f"{per_second(job.tokens_per_s)} tokens/s, {count(plan.workload.global_batch)} in flight "
        "(without loading)"
    )


def _qualities(plan: PlanSpec) -> str:
    """The plans of the qualities; those that share one stand together."""
    parts: list[str] = []
    for choice, qualities in _by_plan(plan).items():
        taken = plan.beside.quality
        names = [f"{each} (taken)" if each == taken else each for each in qualities]
        tokens, head = ("", "") if parts else (" tokens/s", f"{loss_head(plan)} ")
        parts.append(
            f"{listed(names)} {per_second(choice.tokens_per_s)}{tokens}, "
            f"{head}{loss(plan, choice.sensitivity)}"
        )
    return f"quality: {'; '.join(parts)}" if parts else ""


def _by_plan(plan: PlanSpec) -> dict[PlanChoice, list[str]]:
    plans: dict[PlanChoice, list[str]] = {}
    for each in plan.beside.qualities:
        plans.setdefault(each.plan, []).append(each.quality)
    return plans


def _full_precision(plan: PlanSpec) -> str:
    if plan.beside.quality is None or (plan.weights is not None and not plan.weights.rounded):
        return ""
    used = used_bits(plan)
    most, full = most_bits(plan), plan.beside.full_precision
    if full is None and plan.latency is not None and used != {most}:
        return ""  # it was looked for only where time was left
    name = f"{most} bit" if full is None or _is_one(plan, full) else "nothing rounded again"
    if used == {most}:
        ends = f", embedding and LM head have {plan.head_bits}" if plan.head_bits < most else ""
        return f"{most} bit: all layers have it{ends}"
    if full is None:
        return f"{name} does not fit"
    slower = 1 - full.tokens_per_s / plan.predicted.tokens_per_s
    if abs(slower) < EQUAL_SPEED:
        return f"{name} fits, and is as fast: {count(full.in_flight)} in flight"
    how = "slower" if slower > 0 else "faster"
    return f"{name} fits: {abs(slower) * 100:.0f} % {how}, {count(full.in_flight)} in flight"


def most_bits(plan: PlanSpec) -> int:
    if plan.beside.full_precision is not None:
        return round(plan.beside.full_precision.mean_bits)
    used = max(used_bits(plan))
    return used if plan.origin is None else max(used, *(plan.origin.options.bits or BITWIDTHS))


def _is_one(plan: PlanSpec, full: PlanChoice) -> bool:
    asked = () if plan.origin is None else plan.origin.options.bits
    return full.mean_bits in (asked or BITWIDTHS)


def used_bits(plan: PlanSpec) -> set[int]:
    return {bits for stage in all_stages(plan) for bits in stage.bitwidths}


def _more_devices(plan: PlanSpec) -> str:
    """The gain of each kind of device that brings enough; its node where several have the kind."""
    found = _gaining_devices(plan)
    if plan.beside.more_devices and not found:
        return f"one more device of any kind: less than {LEAST_GAIN * 100:g} % more tokens/s"
    gains: list[str] = []
    for each, kind in found:
        many = "one" if each.count == 1 else count(each.count)
        faster = times(each.plan.tokens_per_s / plan.predicted.tokens_per_s)
        gains.append(f"{many} more {kind}: {faster}{'' if gains else ' the tokens/s'}")
    return "; ".join(gains)


def _gaining_devices(plan: PlanSpec) -> list[tuple[MoreDevices, str]]:
    """Devices that bring enough, and their kinds in words."""
    nodes = Counter(each.accelerator for each in plan.beside.more_devices)
    least = plan.predicted.tokens_per_s * (1 + LEAST_GAIN)
    return [
        (each, each.accelerator + (f" on {each.node}" if nodes[each.accelerator] > 1 else ""))
        for each in plan.beside.more_devices
        if each.plan.tokens_per_s >= least
    ]


def _cost(plan: PlanSpec, job: JobForecast) -> str:
    if job.price_per_hour is None:
        return "cost: not known, as the nodes of the cluster file have no price_per_hour"
    longer = plan.long_rows.job if plan.long_rows is not None else None
    parts = [job, longer] if longer is not None else [job]
    cost = job.price_per_hour * sum(part.seconds for part in parts) / 3600
    tokens = sum(part.seconds * part.tokens_per_s for part in parts)
    return (
        f"cost: {_price(job.price_per_hour)} per hour, {_price(cost / tokens * 1e6)} per million "
        f"tokens, {_price(cost)} for the job"
    )


def _price(amount: float) -> str:
    """An amount of any currency: two decimals, or two digits where that is more."""
    if 0 < amount < 0.1:
        return f"{amount:.2g}"
    return f"{amount:,.2f}"


def _prediction(plan: PlanSpec, job: JobForecast) -> str:
    """The KV memory of a request as it grows (`s3`) or by its predicted length (`s3-published`) and
    by its longest, and how many more requests are in flight in the same memory thereby.
    """
    if plan.policy.name not in PREDICTING:
        return ""
    lengths, slots = job.job.lengths, plan.workload
    predicted, longest = job.job.mean_held(plan.policy.name), lengths.mean_reserved
    token_bytes = sum(stage.memory.kv_cache for stage in plan.stages) / slots.kv_tokens
    sizes = [plain(size(each * token_bytes)) for each in (predicted, longest)]
    assumed, in_flight = job.job.predictor, slots.global_batch
    grows = plan.policy.name == FORESEEING
    if not grows and (assumed is None or assumed.source == LONGEST):
        return (
            f"KV memory of a request: {sizes[1]} in the mean ({longest:,.0f} "
            "tokens), as every answer is expected to be the longest; --predictor FOLDER of "
            "llmpq lengths for less"
        )
    fewer = min(in_flight, int(slots.reservable_under(plan.policy.name) / longest))
    return (
        f"KV memory of a request: {sizes[0]} {'held' if grows else 'expected'} in the mean "
        f"({predicted:,.0f} tokens), {sizes[1]} reserved for the longest "
        f"answer ({longest:,.0f}); so {count(in_flight)} in flight instead of {count(fewer)} "
        f"({_predictor(assumed)})"
    )


def _predictor(assumed: AssumedPredictor | None) -> str:
    if assumed is None or assumed.source == LONGEST:
        return "the longest answers are expected until some end; --predictor FOLDER for better"
    if assumed.source == ORACLE:
        return f"oracle: always the right one of {len(assumed.buckets)} lengths"
    return (
        f"predictor {assumed.source}: the right one of {len(assumed.buckets)} lengths for "
        f"{assumed.accuracy:.0%} of the rows held out"
    )


def _long_rows(plan: PlanSpec, job: JobForecast) -> str:
    """The plan for rows that have no room in the slots of the others."""
    longer = plan.long_rows
    if longer is None or longer.job is None:
        return ""
    return (
        f"{count(longer.job.job.prompts)} longer prompts run by themselves: "
        f"{duration(longer.job.seconds)}, {count(longer.workload.global_batch)} in flight; "
        f"{duration(job.seconds + longer.job.seconds)} in all"
    )


def _lengths(job: JobForecast) -> str:
    """The source of the output lengths, on which every figure rests."""
    lengths = job.job.lengths
    if lengths.outputs_from == "limits":
        return (
            "lengths: outputs are taken as long as their limits allow; --lengths FILE for measured "
            "ones"
        )
    longest = f"prompts up to {count(lengths.longest_prompt)} tokens"
    return (
        f"lengths: {longest}, outputs {lengths.mean_output:,.0f} in the mean, "
        f"{count(lengths.longest_output)} at most ({lengths.outputs_from})"
    )


@dataclass(frozen=True)
class Course:
    """A plan that can be had: names, figures, seconds, and the option or device that gives it."""

    name: str
    plan: PlanChoice
    seconds: float
    how: str
    is_present: bool = False


def menu(plan: PlanSpec) -> list[Course]:
    tokens = plan.predicted.tokens_per_s * plan.predicted.latency_s
    return [
        Course(name, choice, tokens / choice.tokens_per_s, how, is_present=index == 0)
        for index, (name, choice, how) in enumerate(_choices(plan))
    ]


def _choices(plan: PlanSpec) -> Iterator[tuple[str, PlanChoice, str]]:
    present, beside = plan_choice(plan), plan.beside
    taken = next((each.plan for each in beside.qualities if each.quality == beside.quality), None)
    groups = _by_plan(plan)
    own = groups.pop(taken, []) if taken is not None else []
    yield f"this plan{f' ({listed(own)})' if own else ''}", present, "taken"
    for choice, names in groups.items():
        yield listed(list(names)), choice, f"--quality {names[0]}"
    full, bits = beside.full_precision, most_bits(plan)
    if full is not None and _is_one(plan, full) and full.mean_bits > present.mean_bits:
        yield f"all layers at {bits} bit", full, f"--bits {bits}"
    if beaten(plan) and beside.beaten_by is not None:
        yield "fewer in flight", beside.beaten_by, "--input or --prompts in place of --global_bz"
    other = beside.other_policy
    if other is not None:
        yield f"under policy {other.policy}", other.plan, f"--policy {other.policy}"
    if beside.grouped is not None:
        yield "in groups of devices", beside.grouped, _IN_GROUPS
    for more, kind in _gaining_devices(plan):
        how = "one more device" if more.count == 1 else "more devices"
        yield f"{more.count} more {kind}", more.plan, how
