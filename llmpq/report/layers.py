"""Layers by bits by devices, and why each layer has its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmpq.report.figures import change, layer_span, plural, size, size_change
from llmpq.report.markup import Html, folded, legend, section, table, tag
from llmpq.report.overview import least_change_s
from llmpq.report.reasons import (
    LEAST_S,
    exchange,
    headline,
    layer_sentence,
    layer_sentences,
    verdict,
)
from planner.explanation.explain import Alternative, Explanation, LayerReason
from planner.plan.spec import PlanSpec, StagePlan

NOT_KNOWN = (
    "The reasons need the cluster, which a plan file does not hold: make the report with "
    "llmpq-algo --report, together with the plan."
)


def layers(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """A strip of boxes per stage, one box a layer."""
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    reasons = _by_layer(explanation)
    gap_s = least_change_s(plan)
    rows = [_strip(stage, reasons, gap_s) for stage in plan.stages]
    hint = "Point at a layer for its reasons." if explanation is not None else ""
    return section(
        "layers",
        "Layers and bits",
        tag("p", f"One box is one layer, with its number below its bits. {hint}", class_="note"),
        legend((f"bits{bits}", f"{bits} bit") for bits in used),
        *rows,
    )


def why(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """For the layers of each stage and bitwidth: every other bitwidth and what it would bring."""
    if explanation is None:
        return section("why", "Why these bits", tag("p", NOT_KNOWN))
    gap_s = least_change_s(plan)
    blocks = [_block(plan, group, gap_s) for group in _groups(explanation.layers)]
    devices = [stage.device for stage in plan.stages]
    sentences = layer_sentences(explanation.layers, devices, gap_s)
    text = (
        "The tables say what changing one layer of a group would bring, all else equal. Negative "
        "is better. Quality counts in seconds: theta, which is "
        f"{plan.solver.theta:g} s, for every unit of summed sensitivity. Seconds are those of the "
        "closed form that plans are ranked by, not simulated."
    )
    return section(
        "why",
        "Why these bits",
        tag("p", text, class_="note"),
        *blocks,
        folded(
            "Every layer in a sentence",
            tag("ul", *(tag("li", text) for text in sentences), class_="sentences"),
        ),
    )


def _by_layer(explanation: Explanation | None) -> dict[int, LayerReason]:
    found = explanation.layers if explanation is not None else ()
    return {layer: reason for reason in found for layer in reason.layers}


def _strip(stage: StagePlan, reasons: dict[int, LayerReason], gap_s: float) -> Html:
    boxes = []
    for layer, bits in zip(stage.layers, stage.bitwidths, strict=True):
        title = f"Layer {layer}: {bits} bit on stage {stage.index} ({stage.device})."
        if layer in reasons:
            title = layer_sentence(reasons[layer], stage.device, gap_s)
        box = [tag("b", str(bits)), tag("small", str(layer))]
        name = f"layer {layer}: {bits} bit"
        boxes.append(tag("li", *box, class_=f"box bits{bits}", title=title, aria_label=name))
    heading = tag("h3", f"Stage {stage.index} ", tag("span", stage.device, class_="device"))
    counts = ", ".join(
        f"{stage.bitwidths.count(bits)} at {bits} bit"
        for bits in sorted(set(stage.bitwidths), reverse=True)
    )
    text = tag("p", f"{plural(len(stage.layers), 'layer')}: {counts}", class_="note")
    return tag("div", heading, text, tag("ol", *boxes, class_="strip"), class_="stage")


def _groups(reasons: Sequence[LayerReason]) -> Iterator[list[LayerReason]]:
    """Layers of the same stage and bitwidth, in order of stages, most bits first."""
    found: dict[tuple[int, int], list[LayerReason]] = {}
    for reason in reasons:
        found.setdefault((reason.stage, -reason.bits), []).append(reason)
    for key in sorted(found):
        yield found[key]


def _block(plan: PlanSpec, group: list[LayerReason], gap_s: float) -> Html:
    """One group's table; each row shows the layer for which that bitwidth comes closest."""
    first, stage = group[0], plan.stages[group[0].stage]
    count = sum(len(reason.layers) for reason in group)
    title = f"Stage {stage.index}: {plural(count, 'layer')} at {first.bits} bit"
    rows = [_row(group, index, gap_s) for index in range(len(first.alternatives))]
    heads = ["instead", "memory", "left", "batch", "decode round", "quality", "verdict"]
    caption = f"{stage.device}: {_spans(group)}"
    partners = {exchange(reason) for reason in group[:1]}
    remarks = [tag("p", text, class_="note") for text in sorted(partners) if text]
    body = (
        table(caption, heads, rows, words=(0, 6))
        if rows
        else tag("p", "No other bitwidth is allowed.")
    )
    lead = tag("p", headline(group), class_="headline")
    return tag("div", tag("h3", title), lead, body, *remarks, class_="group")


def _row(group: list[LayerReason], index: int, gap_s: float) -> list[Html | str]:
    reason = min(group, key=lambda each: _rank(each.alternatives[index]))
    alternative = reason.alternatives[index]
    effect = alternative.effect
    which = f" ({layer_span(reason.layers)})" if _differ(group, index) else ""
    return [
        tag("strong", f"{alternative.bits} bit{which}"),
        size_change(alternative.extra_bytes),
        size(reason.spare_bytes),
        change(effect.latency_s, LEAST_S),
        change(effect.decode_round_s, LEAST_S),
        _quality(group, index),
        tag("span", verdict(alternative, reason, gap_s), class_="verdict"),
    ]


def _rank(alternative: Alternative) -> float:
    room = alternative.room
    return (room.effect if room is not None else alternative.effect).objective_s


def _differ(group: list[LayerReason], index: int) -> bool:
    ranks = [_rank(reason.alternatives[index]) for reason in group]
    return max(ranks) - min(ranks) > LEAST_S


def _quality(group: list[LayerReason], index: int) -> str:
    """One change, or from the least to the greatest of the group."""
    values = [reason.alternatives[index].effect.quality_s for reason in group]
    least, most = min(values), max(values)
    if most - least <= LEAST_S:
        return change(least, LEAST_S)
    return f"{change(least, LEAST_S)} to {change(most, LEAST_S)}"


def _spans(group: list[LayerReason]) -> str:
    """Runs of layers, for instance "0-10, 17"."""
    runs: list[list[int]] = []
    for layer in (layer for reason in group for layer in reason.layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)
