"""The simulated schedule as Gantt charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import shortened
from planner.latency_bound.draw import simulated_cycles
from planner.plan.spec import PlanSpec
from planner.simulation.pictures import GanttOptions, gantt_svg
from planner.simulation.simulation import Simulated

GANTT_WIDTH = 800  # pixels of the drawing; with its labels as wide as the page's text
LABEL_LENGTH = 24
ROUNDS_SHOWN = 4  # decode rounds after the first tokens, in the second picture


@dataclass(frozen=True)
class Picture:
    """A Gantt chart, `svg`, under its title."""

    title: str
    svg: str


def schedule_pictures(
    simulated: Simulated, devices: Sequence[str], is_job: bool = False
) -> list[Picture]:
    """What was simulated as two pictures: all of it, a batch or the first fills of a job's slots,
    and the turn from prefill to decode.
    """
    labels = [shortened(device, LABEL_LENGTH) for device in devices]
    title = "The first fills of the slots" if is_job else "The whole batch"
    views = [(title, GanttOptions(width=GANTT_WIDTH))]
    turn = _turn(simulated)
    if turn is not None:
        views.append(("From prefill to decode", turn))
    return [Picture(title, gantt_svg(simulated, labels, options)) for title, options in views]


def cycle_pictures(plan: PlanSpec) -> list[Picture]:
    """A few cycles of the schedule of a plan under a bound on latency."""
    cycles = simulated_cycles(plan)
    labels = [shortened(label, LABEL_LENGTH) for label in cycles.labels]
    options = GanttOptions(width=GANTT_WIDTH)
    title = "Two cycles: every stage prefills, then decodes"
    if plan.prefill_plan is not None:
        title = "A few turns: some stages prefill, others decode meanwhile"
    return [Picture(title, gantt_svg(cycles.simulated, labels, options))]


def _turn(simulated: Simulated) -> GanttOptions | None:
    """A few decode rounds around the time when all slots have first tokens, if there are more."""
    decode_s = simulated.latency_s - simulated.filled_s
    steps = max(each.step for each in simulated.passes)
    if steps <= 2 * ROUNDS_SHOWN or simulated.stages == 1:
        return None
    span_s = ROUNDS_SHOWN * decode_s / steps
    start_s = max(0.0, simulated.filled_s - span_s)
    return GanttOptions(start_s, simulated.filled_s + span_s, GANTT_WIDTH)
