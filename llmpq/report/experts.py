"""Words for where a plan has the experts of its layers, and at which bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from llmpq.report.formatting import listed, plural, size
from planner.plan.spec import PlanSpec, StagePlan


def expert_remarks(plan: PlanSpec) -> Iterator[str]:
    apart = [
        choice.expert_bits
        for stage in plan.stages
        if stage.expert_bitwidths
        for choice in stage.choices
        if choice.expert_bits != choice.bits
    ]
    if apart:
        counts = Counter(apart)
        each = [f"{counts[bits]} at {bits} bit" for bits in sorted(counts, reverse=True)]
        yield f"experts of other bits than the rest of their layers: {listed(each)}"
    yield from (_hosted(stage) for stage in plan.stages if stage.hosted_experts)


def _hosted(stage: StagePlan) -> str:
    layers = plural(len(stage.hosted_experts), "layer")
    threads = plural(stage.threads, "thread")
    text = f"experts of {layers} of stage {stage.index} in host memory ({size(stage.host_bytes)})"
    if stage.streams_from == 1:
        return f"{text}, sent to the device when they are asked"
    text += f", computed there by {threads}"
    if stage.streams_from is not None:
        text += f"; for {stage.streams_from:,} tokens at once and more sent to the device"
    return text
