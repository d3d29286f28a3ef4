"""The page of a plan, and that of what does not fit: files with their style inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from llmpq.report.answers import menu
from llmpq.report.bound_charts import bounds_svg, winners
from llmpq.report.formatting import plural, rate, seconds
from llmpq.report.kernels import kernel_reasons
from llmpq.report.plan_charts import (
    curve_of,
    curve_svg,
    cycle_pictures,
    front_of,
    front_svg,
    schedule_pictures,
)
from llmpq.report.plan_facts import bottlenecks, facts_of
from llmpq.report.reasons import (
    binding,
    changed_plans,
    layer_sentence,
    layer_sentences,
    lever,
    question,
    reason_groups,
    worth_telling_s,
)
from llmpq.report.rendering import Making, making, render, write_page
from planner.cluster.device import Device
from planner.cluster.groups import grouped_cluster
from planner.costs.stored_bytes import kv_cache_bytes_per_layer, model_weight_bytes
from planner.explanation.explain import Explanation
from planner.latency_bound.bounded_plan import KindFronts
from planner.options import kv_bits_of
from planner.plan.spec import PlanSpec
from planner.scheduling import PHASES, Phase
from planner.search.find import FrontPoint
from planner.search.request import PlanningRequest
from quant.common.errors import BoundNotMetError, InfeasibleError, LlmpqError


def report_page(
    plan: PlanSpec,
    reasons: Explanation | LlmpqError | None = None,
    front: Sequence[FrontPoint] | KindFronts = (),
    made: Making | None = None,
) -> str:
    """The plan as an HTML document.

    Without an explanation the reasons and the schedule are missing, and the page says so, with the
    error that says why. `front`: as `planner.search.find.trace_front` finds it, or of a plan under
    a bound on latency throughput over bounds; by default the plans for other thetas of the
    explanation. `made`: how the page is made, by default now and by the command that the plan's
    origin tells.
    """
    facts, made = facts_of(plan), made or making(plan)
    if plan.latency is not None:
        fronts = front if isinstance(front, KindFronts) else None
        return render(
            "bounded.html.j2",
            plan=plan,
            facts=facts,
            making=made,
            menu=menu(plan),
            curve=None,
            front=None,
            parts=_parts(plan),
            pictures=cycle_pictures(plan),
            fronts=fronts,
            fronts_svg=fronts and bounds_svg(fronts, plan.latency),
            winners=fronts and winners(fronts),
        )
    explanation = reasons if isinstance(reasons, Explanation) else None
    found = front_of(plan, explanation, () if isinstance(front, KindFronts) else front)
    curve, many = curve_of(plan), found is not None and len(found.points) > 1
    return render(
        "plan.html.j2",
        plan=plan,
        facts=facts,
        making=made,
        summary=bottlenecks(plan),
        menu=menu(plan),
        curve=curve,
        curve_svg=curve and curve_svg(curve),
        link_lines=_link_lines(plan, explanation),
        baselines=sorted(plan.baselines, key=lambda each: each.latency_s or math.inf),
        explained=_explained(plan, explanation) if explanation else None,
        not_explained=str(reasons) if isinstance(reasons, LlmpqError) else "",
        front=found,
        front_svg=front_svg(found.points, facts.whole, found.present) if found and many else None,
    )


def _parts(plan: PlanSpec) -> list[tuple[PlanSpec, str, tuple[Phase, ...], list[list[str]]]]:
    """The pipelines of a plan, one, or one that prefills and one that decodes: what they do, their
    phases, and the seconds of each stage's link to the next one.
    """
    parts: list[tuple[PlanSpec, str, tuple[Phase, ...]]] = [
        (plan, "All stages prefill and decode", PHASES)
    ]
    if plan.prefill_plan is not None:
        parts = [
            (plan.prefill_plan, "Stages that prefill", ("prefill",)),
            (plan, "Stages that decode", ("decode",)),
        ]
    return [(part, title, phases, _links(part, phases)) for part, title, phases in parts]


def _links(plan: PlanSpec, phases: Sequence[Phase] = PHASES) -> list[list[str]]:
    comm = [{"prefill": each.prefill_comm_s, "decode": each.decode_comm_s} for each in plan.stages]
    return [[f"{phase} {seconds(each[phase])}" for phase in phases] for each in comm]


def _link_lines(plan: PlanSpec, explanation: Explanation | None) -> list[list[str]]:
    """Seconds of each stage's link to the next one, and its rate where the cluster is known."""
    lines = _links(plan)
    if explanation is not None:
        cluster = explanation.costs.cluster
        path = grouped_cluster(cluster, [stage.device_names for stage in plan.stages]).devices
        for sender, receiver, line in zip(path, [*path[1:], path[0]], lines, strict=True):
            line.insert(0, rate(cluster.link_bytes_per_s(sender, receiver)))
    return lines


