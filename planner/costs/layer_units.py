"""Layers of several kinds as a problem counts them: kinds that cost the same as one, successive
layers as units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
    [U, C], and the kind of each unit. A unit that begins with a joined layer is joined. Where the
    experts of kinds are `apart`, they are kinds behind the others, and units behind and joined to
    those of the rest of their layers; `with_experts` has the unit of the rest of each.
    """

    counts: IntArray
    kind_of_unit: IntArray
    joined: tuple[int, ...]
    group: int = 1
    with_experts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, kind_of_layer: IntArray, joined: Sequence[int], group: int, apart: Sequence[int] = ()
    ) -> LayerUnits:
        """The units of `group` layers; SpecError unless it divides their number."""
        layers = len(kind_of_layer)
        if layers % group:
            raise SpecError(
                f"group is {group}, which does not divide the model's {layers} layers; "
                f"use one of {[g for g in range(1, layers + 1) if layers % g == 0]}"
            )
        is_kind = kind_of_layer[:, np.newaxis] == np.arange(kind_of_layer.max() + 1)
        in_units = is_kind.reshape(-1, group, is_kind.shape[1]).sum(axis=1)
        firsts = {layer // group for layer in joined if layer % group == 0}
        rows: list[IntArray] = []
        follows, rests = list[int](), list[int]()
        none = np.zeros(len(apart), dtype=np.int64)
        for number, own in enumerate(in_units):
            if number in firsts:
                follows.append(len(rows))
            rows.append(np.concatenate([own, none]))
            if own[list(apart)].any():
                rests.append(len(rows) - 1)
                follows.append(len(rows))
                rows.append(np.concatenate([0 * own, own[list(apart)]]))
        counts, kind_of_unit = np.unique(np.array(rows), axis=0, return_inverse=True)
        return cls(counts, kind_of_unit.reshape(-1), tuple(follows), group, tuple(rests))

    @cached_property
    def of_experts(self) -> frozenset[int]:
        """Units that are the experts of the unit before them."""
        return frozenset(unit + 1 for unit in self.with_experts)

    @cached_property
    def layer_of_unit(self) -> tuple[int, ...]:
        """The first layer of each unit, and the number of layers."""
        groups = [unit not in self.of_experts for unit in range(len(self.kind_of_unit))]
        before = np.cumsum(groups) - np.array(groups) * 1
        firsts = [
            int(number) - (unit in self.of_experts) for unit, number in enumerate(before.tolist())
        ]
        return tuple(self.group * each for each in (*firsts, sum(groups)))

    def layers(self, unit: int) -> range:
        """The layers of a unit, or whose experts it is."""
        first = self.layer_of_unit[unit]
        return range(first, first + self.group)

    def summed(self, by_kind: FloatArray) -> FloatArray:
        """What layers of each kind [N, C, ...] come to in a unit of each kind [N, U, ...]."""
        return np.asarray(np.einsum("uc,nc...->nu...", self.counts, by_kind))

    def summed_cells(self, problem: AssignmentProblem, cells: FloatArray) -> FloatArray:
        by_kind = cells.reshape(len(cells), problem.kinds, -1)
        return self.summed(by_kind).reshape(len(cells), -1)


def grouped(problem: AssignmentProblem, group: int) -> AssignmentProblem:
    """Join every `group` layers (section 4.3, optimisation 2); SpecError if it does not divide."""
    if group == 1:
        return problem
    units = LayerUnits.of(problem.kind_of_layer, problem.joined, group)
    lacking = units.summed_cells(problem, (~problem.available).astype(np.float64))
    return replace(
        problem,
        prefill_s=units.summed_cells(problem, problem.prefill_s),
        decode_s=units.summed_cells(problem, problem.decode_s),
        layer_bytes=units.summed_cells(problem, problem.layer_bytes),
        sensitivity=problem.sensitivity.reshape(-1, group, len(problem.bitwidths)).sum(axis=1),
        available=lacking == 0,
        kind_of_layer=units.kind_of_unit,
        joined=units.joined,
    )
