"""Layers by bits by devices, and why each layer has its bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmpq.report.elements import Cell, Legend, Table
from llmpq.report.formatting import change, layer_span, plural, size, size_change
from llmpq.report.sections.overview import least_change_s
from llmpq.report.sentences import (
    LEAST_S,
    exchange,
    headline,
    layer_sentence,
    layer_sentences,
    verdict,
)
from planner.explanation.explain import Alternative, Explanation, LayerReason
from planner.plan.plan import Plan, StagePlan


@dataclass(frozen=True)
class LayerBox:
    """One layer; `title` gives its reasons, where they are known."""

    layer: int
    bits: int
    title: str


@dataclass(frozen=True)
class StageLayers:
    """The layers of a stage, and how many of them have which bits."""

    index: int
    device: str
    counts: str
    boxes: Sequence[LayerBox]


@dataclass(frozen=True)
class Layers:
    """Layers of all stages, and the colours of their bits."""

    legend: Legend
    stages: Sequence[StageLayers]


def layers(plan: Plan, explanation: Explanation | None) -> Layers:
    """A strip of boxes per stage, one box a layer."""
    used = sorted({bits for stage in plan.stages for bits in stage.bitwidths})
    found = explanation.layers if explanation is not None else ()
    by_layer = {layer: reason for reason in found for layer in reason.layers}
    gap_s = least_change_s(plan)
    return Layers(
        [(f"bits{bits}", f"{bits} bit") for bits in used],
        [_stage_layers(stage, by_layer, gap_s) for stage in plan.stages],
    )


def _stage_layers(stage: StagePlan, reason_of: dict[int, LayerReason], gap_s: float) -> StageLayers:
    boxes = []
    for layer, bits in zip(stage.layers, stage.bitwidths, strict=True):
        title = f"Layer {layer}: {bits} bit on stage {stage.index} ({stage.device})."
        if layer in reason_of:
            title = layer_sentence(reason_of[layer], stage.device, gap_s)
        boxes.append(LayerBox(layer, bits, title))
    counts = ", ".join(
        f"{stage.bitwidths.count(bits)} at {bits} bit"
        for bits in sorted(set(stage.bitwidths), reverse=True)
    )
    named = f"{plural(len(stage.layers), 'layer')}: {counts}"
    return StageLayers(stage.index, stage.device, named, boxes)


@dataclass(frozen=True)
class ReasonGroup:
    """Reasons of layers of one stage and bitwidth; no table where no other bits are allowed."""

    title: str
    headline: str
    table: Table | None
    remark: str


@dataclass(frozen=True)
class Reasons:
    """Groups of layers with the other bitwidths, and every layer in a sentence."""

    groups: Sequence[ReasonGroup]
    sentences: Sequence[str]


def reasons(plan: Plan, explanation: Explanation) -> Reasons:
    """For the layers of each stage and bitwidth: every other bitwidth and what it would bring."""
    gap_s = least_change_s(plan)
    devices = [stage.device for stage in plan.stages]
    return Reasons(
        [_reason_group(plan, group, gap_s) for group in _groups(explanation.layers)],
        layer_sentences(explanation.layers, devices, gap_s),
    )


def _groups(found: Sequence[LayerReason]) -> Iterator[list[LayerReason]]:
    """Layers of the same stage and bitwidth, in order of stages, most bits first."""
    groups: dict[tuple[int, int], list[LayerReason]] = {}
    for reason in found:
        groups.setdefault((reason.stage, -reason.bits), []).append(reason)
    for key in sorted(groups):
        yield groups[key]


def _reason_group(plan: Plan, group: list[LayerReason], gap_s: float) -> ReasonGroup:
    """One group's table; each row shows the layer for which that bitwidth comes closest."""
    first, stage = group[0], plan.stages[group[0].stage]
    count = sum(len(reason.layers) for reason in group)
    title = f"Stage {stage.index}: {plural(count, 'layer')} at {first.bits} bit"
    rows = [_row(group, index, gap_s) for index in range(len(first.alternatives))]
    heads = ["instead", "memory", "left", "batch", "decode round", "quality", "verdict"]
    table = Table(f"{stage.device}: {_spans(group)}", heads, rows, words=(0, 6)) if rows else None
    return ReasonGroup(title, headline(group), table, exchange(first))


def _row(group: list[LayerReason], index: int, gap_s: float) -> list[Cell | str]:
    reason = min(group, key=lambda each: _rank(each.alternatives[index]))
    alternative = reason.alternatives[index]
    effect = alternative.effect
    which = f" ({layer_span(reason.layers)})" if _differ(group, index) else ""
    return [
        Cell(f"{alternative.bits} bit{which}", "strong"),
        size_change(alternative.extra_bytes),
        size(reason.spare_bytes),
        change(effect.latency_s, LEAST_S),
        change(effect.decode_round_s, LEAST_S),
        _quality(group, index),
        Cell(verdict(alternative, reason, gap_s), "verdict"),
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
    """Runs of layers, for instance "layers 0–10, 17"."""
    runs: list[list[int]] = []
    for layer in (layer for reason in group for layer in reason.layers):
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return "layers " + ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)
