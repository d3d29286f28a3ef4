"""The forms of the variance indicator and their scalar factors, without torch.

`quant.sensitivity.indicators` has the equations.
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
    """A form of the variance indicator. The defaults are that of Proposition 2, for rounding to
    nearest with asymmetric scales.

    `scales`: one S_W for the whole tensor, or one for each group that has a scale of its own.
    """

    rounding: str = "nearest"
    scheme: str = "asymmetric"
    scales: str = "tensor"

    def __post_init__(self) -> None:
        """Check the names; SpecError lists the known ones."""
        choices = {"rounding": ROUNDINGS, "scheme": SCHEMES, "scales": SCALES}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise SpecError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}"
                )

    def gain(self, mean: float, variance: float) -> float:
        """G(X) of inputs of this mean and variance: the factor of noise in the weights."""
        if self.rounding == "nearest":
            return variance / 4
        return (mean**2 + variance) / 6

    def steps(self, bits: int) -> int:
        """Steps that a span of weights (symmetric: its larger side) is divided into."""
        return (1 << bits) - 1 if self.scheme == "asymmetric" else (1 << (bits - 1)) - 1

    def group(self, out_features: int, in_features: int, bits: int) -> int:
        """Number of consecutive weights of a row-major matrix that share a scale."""
        if self.scales == "tensor":
            return out_features * in_features
        return in_features if bits == 8 else group_size(in_features)
