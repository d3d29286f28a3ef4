"""Options of GPTQ; without torch, as command lines read them."""

from __future__ import annotations

from dataclasses import dataclass

from quant.common.errors import SpecError

DAMPING = 0.01
"""Share of the mean diagonal of X^T X that is added to it (Frantar et al., section 3.3)."""

MOST_DAMPING = 1.0


@dataclass(frozen=True)
class GptqOptions:
    """`symmetric`: the zero is the middle code (Marlin). `act_order`: columns with the largest
    inputs are rounded first under fixed scales, so that they stay in place; else each group's scale
    is chosen when it is reached. `damping`: share of the mean diagonal added.
    """

    symmetric: bool = False
    act_order: bool = True
    damping: float = DAMPING

    def __post_init__(self) -> None:
        if not 0 < self.damping <= MOST_DAMPING:
            raise SpecError(f"damping is {self.damping}; it must be above 0 and at most 1")
