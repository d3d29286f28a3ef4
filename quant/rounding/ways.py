"""Rounding a block of float weights to codes, with a scale and a zero for each group.

Scale and zero of affine groups are bfloat16 and rounded *before* the codes are chosen. For nearest
and stochastic rounding the scale goes upwards, so that the codes cover the group's weights whatever
the rounding did to the zero. Three ways to round (`quant.scheme.ROUNDINGS`):

- `nearest` (LLM-PQ section 2.3): every weight within half a scale of its code.
- `stochastic` (LLM-PQ Theorem 1, the second case): up with the probability of the fraction that is
  left, so that the expected weight is the weight. Drawn from a seed of the tensor's name on the
  host, so that a restarted stage and another device get the same codes.
- `weighted`, the default: scale and zero of each group are fitted to its weights, columns weighed
  by the mean square of their inputs (`quant.rounding.weighted`), and weights take the nearest code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from quant.common.errors import CheckpointError, SpecError
from quant.narrow import nearest_narrow
from quant.rounding.importance import InputStatistics
from quant.scheme import ROUNDINGS

_INT8_LIMIT = 127


@dataclass(frozen=True)
class Rounding:
    """How a tensor is rounded; `inputs` of the whole weigh its columns, all alike without."""

    mode: str = ROUNDINGS[0]
    seed: int = 0
    inputs: InputStatistics | None = None

    def __post_init__(self) -> None:
        if self.mode not in ROUNDINGS:
            raise SpecError(f"rounding {self.mode!r} is not one of {', '.join(ROUNDINGS)}")

    @classmethod
    def of_tensor(cls, mode: str, name: str, inputs: InputStatistics | None = None) -> Rounding:
        digest = hashlib.sha256(name.encode()).digest()
        return cls(mode, int.from_bytes(digest[:8], "little") >> 1, inputs)

    def generator(self) -> torch.Generator | None:
        if self.mode != "stochastic":
            return None
        return torch.Generator().manual_seed(self.seed)


DEFAULT = Rounding()


def affine_codes(
    grouped: torch.Tensor,
    bits: int,
    draws: torch.Generator | None,
    factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `grouped` `[rows, groups, group]` by codes on a grid that covers it; return scale and
    zero `[rows, groups]`, float32 holding bfloat16, narrow ones where rows have a `factor` `[rows,
    1]`. CheckpointError if it is not finite.
    """
    low, high = _finite_extremes(grouped)
    if factor is None:
        scale, zero = affine_parameters(low, high, bits)
    else:
        scale, zero = nearest_narrow(low, high, bits, factor)
    half = 1 << (bits - 1)
    grouped.sub_(zero.unsqueeze(-1)).div_(scale.unsqueeze(-1))
    _round(grouped, draws)
    grouped.add_(half).clamp_(0, 2 * half - 1)
    return scale, zero


def symmetric_codes(grouped: torch.Tensor, draws: torch.Generator | None) -> torch.Tensor:
    """Replace `grouped` by 8-bit codes -127 .. 127; return the float32 scale `[rows, groups]`."""
    low, high = _finite_extremes(grouped)
    scale = torch.maximum(low.neg(), high).div_(_INT8_LIMIT)
    scale.masked_fill_(scale == 0, 1.0)
    grouped.div_(scale.unsqueeze(-1))
    _round(grouped, draws)
    grouped.clamp_(-_INT8_LIMIT, _INT8_LIMIT)
    return scale


def affine_parameters(
    low: torch.Tensor, high: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    half = 1 << (bits - 1)
    step = (high - low) / (2 * half - 1)
    zero = (low + half * step).bfloat16().float()
    scale = ((high - zero) / (half - 1)).maximum((zero - low) / half)
    scale = round_up_to_bfloat16(scale)
    return scale.where(scale > 0, 1.0), zero


def _round(values: torch.Tensor, draws: torch.Generator | None) -> None:
    if draws is None:
        values.round_()
        return
    fraction = values - values.floor()
    uniform = torch.rand(values.shape, generator=draws)
    values.floor_().add_(uniform.to(values.device) < fraction)


def round_up_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Least bfloat16 not below: the upper half of a float32, whose order is that of its bits."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _finite_extremes(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = grouped.amin(-1), grouped.amax(-1)
    check_finite(low.numel() - int(torch.isfinite(high - low).sum()), low.numel())
    return low, high


def check_finite(bad: int, groups: int) -> None:
    if bad:
        raise CheckpointError(
            f"{bad} of {groups} weight groups hold NaN, infinite or overflowing values; "
            "the checkpoint is damaged"
        )
