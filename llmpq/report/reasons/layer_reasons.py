"""Why layers have their bits: groups of alike layers, with every other bitwidth they could have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmpq.report.formatting import change, layer_span
from llmpq.report.sentences import LEAST_S, exchange, headline, verdict
from planner.explanation.explain import Alternative, LayerReason


@dataclass(frozen=True)
class OtherBits:
    """Another bitwidth for a group, by the layer for which it comes closest.

    `which` names that layer if others of the group differ; `quality` is the range of the group.
    """

    alternative: Alternative
    which: str
    spare_bytes: float
    quality: str
    verdict: str


@dataclass(frozen=True)
class ReasonGroup:
    """Layers of one stage and bitwidth, and what speaks against every other bitwidth."""

    stage: int
    bits: int
    layers: int
    spans: str
    headline: str
    others: Sequence[OtherBits]
    remark: str


def reason_groups(reasons: Sequence[LayerReason], gap_s: float) -> list[ReasonGroup]:
    """All groups; gains up to `gap_s` seconds are within the accuracy of the search."""
    return [
        ReasonGroup(
            stage=group[0].stage,
            bits=group[0].bits,
            layers=sum(len(reason.layers) for reason in group),
            spans=_spans(group),
            headline=headline(group),
            others=[_other(group, index, gap_s) for index in range(len(group[0].alternatives))],
            remark=exchange(group[0]),
        )
        for group in _groups(reasons)
    ]


def _groups(found: Sequence[LayerReason]) -> Iterator[list[LayerReason]]:
    """Layers of the same stage and bitwidth, in order of stages, most bits first."""
    groups: dict[tuple[int, int], list[LayerReason]] = {}
    for reason in found:
        groups.setdefault((reason.stage, -reason.bits), []).append(reason)
    for key in sorted(groups):
        yield groups[key]


def _other(group: list[LayerReason], index: int, gap_s: float) -> OtherBits:
    reason = min(group, key=lambda each: _rank(each.alternatives[index]))
    alternative = reason.alternatives[index]
    return OtherBits(
        alternative=alternative,
        which=f" ({layer_span(reason.layers)})" if _differ(group, index) else "",
        spare_bytes=reason.spare_bytes,
        quality=_quality(group, index),
        verdict=verdict(alternative, reason, gap_s),
    )


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
