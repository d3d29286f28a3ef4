"""Choosing the workloads to measure on a device: a few, spread over all that plans may need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planner.option_rules import ABOVE_0_S, ANY, AT_LEAST_1, Range, option, refuse_outside
from planner.scheduling import Phase
from quant.common.errors import SpecError
from quant.scheme import BITWIDTHS, DTYPE_BYTES

# Lengths that are tried between the shortest and the longest: more than points are measured.
_LENGTHS = 24


@dataclass(frozen=True)
class LayerWorkload:
    """The work of one layer. `length`: prompt tokens of each request, the longest of unlike
    `prompts`; in decode the tokens before, the mean of `unlike` requests from half as long to half
    as long again.
    """

    phase: Phase
    batch_size: int
    length: int
    prompts: tuple[int, ...] = ()
    unlike: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        if self.unlike:
            spread = np.linspace(self.length / 2, 1.5 * self.length, self.batch_size)
            return tuple(max(1, int(each)) for each in spread)
        return self.prompts or (self.length,) * self.batch_size

    @property
    def decode_rows(self) -> int:
        return self.batch_size if self.phase == "decode" else 0

    @property
    def tokens(self) -> int:
        """Tokens that enter in prefill, or that are attended to in decode."""
        return sum(self.lengths)


@dataclass(frozen=True)
class DesignSpace:
    batch_sizes: tuple[int, ...] = option(
        "COUNT", "requests of a micro-batch", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    )
    min_length: int = 16
    max_length: int = option("TOKENS", "longest prompt and context", 1024)
    prefill_tokens: int = option("COUNT", "most tokens of a prefill micro-batch", 4096)
    decode_tokens: int = option("COUNT", "most tokens a decode micro-batch attends to", 16384)

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise SpecError(f"batch_sizes are {list(self.batch_sizes)}; give numbers of at least 1")
        if not 1 <= self.min_length <= self.max_length:
            raise SpecError(
                f"max_length is {self.max_length}; at least {max(self.min_length, 1)} tokens "
                "belong there"
            )
        least = min(self.batch_sizes) * self.min_length
        if min(self.prefill_tokens, self.decode_tokens) < least:
            raise SpecError(
                f"at most {min(self.prefill_tokens, self.decode_tokens)} tokens at once leave no "
                f"workload: the smallest has {least}; allow more or give smaller batch_sizes"
            )

    def most_tokens(self, phase: Phase) -> int:
        return self.prefill_tokens if phase == "prefill" else self.decode_tokens

    def holds(self, workload: LayerWorkload) -> bool:
        """Whether `workload` lies in this space; any batch size between the outer ones may."""
        return (
            min(self.batch_sizes) <= workload.batch_size <= max(self.batch_sizes)
            and self.min_length <= workload.length <= self.max_length
            and workload.tokens <= self.most_tokens(workload.phase)
        )


@dataclass(frozen=True)
class ProfileOptions:
    bits: tuple[int, ...] = option(BITWIDTHS, "bitwidths", BITWIDTHS, within=ANY)
    dtype: str = option(("auto", *DTYPE_BYTES), "type to compute in", "auto", within=ANY)
    points: int = option(
        "COUNT",
        "workloads for each bitwidth and phase",
        16,
        within=Range(lambda points: points >= 4, "it must be at least 4, the corners"),
    )
    rounds: int = option(
        "COUNT",
        "most passes of each workload; long ones, and those whose times agree, take fewer",
        100,
        within=AT_LEAST_1,
    )
    budget_s: float = option("SECONDS", "to spend on each device", 600.0, within=ABOVE_0_S)
    seed: int = option("SEED", "of the order, the weights and the inputs", 0)
    space: DesignSpace = field(default_factory=DesignSpace)

    def __post_init__(self) -> None:
        known = ("auto", *DTYPE_BYTES)
        if self.dtype not in known:
            raise SpecError(f"compute type {self.dtype!r} is not one of {', '.join(known)}")
        refuse_outside(self)


def design(space: DesignSpace, phase: Phase, points: int) -> tuple[LayerWorkload, ...]:
    """Choose the corners, then the workloads farthest from those chosen by logarithms. Every other
    decode step is of requests as long as each other, which a GPU reads in place.
    """
    candidates = list(_candidates(space, phase))
    where = np.log([[each.batch_size, each.length] for each in candidates])
    where = (where - where.min(axis=0)) / np.maximum(np.ptp(where, axis=0), 1e-9)
    chosen = list(dict.fromkeys(_corners(where)))[:points]
    nearest = np.min([_distances(where, i) for i in chosen], axis=0)
    while len(chosen) < min(points, len(candidates)):
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _distances(where, chosen[-1]))
    workloads = [candidates[i] for i in chosen]
    return tuple(
        replace(each, unlike=phase == "decode" and number % 2 == 1 and each.batch_size > 1)
        for number, each in enumerate(workloads)
    )


def _candidates(space: DesignSpace, phase: Phase) -> Iterator[LayerWorkload]:
    for batch in sorted(set(space.batch_sizes)):
        longest = min(space.max_length, space.most_tokens(phase) // batch)
        if longest < space.min_length:
            continue
        lengths = np.geomspace(space.min_length, longest, _LENGTHS)
        for length in dict.fromkeys(math.floor(each + 1e-6) for each in lengths):
            yield LayerWorkload(phase, batch, length)


def _corners(where: npt.NDArray[np.float64]) -> Sequence[int]:
    """Indices of the candidates, at `where` [candidates, 2], farthest in each diagonal."""
    directions = ((-1, -1), (1, 1), (-1, 1), (1, -1))
    return [int((where @ np.array(direction)).argmax()) for direction in directions]


def _distances(where: npt.NDArray[np.float64], index: int) -> npt.NDArray[np.float64]:
    return np.asarray(np.linalg.norm(where - where[index], axis=1))
