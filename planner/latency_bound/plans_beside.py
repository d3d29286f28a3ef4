"""The plans beside one under a bound on latency: of the other qualities, and of the most bits."""

from __future__ import annotations

from planner.latency_bound.bounded_search import BoundedSearch
from planner.latency_bound.judged import Scheduled
from planner.options import QUALITIES, Quality
from planner.plan.parts import PlanChoice, PlansBeside, QualityChoice


def plans_beside(
    search: BoundedSearch, taken: Scheduled, quality: Quality | None, bound_s: float
) -> PlansBeside:
    """What can be found in the time that `search` has left, each within the bound; nothing where
    no quality decided.
    """
    if quality is None:
        return PlansBeside()
    found = {quality: taken}
    for each in QUALITIES:
        if each not in found and each != "fast" and not search.is_over:
            found[each] = search.within(bound_s, each)
    finest = None if search.is_over else search.finest(bound_s)
    found.setdefault("fast", search.fastest(bound_s))
    return PlansBeside(
        quality=quality,
        qualities=tuple(_quality_choice(each, found[each]) for each in QUALITIES if each in found),
        full_precision=None if finest is None else choice_of(finest),
    )


def _quality_choice(quality: Quality, found: Scheduled) -> QualityChoice:
    return QualityChoice(quality, found.placed.placements[0].costs.theta, choice_of(found))


def choice_of(found: Scheduled) -> PlanChoice:
    """Bits and sensitivity in the mean of both sides, where devices are divided."""
    placed = found.placed
    bits = [each.costs.placing.mean_bits(each.solution.assignment) for each in placed.placements]
    return PlanChoice(
        in_flight=found.schedule.most_in_flight,
        tokens_per_s=placed.job.output_tokens / found.seconds,
        sensitivity=max(0.0, placed.omega),
        mean_bits=sum(bits) / len(bits),
    )
