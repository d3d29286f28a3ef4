"""Options of GPTQ; without torch, as command lines read them."""

from __future__ import annotations

from dataclasses import dataclass

from quant.common.errors import SpecError

DAMPING = 0.01
"""Share of the mean diagonal of X^T X that is added to it (Frantar et al., section 3.3)."""

MOST_DAMPING = 1.0


@dataclass(frozen=True)
class GptqOptions:
    """Options of GPTQ. `symmetric`: the zero is the middle code, as some kernels require (Marlin).
    `act_order`: columns with the largest inputs are rounded first, under scales that are fixed
    before, so that columns stay in their places and kernels are not affected; else columns are
    rounded in their order, and each group's scale is chosen when it is reached. `damping`: share of
    the mean diagonal added to it.
    """

    symmetric: bool = False
    act_order: bool = True
    damping: float = DAMPING

    def __post_init__(self) -> None:
        if not 0 < self.damping <= MOST_DAMPING:
            raise SpecError(f"damping is {self.damping}; it must be above 0 and at most 1")
