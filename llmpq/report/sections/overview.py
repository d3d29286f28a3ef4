"""The head of the page: the plan in words, and the pipeline as a row of devices and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import layer_span, number, percent, plural, rate, seconds, size
from llmpq.report.sentences import bottlenecks, lever, summary
from planner.explanation.explain import Explanation
from planner.plan.plan import Plan, StagePlan


@dataclass(frozen=True)
class Overview:
    """Plain sentences, and the figures that people ask for first under their names."""

    sentences: str
    facts: Sequence[tuple[str, str]]


def overview(plan: Plan, explanation: Explanation | None) -> Overview:
    """The plan at a glance."""
    texts = [summary(plan), bottlenecks(plan)]
    if explanation is not None:
        texts.append(lever(plan, explanation, least_change_s(plan)))
    sizes = plan.micro_batches
    facts = (
        ("batch", seconds(plan.predicted.latency_s)),
        ("new tokens per second", number(plan.predicted.tokens_per_s)),
        ("micro-batches", f"{sizes.prefill} prefill, {sizes.decode} decode"),
        ("proven gap", f"{plan.solver.gap * 100:.3f} %"),
        ("sensitivity", number(plan.solver.sensitivity)),
    )
    return Overview(" ".join(text for text in texts if text), facts)


def least_change_s(plan: Plan) -> float:
    """Seconds that the search may be off by itself: smaller differences mean nothing."""
    return max(plan.solver.gap, 1e-4) * plan.solver.objective


@dataclass(frozen=True)
class StageCard:
    """A stage of the pipeline: lines about it and, about the link to the next stage, `link`."""

    index: int
    device: str
    lines: Sequence[str]
    link: Sequence[str]


def pipeline(plan: Plan, explanation: Explanation | None) -> Sequence[StageCard]:
    """The stages in order; the link of the last one leads back to the first."""
    return [
        StageCard(
            stage.index,
            stage.device,
            _stage_lines(stage, plan.predicted.busy_share[stage.index]),
            _link_lines(stage, plan, explanation),
        )
        for stage in plan.stages
    ]


def _stage_lines(stage: StagePlan, busy_share: float) -> list[str]:
    layers = layer_span(stage.layers).partition(" ")[2] if stage.layers else "none"
    return [
        f"{stage.accelerator} on node {stage.node}",
        f"{plural(len(stage.layers), 'layer')}: {layers}",
        f"{size(stage.memory_bytes)} of {size(stage.memory_limit_bytes)}",
        f"busy {percent(busy_share)}",
        *(["emulated on CPU"] if stage.emulated else []),
    ]


def _link_lines(stage: StagePlan, plan: Plan, explanation: Explanation | None) -> list[str]:
    """Its rate, where the cluster is known, and its seconds in both phases."""
    lines = [f"prefill {seconds(stage.prefill_comm_s)}", f"decode {seconds(stage.decode_comm_s)}"]
    if explanation is not None:
        following = plan.stages[(stage.index + 1) % len(plan.stages)]
        cluster = explanation.costs.cluster
        devices = {device.name: device for device in cluster.devices}
        ends = devices[stage.device], devices[following.device]
        lines.insert(0, rate(cluster.link_bytes_per_s(*ends)))
    return lines
