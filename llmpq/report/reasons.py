"""Why a plan is as it is, in words: bits of layers, and plans under changed conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import (
    bits_named,
    change,
    layer_runs,
    layer_span,
    listed,
    number,
    part_runs,
    part_span,
    plural,
    seconds,
    size,
)
from planner.explanation.explain import Alternative, Explanation, LayerReason, StageLimits
from planner.explanation.planned_assignment import PARTS, Part
from planner.explanation.what_if import Question, WhatIfAnswer
from planner.plan.spec import PlanSpec, StagePlan

LEAST_S = 1e-9  # below this a difference is rounding
LEAST_GAIN = 0.01  # share of the seconds or tokens from which on a change is worth a word
RESOURCES = {"memory": "memory", "prefill": "prefill time", "decode": "decode time"}


def binding(limits: StageLimits) -> str:
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
    parts = [
        _faster(answer.latency_change_s, least_s),
        _quality(answer.quality_change_s, least_s),
        difference(answer),
    ]
    return ", ".join(part for part in parts if part)


def difference(answer: WhatIfAnswer) -> str:
    parts = []
    if answer.layers_moved:
        parts.append(f"{plural(answer.layers_moved, 'layer')} on another stage")
    if answer.layers_with_other_bits:
        parts.append(f"{plural(answer.layers_with_other_bits, 'layer')} at other bits")
    if answer.layers_with_experts_elsewhere:
        layers = plural(answer.layers_with_experts_elsewhere, "layer")
        parts.append(f"experts of {layers} between device and host")
    if not parts:
        return "the same plan"
    return listed(parts)


def layer_sentence(reason: LayerReason, device: str, gap_s: float) -> str:
    """The reasons for the bits of a layer: each other bitwidth with what speaks against it."""
    return f"{part_span(reason.layers, reason.part).capitalize()}: {_placed(reason, device, gap_s)}"


def layer_sentences(
    reasons: Sequence[LayerReason], devices: Sequence[str], gap_s: float
) -> list[str]:
    """One sentence for all layers with the same reasons, experts apart; `devices` by stage."""
    alike: dict[tuple[Part, str], list[int]] = {}
    for reason in sorted(reasons, key=lambda each: each.part == "experts"):
        text = _placed(reason, devices[reason.stage], gap_s)
        alike.setdefault((reason.part, text), []).extend(reason.layers)
    return [
        f"{part_runs(layers, part).capitalize()}: {text}" for (part, text), layers in alike.items()
    ]


def _placed(reason: LayerReason, device: str, gap_s: float) -> str:
    others = sorted(reason.alternatives, key=lambda each: -each.bits)
    parts = [
        f"{bits_named(each.bits, each.on_host)} {verdict(each, reason, gap_s)}." for each in others
    ]
    if not parts:
        parts = ["No other bitwidth is allowed."]
    place = f"on stage {reason.stage}" if not reason.on_host else f"of stage {reason.stage}"
    opening = f"{bits_named(reason.bits, reason.on_host)} {place} ({device})."
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
            f"It is as sensitive as {part_span(partner.layers, partner.part)}, which has "
            f"{bits_named(partner.bits, partner.on_host)}: "
            "which of the two has more bits makes no difference."
        )
    what = "lose" if partner.quality_s > 0 else "gain"
    return (
        f"Exchanging bits with {part_span(partner.layers, partner.part)} "
        f"({bits_named(partner.bits, partner.on_host)}) would {what} "
        f"quality worth {seconds(abs(partner.quality_s))}."
    )


def _no_room(alternative: Alternative, reason: LayerReason) -> str:
    missed = alternative.effect
    needed = (
        f"needs {size(alternative.extra_bytes)} more, but {size(reason.spare_bytes)} "
        "are left on the stage"
    )
    if missed.short_host_bytes and not missed.short_bytes:
        needed = (
            f"needs {size(alternative.extra_host_bytes)} more of the host, but "
            f"{size(reason.spare_host_bytes)} are left there"
        )
    bring = f"if it fitted, it would {_consequences(missed.latency_s, missed.quality_s)}"
    room = alternative.room
    if room is None:
        return f"{needed} and no change of one other layer makes room ({bring})"
    same = (room.layers, room.part) == (reason.layers, reason.part)
    which = "it" if same else part_span(room.layers, room.part)
    choice = bits_named(room.bits, room.on_host)
    if room.experts is not None:
        choice += f" (experts {bits_named(*room.experts)})"
    how = f"moving {which} to stage {room.to_stage} at {choice}"
    if room.to_stage == reason.stage:
        how = f"{choice} for {which}"
    both = _consequences(room.effect.latency_s, room.effect.quality_s)
    rounds = ""
    if abs(room.effect.decode_round_s) > LEAST_S:
        rounds = f" ({change(room.effect.decode_round_s)} a decode round)"
    return f"{needed} ({bring}); {how} makes room, and both together would {both}{rounds}"


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


@dataclass(frozen=True)
class OtherBits:
    """Another bitwidth for a group, by the layer for which it comes closest.

    `name` is that of the bits, and of the layer if others of the group differ; `quality` is the
    range of the group.
    """

    alternative: Alternative
    name: str
    spare_bytes: float
    quality: str
    verdict: str


@dataclass(frozen=True)
class ReasonGroup:
    """Layers of one stage and bitwidth, and what speaks against every other bitwidth."""

    stage: int
    title: str
    spans: str
    headline: str
    others: Sequence[OtherBits]
    remark: str


def reason_groups(reasons: Sequence[LayerReason], gap_s: float) -> list[ReasonGroup]:
    """All groups; gains up to `gap_s` seconds are within the accuracy of the search."""
    return [
        ReasonGroup(
            stage=group[0].stage,
            title=_title(group),
            spans=layer_runs(layer for reason in group for layer in reason.layers),
            headline=headline(group),
            others=[_other(group, index, gap_s) for index in range(len(group[0].alternatives))],
            remark=exchange(group[0]),
        )
        for group in _groups(reasons)
    ]


def _groups(found: Sequence[LayerReason]) -> list[list[LayerReason]]:
    """Layers of one stage, bitwidth and choices, by stage, experts last, most bits first."""
    groups: dict[tuple[object, ...], list[LayerReason]] = {}
    for reason in found:
        others = tuple((each.bits, each.on_host) for each in reason.alternatives)
        key = (reason.stage, PARTS.index(reason.part), -reason.bits, reason.on_host, others)
        groups.setdefault(key, []).append(reason)
    return [groups[key] for key in sorted(groups)]


def _title(group: list[LayerReason]) -> str:
    first, layers = group[0], plural(sum(len(reason.layers) for reason in group), "layer")
    whole = {
        "layer": layers,
        "rest": f"{layers} without experts",
        "experts": f"experts of {layers}",
    }
    return f"{whole[first.part]} at {bits_named(first.bits, first.on_host)}"


def _other(group: list[LayerReason], index: int, gap_s: float) -> OtherBits:
    reason = min(group, key=lambda each: _rank(each.alternatives[index]))
    alternative = reason.alternatives[index]
    which = f" ({layer_span(reason.layers)})" if _differ(group, index) else ""
    return OtherBits(
        alternative=alternative,
        name=bits_named(alternative.bits, alternative.on_host) + which,
        spare_bytes=reason.spare_bytes,
        quality=_group_quality(group, index),
        verdict=verdict(alternative, reason, gap_s),
    )


def _rank(alternative: Alternative) -> float:
    room = alternative.room
    return (room.effect if room is not None else alternative.effect).objective_s


def _differ(group: list[LayerReason], index: int) -> bool:
    ranks = [_rank(reason.alternatives[index]) for reason in group]
    return max(ranks) - min(ranks) > LEAST_S


def _group_quality(group: list[LayerReason], index: int) -> str:
    """One change, or from the least to the greatest of the group."""
    values = [reason.alternatives[index].effect.quality_s for reason in group]
    least, most = min(values), max(values)
    if most - least <= LEAST_S:
        return change(least, LEAST_S)
    return f"{change(least, LEAST_S)} to {change(most, LEAST_S)}"


def changed_plans(
    answers: Sequence[WhatIfAnswer], plan: PlanSpec, least_s: float, tip_s: float
) -> tuple[list[tuple[str, str, WhatIfAnswer, str]], str]:
    """Plans made anew that change enough: the condition, how the plan differs, the answer, the
    change of quality, which is a range where several thetas lead to the same plan; and in words
    what else was tried.

    Differences up to `least_s` are within the accuracy of the search, gains below `tip_s` no tip.
    """
    told = [each for each in answers if _is_told(each, plan, tip_s)]
    rows = [
        (_asked(group, plan.stages), difference(group[0]), group[0], _quality_range(group, least_s))
        for group in _grouped(told, least_s)
    ]
    return rows, _left_out([each for each in answers if each not in told])


def _is_told(answer: WhatIfAnswer, plan: PlanSpec, tip_s: float) -> bool:
    """Whether a plan gains enough; at another theta, whether speed or quality are others."""
    if answer.question.kind != "theta":
        return -answer.objective_change_s >= tip_s
    least_s = LEAST_GAIN * plan.predicted.latency_s
    return max(abs(answer.latency_change_s), abs(answer.quality_change_s)) >= max(least_s, tip_s)


def _left_out(answers: Sequence[WhatIfAnswer]) -> str:
    stages = [str(each.question.stage) for each in answers if each.question.kind == "memory"]
    thetas = [number(each.theta) for each in answers if each.question.kind == "theta"]
    links = [each for each in answers if each.question.kind == "links"]
    parts = [
        f"more memory on stage {listed(stages, 'or')}" if stages else "",
        "faster links" if links else "",
        f"theta {listed(thetas, 'or')}" if thetas else "",
        "the default method" if any(each.question.kind == "same" for each in answers) else "",
    ]
    return "; ".join(part for part in parts if part)


def _grouped(answers: Sequence[WhatIfAnswer], least_s: float) -> list[list[WhatIfAnswer]]:
    """Thetas that lead to the same plan together, ascending; all else by itself."""
    groups: dict[object, list[WhatIfAnswer]] = {}
    for answer in answers:
        key: object = answer.question
        if answer.question.kind == "theta":
            changes = (answer.latency_change_s, answer.sensitivity)
            key = (difference(answer), answer.sizes, *changes)
            if abs(answer.objective_change_s) <= least_s and answer.latency_change_s == 0:
                key = (difference(answer), answer.sizes)
        groups.setdefault(key, []).append(answer)
    return [sorted(group, key=lambda each: each.theta) for group in groups.values()]


def _asked(group: Sequence[WhatIfAnswer], stages: Sequence[StagePlan]) -> str:
    if len(group) > 1:
        return f"theta {listed([number(each.theta) for each in group], 'or')}"
    return question(group[0].question, stages)


def _quality_range(group: Sequence[WhatIfAnswer], least_s: float) -> str:
    """One change, or those at the least and the greatest theta."""
    ends = [change(answer.quality_change_s, least_s) for answer in (group[0], group[-1])]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
