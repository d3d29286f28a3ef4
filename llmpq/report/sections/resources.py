"""Use of each stage: memory against its limit, seconds in both phases, the simulated schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.elements import Bar, Legend, Piece, Table
from llmpq.report.formatting import percent, seconds, shortened, size
from planner.costs.memory import StageMemory
from planner.explanation.explain import Explanation
from planner.plan.plan import Plan, StagePlan
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


@dataclass(frozen=True)
class Memory:
    """A bar per stage; all bars share one scale, and each track ends at the stage's limit."""

    legend: Legend
    bars: Sequence[Bar]
    table: Table


def memory(plan: Plan) -> Memory:
    """What fills the memory of each stage."""
    most = max(max(s.memory_limit_bytes, s.memory_bytes) for s in plan.stages)
    used = [(f"part-{k}", n) for k, n in PARTS if any(_part(s.memory, k) for s in plan.stages)]
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
    heads = ["stage", *(name for _, name in PARTS), "sum", "limit", "left"]
    return Memory(
        [*used, ("part-free", "left")],
        [_memory_bar(stage, most) for stage in plan.stages],
        Table("Memory of each stage and what fills it", heads, rows),
    )


def _part(memory_of_stage: StageMemory, key: str) -> int:
    return int(getattr(memory_of_stage, key))


def _memory_bar(stage: StagePlan, most: int) -> Bar:
    limit, used = stage.memory_limit_bytes, stage.memory_bytes
    pieces = [
        Piece(
            f"part-{key}",
            100 * amount / max(limit, used),
            f"{name}: {size(amount)}, {percent(amount / limit)} of the limit",
        )
        for key, name in PARTS
        if (amount := _part(stage.memory, key))
    ]
    words = f"{size(used)} of {size(limit)}, {size(limit - used)} left"
    label = f"stage {stage.index}: {words}"
    width = 100 * max(limit, used) / most
    return Bar(stage.index, stage.device, words, label, pieces, width=width)


@dataclass(frozen=True)
class Times:
    """Bars per stage under a heading for each phase and for the share of the batch."""

    idle_share: float
    blocks: Sequence[tuple[str, Sequence[Bar]]]
    table: Table


def times(plan: Plan) -> Times:
    """Seconds of one full micro-batch on every stage in both phases, and how busy it is."""
    p, sizes = plan.predicted, plan.micro_batches
    prefill_s = [stage.prefill_s for stage in plan.stages]
    decode_s = [stage.decode_s for stage in plan.stages]
    blocks = [
        (
            f"Prefill, micro-batches of {sizes.prefill}",
            _time_bars("prefill", prefill_s, p.prefill_bottleneck),
        ),
        (
            f"Decode, micro-batches of {sizes.decode}",
            _time_bars("decode", decode_s, p.decode_bottleneck),
        ),
        ("Share of the batch", [_busy_bar(j, share) for j, share in enumerate(p.busy_share)]),
    ]
    return Times(1 - sum(p.busy_share) / len(p.busy_share), blocks, _times_table(plan))


def _times_table(plan: Plan) -> Table:
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
    return Table("Seconds of one full micro-batch on each stage", heads, rows)


def _time_bars(phase: str, stage_s: Sequence[float], slowest: int) -> list[Bar]:
    bars, most = [], max(stage_s)
    for index, value in enumerate(stage_s):
        words = seconds(value) + (", the bottleneck" if index == slowest else "")
        piece = Piece(f"time-{phase}", 100 * value / most if most else 0.0)
        style = "track plain slowest" if index == slowest else "track plain"
        bars.append(Bar(index, "", words, f"stage {index} {phase}: {words}", [piece], style))
    return bars


def _busy_bar(index: int, share: float) -> Bar:
    words = f"{percent(share)} busy, {percent(1 - share)} bubbles"
    return Bar(index, "", words, f"stage {index}: {words}", [Piece("time-busy", 100 * share)])


@dataclass(frozen=True)
class Picture:
    """A Gantt chart, `svg`, under its title."""

    title: str
    svg: str


def schedule(plan: Plan, explanation: Explanation) -> Sequence[Picture]:
    """The simulated batch as two pictures: all of it, and the turn from prefill to decode."""
    simulated = explanation.simulated
    labels = [shortened(stage.device, LABEL_LENGTH) for stage in plan.stages]
    views = [("The whole batch", GanttOptions(width=GANTT_WIDTH))]
    turn = _turn(simulated)
    if turn is not None:
        views.append(("From prefill to decode", turn))
    return [Picture(title, gantt_svg(simulated, labels, options)) for title, options in views]


def _turn(simulated: Simulated) -> GanttOptions | None:
    """A few decode rounds around the time of the last first token, if the batch is longer."""
    decode_s = simulated.latency_s - simulated.prefill_s
    steps = simulated.workload.new_tokens - 1
    if steps <= 2 * ROUNDS_SHOWN or simulated.stages == 1:
        return None
    span_s = ROUNDS_SHOWN * decode_s / steps
    start_s = max(0.0, simulated.prefill_s - span_s)
    return GanttOptions(start_s, simulated.prefill_s + span_s, GANTT_WIDTH)
