"""Forms and scalar factors of the variance indicator, without torch
(`quant.sensitivity.indicators`).
"""

from __future__ import annotations

from dataclasses import dataclass

from quant.common.errors import SpecError
from quant.scheme import group_size

ROUNDINGS = ("nearest", "stochastic")
SCHEMES = ("asymmetric", "symmetric")
SCALES = ("tensor", "group")


@dataclass(frozen=True)
class VarianceForm:
    """`scales`: one S_W for the whole tensor, or one for each group. The defaults are Proposition
    2's.
    """

    rounding: str = "nearest"
    scheme: str = "asymmetric"
    scales: str = "tensor"

    def __post_init__(self) -> None:
        choices = {"rounding": ROUNDINGS, "scheme": SCHEMES, "scales": SCALES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SpecError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )

    def gain(self, mean: float, variance: float) -> float:
        if self.rounding == "nearest":
            return variance / 4
        return (mean**2 + variance) / 6

    def steps(self, bits: int) -> int:
        """Steps that a span of weights (symmetric: its larger side) is divided into."""
        return (1 << bits) - 1 if self.scheme == "asymmetric" else (1 << (bits - 1)) - 1

    def group(self, out_features: int, in_features: int, bits: int) -> int:
        if self.scales == "tensor":
            return out_features * in_features
        return in_features if bits == 8 else group_size(in_features)
