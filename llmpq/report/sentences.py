"""Sentences that say what the figures of an explanation mean."""

from __future__ import annotations

from collections.abc import Sequence

from llmpq.report.formatting import (
    change,
    layer_span,
    listed,
    number,
    percent,
    plural,
    seconds,
    size,
)
from planner.explanation.explain import Alternative, Explanation, LayerReason, StageLimits
from planner.explanation.what_if import Question, WhatIfAnswer
from planner.options import PLAN_TIME
from planner.plan.spec import PlanSpec, StagePlan

LEAST_S = 1e-9  # below this a difference is rounding
LEAST_GAIN = 0.01  # share of the seconds or tokens from which on a change is worth a word
RESOURCES = {
    "memory": "memory",
    "prefill": "prefill time",
    "decode": "decode time",
}


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


def binding(limits: StageLimits) -> str:
    """Names of the resources that a stage has used up."""
    used = [RESOURCES[each] for each in limits.binds]
    return listed(used) if used else "nothing"


def worth_telling_s(plan: PlanSpec, least_s: float) -> float:
    """Seconds of the objective that make a tip; `least_s`: accuracy of the search."""
    return max(least_s, LEAST_GAIN * plan.solver.objective)


def lever(plan: PlanSpec, explanation: Explanation, least_s: float) -> str:
    """A sentence on the change of hardware that brings most, if any brings enough."""
    asked = explanation.answers.of("memory", "links")
    best = min(asked, key=lambda answer: answer.objective_change_s, default=None)
    if best is None:
        return ""
    if best.objective_change_s > -worth_telling_s(plan, least_s):
        whats = "more memory on one device" + (" or faster links" if len(plan.stages) > 1 else "")
        return f"None of the changes tried ({whats}) would gain {LEAST_GAIN * 100:g} % or more."
    return (
        f"Of the changes tried, {question(best.question, plan.stages)} would bring most: "
        f"{outcome(best, least_s)}."
    )


def question(asked: Question, stages: Sequence[StagePlan]) -> str:
    """The changed condition in words."""
    match asked.kind:
        case "memory" if asked.stage is not None:
            device = stages[asked.stage].device
            return f"{size(asked.amount)} more memory on stage {asked.stage} ({device})"
        case "links":
            return f"links {number(asked.amount)} times as fast"
        case "theta":
            return f"theta {number(asked.amount)}"
    return "the default method in place of the one that was asked for"


def outcome(answer: WhatIfAnswer, least_s: float) -> str:
    """Gains and losses of the new plan, and how it differs."""
    parts = [
        _faster(answer.latency_change_s, least_s),
        _quality(answer.quality_change_s, least_s),
        difference(answer),
    ]
    return ", ".join(part for part in parts if part)


def difference(answer: WhatIfAnswer) -> str:
    """The distance of the new plan from the present one, in layers."""
    parts = []
    if answer.layers_moved:
        parts.append(f"{plural(answer.layers_moved, 'layer')} on another stage")
    if answer.layers_with_other_bits:
        parts.append(f"{plural(answer.layers_with_other_bits, 'layer')} at other bits")
    if not parts:
        return "the same plan"
    return listed(parts)


def layer_sentence(reason: LayerReason, device: str, gap_s: float) -> str:
    """The reasons for the bits of a layer: each other bitwidth with what speaks against it."""
    span = layer_span(reason.layers)
    return f"{span[:1].upper()}{span[1:]}: {_placed(reason, device, gap_s)}"


def layer_sentences(
    reasons: Sequence[LayerReason], devices: Sequence[str], gap_s: float
) -> list[str]:
    """One sentence for each run of layers with the same reasons; `devices` by stage."""
    runs: list[tuple[range, str]] = []
    for reason in reasons:
        text = _placed(reason, devices[reason.stage], gap_s)
        if runs and runs[-1][1] == text:
            runs[-1] = range(runs[-1][0].start, reason.layers.stop), text
        else:
            runs.append((reason.layers, text))
    spans = [(layer_span(layers), text) for layers, text in runs]
    return [f"{span[:1].upper()}{span[1:]}: {text}" for span, text in spans]


def _placed(reason: LayerReason, device: str, gap_s: float) -> str:
    """Stage and bits with the reasons for them."""
    others = sorted(reason.alternatives, key=lambda each: -each.bits)
    parts = [f"{each.bits} bit {verdict(each, reason, gap_s)}." for each in others]
    if not parts:
        parts = ["No other bitwidth is allowed."]
    opening = f"{reason.bits} bit on stage {reason.stage} ({device})."
    return " ".join([opening, *parts, exchange(reason)]).strip()


