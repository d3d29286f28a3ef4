"""The head of the page: the plan in words, and the pipeline as a row of devices and links."""

from __future__ import annotations

from llmpq.report.figures import layer_span, number, percent, plural, rate, seconds, size
from llmpq.report.markup import Html, section, tag
from llmpq.report.reasons import bottlenecks, lever, summary
from planner.explanation.explain import Explanation
from planner.plan.spec import PlanSpec, StagePlan


def overview(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """Title, plain sentences and the figures that people ask for first."""
    texts = [summary(plan), bottlenecks(plan)]
    if explanation is not None:
        texts.append(lever(plan, explanation, least_change_s(plan)))
    facts = (
        ("batch", seconds(plan.predicted.latency_s)),
        ("new tokens per second", number(plan.predicted.tokens_per_s)),
        (
            "micro-batches",
            f"{plan.micro_batches.prefill} prefill, {plan.micro_batches.decode} decode",
        ),
        ("proven gap", f"{plan.solver.gap * 100:.3f} %"),
        ("sensitivity", number(plan.solver.sensitivity)),
    )
    tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in facts)
    return tag(
        "header",
        tag("p", "Plan of llmpq", class_="kicker"),
        tag("h1", f"{plan.model.name} on {plan.cluster}"),
        tag("p", " ".join(text for text in texts if text), class_="lead"),
        tag("dl", *tiles, class_="tiles"),
    )


def least_change_s(plan: PlanSpec) -> float:
    """Seconds that the search may be off by itself: smaller differences mean nothing."""
    return max(plan.solver.gap, 1e-4) * plan.solver.objective


def pipeline(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """The stages in order, with the links between them and the way back."""
    cells: list[Html] = []
    for stage in plan.stages:
        cells.append(_card(stage, plan))
        if stage is not plan.stages[-1]:
            cells.append(_link(stage, plan, explanation))
    notes = []
    if plan.unused_devices:
        notes.append(tag("p", f"Not used: {', '.join(plan.unused_devices)}."))
    if len(plan.stages) > 1:
        notes.append(tag("p", _way_back(plan, explanation), class_="note"))
    return section("pipeline", "Pipeline", tag("ol", *cells, class_="pipeline"), *notes)


def _card(stage: StagePlan, plan: PlanSpec) -> Html:
    lines = [
        tag("strong", f"Stage {stage.index}"),
        tag("span", stage.device, class_="device"),
        tag("span", f"{stage.accelerator} on node {stage.node}"),
        tag("span", f"{plural(len(stage.layers), 'layer')}: {_span(stage)}"),
        tag("span", f"{size(stage.memory_bytes)} of {size(stage.memory_limit_bytes)}"),
        tag("span", f"busy {percent(plan.predicted.busy_share[stage.index])}"),
    ]
    if stage.emulated:
        lines.append(tag("span", "emulated on CPU"))
    return tag("li", *lines, class_="card")


def _span(stage: StagePlan) -> str:
    if not stage.layers:
        return "none"
    return layer_span(stage.layers).partition(" ")[2]


def _link(stage: StagePlan, plan: PlanSpec, explanation: Explanation | None) -> Html:
    """An arrow to the next stage."""
    return tag(
        "li",
        tag("span", "→", class_="arrow", aria_hidden="true"),
        tag("span", f"to stage {stage.index + 1}", class_="device"),
        *(tag("span", word) for word in _link_words(stage, plan, explanation)),
        class_="link",
    )


def _link_words(stage: StagePlan, plan: PlanSpec, explanation: Explanation | None) -> list[str]:
    """Its rate, where the cluster is known, and its seconds in both phases."""
    words = [f"prefill {seconds(stage.prefill_comm_s)}", f"decode {seconds(stage.decode_comm_s)}"]
    if explanation is not None:
        following = plan.stages[(stage.index + 1) % len(plan.stages)]
        words.insert(0, _rate(explanation, stage.device, following.device))
    return words


def _rate(explanation: Explanation, sender: str, receiver: str) -> str:
    cluster = explanation.costs.cluster
    devices = {device.name: device for device in cluster.devices}
    return rate(cluster.link_bytes_per_s(devices[sender], devices[receiver]))


def _way_back(plan: PlanSpec, explanation: Explanation | None) -> str:
    what = "hidden states, since the head is there," if plan.head_on_first else "token ids"
    words = ", ".join(_link_words(plan.stages[-1], plan, explanation))
    return (
        "Times at the links are of one full micro-batch, and pass while the stages compute. From "
        f"the last stage {what} go back to the first ({words})."
    )
