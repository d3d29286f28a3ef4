"""Where every number of the page comes from."""

from __future__ import annotations

from collections.abc import Iterator

from llmpq.report.figures import number, plural, seconds, size
from llmpq.report.markup import Content, Html, section, table, tag
from planner.plan.spec import PlanSpec

ESTIMATED = "estimated"


def provenance(plan: PlanSpec) -> Html:
    """Sources, one a row; what is estimated and not measured is marked so."""
    rows = [[name, text] for name, text in _sources(plan)]
    per_stage = [
        [
            f"{stage.index}: {stage.device}",
            stage.dtype,
            ", ".join(f"{bits} bit: {name}" for bits, name in sorted(stage.backends.items())),
            size(stage.memory_limit_bytes),
        ]
        for stage in plan.stages
    ]
    heads = ["stage", "compute type", "kernels", "memory limit"]
    return section(
        "provenance",
        "Where the numbers come from",
        table("Sources", ["what", "from"], rows, words=(0, 1)),
        table("What each stage computes with", heads, per_stage, words=(0, 1, 2)),
    )


def _sources(plan: PlanSpec) -> Iterator[tuple[str, Content]]:
    yield "model", f"{plan.model.source}: {plan.model.model_type}, shape {plan.model.fingerprint}"
    yield "cluster", f"{plan.cluster}, fingerprint {plan.cluster_fingerprint}"
    for source in sorted({stage.provenance for stage in plan.stages}):
        yield "seconds of layers", _marked(source)
    yield "seconds of links", "rates and latencies of the cluster file or the device registry"
    yield (
        "memory",
        "the kernels' own byte rules for weights and scales; KV cache of the whole batch at "
        f"{plan.kv_bits} bit; limits from the cluster file or the device registry, "
        f"{_kept_free(plan)} left free",
    )
    yield "sensitivity", plan.sensitivity_source
    yield (
        "batch, prefill, decode, busy",
        "simulation of the runtime's schedule with these seconds; by the closed form "
        f"that plans are ranked by, the batch takes {seconds(plan.predicted.objective_latency_s)}",
    )
    yield (
        "what changes save or cost",
        f"the closed form of the objective {plan.solver.objective_kind}, not simulated",
    )
    yield "solver", _solver(plan)


def _kept_free(plan: PlanSpec) -> str:
    """The margin of the stages' devices."""
    margins = sorted({stage.memory_margin_bytes for stage in plan.stages})
    return " or ".join(map(size, margins))


def _marked(source: str) -> Content:
    if ESTIMATED not in source:
        return source
    return tag("span", tag("span", ESTIMATED, class_="pill"), " ", source)


def _solver(plan: PlanSpec) -> str:
    s = plan.solver
    head = "first" if plan.head_on_first else "last"
    return (
        f"method {s.method} ({s.solver}), {s.status}, objective {s.objective_kind} at theta "
        f"{number(s.theta)}, proven gap {s.gap * 100:.3f} %, {s.seconds:.2f} s for "
        f"{plural(s.candidates, 'candidate')} ({s.solved} solved); LM head on the {head} stage"
    )