def headline(reasons: Sequence[LayerReason]) -> str:
    """The gist for layers of one stage and bitwidth: why not more bits, and why not fewer."""
    others = [(each, reason.bits) for reason in reasons for each in reason.alternatives]
    more = [each.effect for each, bits in others if each.bits > bits]
    fewer = [each.effect for each, bits in others if each.bits < bits]
    parts = []
    if more and not any(effect.fits for effect in more):
        parts.append("More bits do not fit.")
    elif more:
        parts.append("More bits fit, but bring no better balance of time and quality.")
    if fewer and all(effect.latency_s >= 0 for effect in fewer):
        parts.append("Fewer bits would save memory, but no time, and lose quality.")
    elif fewer and all(effect.objective_s >= 0 for effect in fewer):
        parts.append("Fewer bits would be faster, but lose more quality than that is worth.")
    elif fewer:
        parts.append("Fewer bits would be better by less than the search can tell apart.")
    return " ".join(parts)


def verdict(alternative: Alternative, reason: LayerReason, gap_s: float) -> str:
    """The reasons against one other bitwidth; begins with a verb."""
    effect = alternative.effect
    if not effect.fits:
        return _no_room(alternative, reason)
    consequences = _consequences(effect.latency_s, effect.quality_s)
    if effect.objective_s >= 0:
        return f"fits, but would {consequences}"
    if effect.objective_s >= -gap_s:
        return f"fits and would {consequences}: a gain within the accepted gap"
    return f"fits and would {consequences}"


def exchange(reason: LayerReason) -> str:
    """A sentence on why this layer has these bits and not another one of its stage."""
    partner = reason.exchange
    if partner is None:
        return ""
    if abs(partner.quality_s) < LEAST_S:
        return (
            f"It is as sensitive as {layer_span(partner.layers)}, which has {partner.bits} bit: "
            "which of the two has more bits makes no difference."
        )
    what = "lose" if partner.quality_s > 0 else "gain"
    return (
        f"Exchanging bits with {layer_span(partner.layers)} ({partner.bits} bit) would {what} "
        f"quality worth {seconds(abs(partner.quality_s))}."
    )


def _no_room(alternative: Alternative, reason: LayerReason) -> str:
    needed = (
        f"needs {size(alternative.extra_bytes)} more, but {size(reason.spare_bytes)} "
        "are left on the stage"
    )
    bring = f"if it fitted, it would {_consequences(*_pair(alternative))}"
    room = alternative.room
    if room is None:
        return f"{needed} and no change of one other layer makes room ({bring})"
    which = "it" if room.layers == reason.layers else layer_span(room.layers)
    how = f"moving {which} to stage {room.to_stage} at {room.bits} bit"
    if room.to_stage == reason.stage:
        how = f"{room.bits} bit for {which}"
    both = _consequences(room.effect.latency_s, room.effect.quality_s)
    rounds = ""
    if abs(room.effect.decode_round_s) > LEAST_S:
        rounds = f" ({change(room.effect.decode_round_s)} a decode round)"
    return f"{needed} ({bring}); {how} makes room, and both together would {both}{rounds}"


def _pair(alternative: Alternative) -> tuple[float, float]:
    return alternative.effect.latency_s, alternative.effect.quality_s


def _consequences(latency_s: float, quality_s: float) -> str:
    """Time and quality in words, as "save 20 ms in all and lose quality worth 3 ms"."""
    parts = []
    if abs(latency_s) >= LEAST_S:
        verb = "save" if latency_s < 0 else "cost"
        parts.append(f"{verb} {seconds(abs(latency_s))} in all")
    if abs(quality_s) >= LEAST_S:
        verb = "gain" if quality_s < 0 else "lose"
        parts.append(f"{verb} quality worth {seconds(abs(quality_s))}")
    return " and ".join(parts) or "change neither time nor quality"


def _faster(latency_s: float, least_s: float) -> str:
    if abs(latency_s) <= least_s:
        return ""
    return f"{seconds(abs(latency_s))} {'less' if latency_s < 0 else 'more'} in all"


def _quality(quality_s: float, least_s: float) -> str:
    if abs(quality_s) <= least_s:
        return ""
    return f"quality worth {seconds(abs(quality_s))} {'gained' if quality_s < 0 else 'lost'}"