def _explained(plan: PlanSpec, explanation: Explanation) -> dict[str, object]:
    """The part of the page that needs an explanation; `least_s`: accuracy of the search."""
    least_s = max(plan.solver.gap, 1e-4) * plan.solver.objective
    devices = [stage.label for stage in plan.stages]
    titles: dict[int, list[str]] = {}
    for reason in explanation.layers:
        for layer in reason.layers:
            sentence = layer_sentence(reason, devices[reason.stage], least_s)
            titles.setdefault(layer, []).append(sentence)
    answers = explanation.answers
    changed, unchanged = changed_plans(answers.given, plan, least_s, worth_telling_s(plan, least_s))
    return {
        "least_s": least_s,
        "lever": lever(plan, explanation, least_s),
        "layer_titles": {layer: " ".join(sentences) for layer, sentences in titles.items()},
        "reason_groups": reason_groups(explanation.layers, least_s),
        "layer_sentences": [
            layer_sentences(
                [each for each in explanation.layers if each.stage == stage.index], devices, least_s
            )
            for stage in plan.stages
        ],
        "kernels": kernel_reasons(plan, explanation.costs),
        "pictures": schedule_pictures(explanation.simulated, devices, plan.job is not None),
        "limits": [(each, binding(each)) for each in explanation.stages],
        "changed": changed,
        "unchanged": unchanged,
        "not_asked": [question(each, plan.stages) for each in answers.left_out],
    }


def write_refusal(
    path: str | Path,
    request: PlanningRequest,
    error: InfeasibleError,
    command: Sequence[str] = (),
    what: str | None = None,
) -> None:
    """Write the page of what does not fit, whole or not at all: what was asked for (in words
    `what`, or the request's prompts), what it needs, and what the error says.

    Raises InputError where it cannot be written.
    """
    w, job = request.workload, request.job
    prompts = w.global_batch if job is None else job.prompts
    lengths = f"{plural(prompts, 'prompt')} of up to {w.prompt_length:,} tokens, {w.new_tokens} new"
    remedies = error.remedies
    if not remedies and isinstance(error, BoundNotMetError):
        remedies = (f"--{error.option} {error.reachable:g}",)  # the bound that was found feasible
    in_flight = "all in flight" if job is None else f"{w.global_batch:,} in flight at the least"
    page = render(
        "refusal.html.j2",
        model=request.shape.name,
        cluster=request.cluster.name,
        what=what or f"{lengths}, {in_flight}",
        problem=error.problem,
        remedies=remedies,
        memory_is_short=not isinstance(
            error, BoundNotMetError
        ),  # else plans fit, but none keeps the bound
        needs=_needs(request),
        offers=_offers(request),
        making=making(None, command),
    )
    write_page(Path(path), page)


def _needs(request: PlanningRequest) -> list[tuple[int, int, int]]:
    """Each bitwidth with the bytes of all layers and of their keys and values on device 0."""
    shape, device = request.shape, request.cluster.devices[0]
    dtype = device.compute_dtype(request.options.dtype)
    kv_bits = kv_bits_of(request.options)
    cache = shape.over_layers(
        lambda kind: kv_cache_bytes_per_layer(kind, request.workload, kv_bits, dtype)
    )
    return [
        (bits, model_weight_bytes(shape, bits, device, dtype), cache)
        for bits in sorted(request.options.bits, reverse=True)
    ]


def _offers(request: PlanningRequest) -> list[tuple[str, int, int]]:
    """Kinds of devices, how many there are, and the bytes of each that a plan may fill."""
    kinds: dict[tuple[str, str, int], list[Device]] = {}
    for device in request.cluster.devices:
        key = (device.node, device.accelerator.name, device.memory_bytes)
        kinds.setdefault(key, []).append(device)
    return [
        (
            f"{accelerator} on {node}",
            len(devices),
            round(memory * (1 - request.options.memory_margin)) - devices[0].runtime_bytes,
        )
        for (node, accelerator, memory), devices in kinds.items()
    ]
