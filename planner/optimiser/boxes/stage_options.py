"""The options of a kind of stage: the runs of layers that it may hold, at which bitwidths; boxes of
those of all stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from planner.optimiser.problem import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class StageOptions:
    """The options [M] of one kind of stage. `run` is start * (layers + 1) + stop, `row` the row in
    its length's lattice; times are seconds with the fixed part.
    """

    run: IntArray
    row: IntArray
    prefill_s: FloatArray
    decode_s: FloatArray
    loss_s: FloatArray

    @cached_property
    def first(self) -> IntArray:
        """Where each run begins [R]."""
        begins = np.ones(self.run.size, dtype=bool)
        np.not_equal(self.run[1:], self.run[:-1], out=begins[1:])
        return begins.nonzero()[0]

    @cached_property
    def runs(self) -> IntArray:
        """The distinct runs [R]."""
        return self.run[self.first]

    @cached_property
    def end(self) -> IntArray:
        """Where each run ends [R]."""
        return np.append(self.first[1:], self.run.size)

    def where(self, kept: BoolArray) -> StageOptions:
        if kept.all():
            return self
        seconds = self.prefill_s[kept], self.decode_s[kept], self.loss_s[kept]
        return StageOptions(self.run[kept], self.row[kept], *seconds)


def joined_options(parts: Sequence[StageOptions]) -> StageOptions:
    if not parts:
        return StageOptions(*(np.zeros(0, dtype=np.int64),) * 2, *(np.zeros(0),) * 3)
    return StageOptions(
        np.concatenate([part.run for part in parts]),
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.prefill_s for part in parts]),
        np.concatenate([part.decode_s for part in parts]),
        np.concatenate([part.loss_s for part in parts]),
    )


@dataclass(frozen=True, eq=False)
class Box:
    """Limits in seconds on the slowest prefill and decode, and what each stage may hold [N]."""

    prefill_least: float
    decode_least: float
    options: tuple[StageOptions, ...]

    @property
    def distinct(self) -> list[StageOptions]:
        """The options of each kind of stage once."""
        return list({id(each): each for each in self.options}.values())

    def below(self, prefill_most: float, decode_most: float) -> Box:
        """The box with those options only that take no more seconds."""
        kept = {
            id(options): options.where(
                (options.prefill_s <= prefill_most) & (options.decode_s <= decode_most)
            )
            for options in self.distinct
        }
        return replace(self, options=tuple(kept[id(options)] for options in self.options))

    def split_stage(self, decode_s: FloatArray, other_s: FloatArray) -> tuple[Box, ...]:
        """Two boxes, between what two paths [N] take to decode where they differ most."""
        stage = int(np.abs(decode_s - other_s).argmax())
        middle = float(decode_s[stage] + other_s[stage]) / 2
        own, options = self.options[stage], self.options
        return tuple(
            replace(self, options=(*options[:stage], own.where(mask), *options[stage + 1 :]))
            for mask in (own.decode_s <= middle, own.decode_s > middle)
        )


def least_above(middle: float, seconds: Iterable[FloatArray]) -> float | None:
    above = [values[values > middle] for values in seconds]
    return min((float(values.min()) for values in above if values.size), default=None)
