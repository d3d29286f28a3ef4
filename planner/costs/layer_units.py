"""Layers of several kinds as a problem counts them: kinds that cost the same as one, successive
layers as units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.optimiser.problem import AssignmentProblem, FloatArray, IntArray
from quant.common.errors import SpecError


def told_apart(tables: FloatArray, kind_of_layer: IntArray) -> tuple[FloatArray, IntArray]:
    """Join kinds that cost the same in all `tables` [T, N, C * K], as those do which differ in a
    window that no request reaches; and the kinds of layers as they then are.
    """
    kinds = int(kind_of_layer.max()) + 1
    if kinds == 1:
        return tables, kind_of_layer
    by_kind = np.moveaxis(tables.reshape(*tables.shape[:2], kinds, -1), 2, 0)
    numbers: dict[bytes, int] = {}
    number = np.array([numbers.setdefault(own.tobytes(), len(numbers)) for own in by_kind])
    _, first = np.unique(number, return_index=True)
    kept = np.moveaxis(by_kind[first], 0, 2)
    return kept.reshape(*tables.shape[:2], -1), number[kind_of_layer]


@dataclass(frozen=True, eq=False)
class LayerUnits:
    """Successive layers as units of as many: how many of each kind those of a kind of unit have
    [U, C], and the kind of each unit. A unit that begins with a joined layer is joined.
    """

    counts: IntArray
    kind_of_unit: IntArray
    joined: tuple[int, ...]

    @classmethod
    def of(cls, kind_of_layer: IntArray, joined: Sequence[int], group: int) -> LayerUnits:
        """The units of `group` layers; SpecError unless it divides their number."""
        layers = len(kind_of_layer)
        if layers % group:
            raise SpecError(
                f"group is {group}, which does not divide the model's {layers} layers; "
                f"use one of {[g for g in range(1, layers + 1) if layers % g == 0]}"
            )
        is_kind = kind_of_layer[:, np.newaxis] == np.arange(kind_of_layer.max() + 1)
        in_units = is_kind.reshape(-1, group, is_kind.shape[1]).sum(axis=1)
        counts, kind_of_unit = np.unique(in_units, axis=0, return_inverse=True)
        firsts = tuple(layer // group for layer in joined if layer % group == 0)
        return cls(counts, kind_of_unit.reshape(-1), firsts)

    def summed(self, by_kind: FloatArray) -> FloatArray:
        """What layers of each kind [N, C, ...] come to in a unit of each kind [N, U, ...]."""
        return np.asarray(np.einsum("uc,nc...->nu...", self.counts, by_kind))

    def summed_cells(self, problem: AssignmentProblem, cells: FloatArray) -> FloatArray:
        by_kind = cells.reshape(len(cells), problem.kinds, -1)
        return self.summed(by_kind).reshape(len(cells), -1)
