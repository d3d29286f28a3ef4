"""What fills each stage: memory against its limit, seconds in both phases, the schedule."""

from __future__ import annotations

from llmpq.report.figures import percent, plural, seconds, shortened, size
from llmpq.report.markup import Html, folded, legend, section, table, tag
from planner.costs.memory import StageMemory
from planner.explanation.explain import Explanation
from planner.plan.spec import PlanSpec, StagePlan
from planner.simulation.simulation import Simulated
from planner.simulation.trace import GanttOptions, gantt_svg

PARTS = (
    ("weights", "weights"),
    ("kv_cache", "KV cache"),
    ("embedding", "embedding"),
    ("final", "final norm and head"),
    ("temporary", "temporary"),
    ("runtime", "runtime and allocator"),
)
GANTT_WIDTH = 800  # pixels of the drawing; with its labels as wide as the page's text
LABEL_LENGTH = 24
ROUNDS_SHOWN = 4  # decode rounds after the first tokens, in the second picture


def memory(plan: PlanSpec) -> Html:
    """A bar per stage; all bars share one scale, and each track ends at the stage's limit."""
    most = max(max(s.memory_limit_bytes, s.memory_bytes) for s in plan.stages)
    bars = [_memory_bar(stage, most) for stage in plan.stages]
    heads = ["stage", *(name for _, name in PARTS), "sum", "limit", "left"]
    rows = [
        [
            f"{stage.index}: {stage.device}",
            *(size(_part(stage.memory, key)) for key, _ in PARTS),
            size(stage.memory_bytes),
            size(stage.memory_limit_bytes),
            size(stage.memory_limit_bytes - stage.memory_bytes),
        ]
        for stage in plan.stages
    ]
    used = [(f"part-{k}", n) for k, n in PARTS if any(_part(s.memory, k) for s in plan.stages)]
    return section(
        "memory",
        "Memory",
        tag("p", _memory_note(plan), class_="note"),
        legend([*used, ("part-free", "left")]),
        *bars,
        folded("The figures", table("Memory of each stage and what fills it", heads, rows)),
    )


def _memory_note(plan: PlanSpec) -> str:
    w = plan.workload
    return (
        f"The KV cache holds all {plural(w.global_batch, 'prompt')} at their full length of "
        f"{plural(w.total_length, 'token')}; temporary is the peak of the activations of a full "
        "micro-batch. A track ends where the memory of the device does."
    )


def _part(each: StageMemory, key: str) -> int:
    return int(getattr(each, key))


def _memory_bar(stage: StagePlan, most: int) -> Html:
    limit, used = stage.memory_limit_bytes, stage.memory_bytes
    pieces = [
        tag(
            "span",
            class_=f"piece part-{key}",
            style=f"width:{100 * amount / max(limit, used):.3f}%",
            title=f"{name}: {size(amount)}, {percent(amount / limit)} of the limit",
        )
        for key, name in PARTS
        if (amount := _part(stage.memory, key))
    ]
    words = f"{size(used)} of {size(limit)}, {size(limit - used)} left"
    track = tag(
        "div",
        *pieces,
        class_="track",
        style=f"width:{100 * max(limit, used) / most:.3f}%",
        role="img",
        aria_label=f"stage {stage.index}: {words}",
    )
    return _bar(f"Stage {stage.index}", stage.device, words, track)


def _bar(name: str, device: str, words: str, *tracks: Html) -> Html:
    heading = tag(
        "p",
        tag("strong", name),
        " ",
        tag("span", device, class_="device"),
        " ",
        tag("span", words, class_="figure"),
        class_="bar-title",
    )
    return tag("div", heading, *tracks, class_="bar")


def times(plan: PlanSpec) -> Html:
    """Seconds of one full micro-batch on every stage in both phases, and how busy it is."""
    p = plan.predicted
    slowest = {"prefill": p.prefill_bottleneck, "decode": p.decode_bottleneck}
    blocks = []
    for phase, stage_s in (
        ("prefill", [stage.prefill_s for stage in plan.stages]),
        ("decode", [stage.decode_s for stage in plan.stages]),
    ):
        bars = [
            _time_bar(stage, phase, value, max(stage_s), slowest[phase] == stage.index)
            for stage, value in zip(plan.stages, stage_s, strict=True)
        ]
        requests = getattr(plan.micro_batches, phase)
        heading = tag("h3", f"{phase.capitalize()}, micro-batches of {requests}")
        blocks.append(tag("div", heading, *bars, class_="phase"))
    busy = [_busy_bar(stage, p.busy_share[stage.index]) for stage in plan.stages]
    blocks.append(tag("div", tag("h3", "Share of the batch"), *busy, class_="phase"))
    return section(
        "times",
        "Stage times",
        tag("p", _times_note(plan), class_="note"),
        tag("div", *blocks, class_="phases"),
        folded("The figures", _times_table(plan)),
    )


