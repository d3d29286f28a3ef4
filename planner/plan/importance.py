"""Whether a plan's stages need the importance of their layers, and the file that it was made with.
"""

from __future__ import annotations

from planner.plan.spec import PlanSpec
from quant.scheme import FULL_BITS, WEIGHTED


def needs_importance(plan: PlanSpec, stored: bool) -> bool:
    """Whether something is rounded by importance: weights, or keys at 8 bit.

    `stored`: the checkpoint is quantized already, so that no weight is rounded.
    """
    if plan.stand_in is not None:  # a small model at 16 bit computes
        return False
    rounds = any(bits != FULL_BITS for stage in plan.stages for bits in stage.bitwidths)
    return plan.kv_bits != FULL_BITS or (rounds and not stored and plan.rounding == WEIGHTED)