def _times_note(plan: PlanSpec) -> str:
    p = plan.predicted
    idle = 1 - sum(p.busy_share) / len(p.busy_share)
    return (
        f"By the simulation of the schedule, {percent(idle)} of the devices' time are bubbles: "
        "waiting for another stage, for a link, or for the pipeline to fill and to drain."
    )


def _times_table(plan: PlanSpec) -> Html:
    heads = ["stage", "prefill", "transfer", "decode", "transfer", "busy", "bubbles"]
    rows = [
        [
            f"{stage.index}: {stage.device}",
            seconds(stage.prefill_s),
            seconds(stage.prefill_comm_s),
            seconds(stage.decode_s),
            seconds(stage.decode_comm_s),
            percent(plan.predicted.busy_share[stage.index]),
            percent(1 - plan.predicted.busy_share[stage.index]),
        ]
        for stage in plan.stages
    ]
    return table("Seconds of one full micro-batch on each stage", heads, rows)


def _time_bar(stage: StagePlan, phase: str, value: float, most: float, slowest: bool) -> Html:
    words = seconds(value) + (", the bottleneck" if slowest else "")
    width = 100 * value / most if most else 0.0
    piece = tag("span", class_=f"piece time-{phase}", style=f"width:{width:.3f}%")
    marked = "track plain slowest" if slowest else "track plain"
    label = f"stage {stage.index} {phase}: {words}"
    track = tag("div", piece, class_=marked, role="img", aria_label=label)
    return _bar(f"Stage {stage.index}", "", words, track)


def _busy_bar(stage: StagePlan, share: float) -> Html:
    words = f"{percent(share)} busy, {percent(1 - share)} bubbles"
    piece = tag("span", class_="piece time-busy", style=f"width:{100 * share:.3f}%")
    label = f"stage {stage.index}: {words}"
    track = tag("div", piece, class_="track", role="img", aria_label=label)
    return _bar(f"Stage {stage.index}", "", words, track)


def schedule(plan: PlanSpec, explanation: Explanation | None) -> Html:
    """The simulated batch as two pictures: all of it, and the turn from prefill to decode."""
    if explanation is None:
        return Html("")
    simulated = explanation.simulated
    labels = [shortened(stage.device, LABEL_LENGTH) for stage in plan.stages]
    pictures = [_picture("The whole batch", simulated, labels, GanttOptions(width=GANTT_WIDTH))]
    turn = _turn(simulated)
    if turn is not None:
        pictures.append(_picture("From prefill to decode", simulated, labels, turn))
    text = (
        "Simulated: every micro-batch on every stage, shades tell neighbouring micro-batches "
        "apart; below each stage its transfers to the next one."
    )
    return section("schedule", "Schedule", tag("p", text, class_="note"), *pictures)


def _turn(simulated: Simulated) -> GanttOptions | None:
    """A few decode rounds around the time of the last first token, if the batch is longer."""
    decode_s = simulated.latency_s - simulated.prefill_s
    steps = simulated.workload.new_tokens - 1
    if steps <= 2 * ROUNDS_SHOWN or simulated.stages == 1:
        return None
    span_s = ROUNDS_SHOWN * decode_s / steps
    start_s = max(0.0, simulated.prefill_s - span_s)
    return GanttOptions(start_s, simulated.prefill_s + span_s, GANTT_WIDTH)


def _picture(title: str, simulated: Simulated, labels: list[str], options: GanttOptions) -> Html:
    drawing = Html(gantt_svg(simulated, labels, options))
    return tag(
        "figure",
        tag("figcaption", title),
        tag("div", drawing, class_="scroll gantt", tabindex=0, role="img", aria_label=title),
    )
