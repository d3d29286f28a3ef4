"""What a plan places and chooses: layers, or apart their experts and all else; in groups, and by
layer again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.costs.layer_units import LayerUnits
from planner.model.layer_parts import LayerChoice
from planner.model.shape import ModelShape
from planner.optimiser.assignment import Assignment
from planner.optimiser.problem import FloatArray
from planner.options import PlanOptions

_EXPERT_LINEARS = 3  # gate, up, down


class UnitChoice(NamedTuple):
    bits: int
    on_host: bool


@dataclass(frozen=True, eq=False)
class Placing:
    """The units of `shape` and their choices; `omega` `[layers, bits]`, and the part of the
    layers' experts in it, None: by `expert_share`. Units are whole layers unless `experts_apart`;
    with `hosting` experts may lie in hosts' memory.
    """

    shape: ModelShape
    options: PlanOptions
    omega: FloatArray
    omega_of_experts: FloatArray | None
    experts_apart: bool
    hosting: bool

    @cached_property
    def unit_choices(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit of `units`; their bits never fall."""
        places = (False, True) if self.hosting else (False,)
        return tuple(UnitChoice(bits, host) for bits in self.options.bits for host in places)

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits of each choice for a unit."""
        return tuple(each.bits for each in self.unit_choices)

    @cached_property
    def choices(self) -> tuple[LayerChoice, ...]:
        """The choices for a layer: first those of the whole layer, in the order of the bits."""
        bits = self.options.bits
        whole = [LayerChoice.whole(each) for each in bits]
        if not self.experts_apart:
            return tuple(whole)
        apart = [LayerChoice(rest, *experts) for rest in bits for experts in self.unit_choices]
        return tuple(dict.fromkeys((*whole, *apart)))

    @cached_property
    def units(self) -> LayerUnits:
        """What `grouped_problem` places."""
        shape, kinds = self.shape, np.array(self.shape.kind_of_layer)
        apart = [
            kind
            for kind, own in enumerate(shape.kind_shapes)
            if self.experts_apart and own.experts is not None
        ]
        return LayerUnits.of(kinds, shape.joined, self.options.group, apart)

    @cached_property
    def sensitivity(self) -> FloatArray:
        """Omega of the units, `[units, unit_choices]`."""
        omega, experts, units = self.omega, self.omega_of_experts, self.units
        if experts is None:
            shares = [[expert_share(self.shape.layer(layer))] for layer in range(len(omega))]
            experts = np.array(shares) * omega
        parts = {False: omega - experts, True: experts} if self.experts_apart else {False: omega}
        summed = [
            parts[unit in units.of_experts][units.layers(unit)].sum(axis=0)
            for unit in range(len(units.kind_of_unit))
        ]
        return np.repeat(np.array(summed), len(self.unit_choices) // len(self.options.bits), axis=1)

    def expanded(self, assignment: Assignment) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Boundaries by layer, and indices into `choices`, of an assignment of `units`."""
        if not self.experts_apart:
            group = self.options.group
            first_layer = tuple(group * boundary for boundary in assignment.first_layer)
            return first_layer, tuple(own for own in assignment.bitwidth for _ in range(group))
        units, choices = self.units, self.unit_choices
        places = {choice: place for place, choice in enumerate(self.choices)}
        of_layer = list[int]()
        for unit, own in enumerate(assignment.bitwidth):
            if unit in units.of_experts:
                continue
            bits = choices[own].bits
            for layer in units.layers(unit):
                has_experts = self.shape.layer(layer).experts is not None
                experts = choices[assignment.bitwidth[unit + 1]] if has_experts else (bits, False)
                of_layer.append(places[LayerChoice(bits, *experts)])
        boundaries = tuple(units.layer_of_unit[each] for each in assignment.first_layer)
        return boundaries, tuple(of_layer)

    def assigned(
        self, first_layer: Sequence[int], choices: Sequence[LayerChoice]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Boundaries and choices of `units` for those of layers, as far as they are alike."""
        units, of_unit = self.units, list[int]()
        for unit in range(len(units.kind_of_unit)):
            layers = [choices[layer] for layer in units.layers(unit)]
            chosen = UnitChoice(layers[0].bits, False)
            if unit in units.of_experts:
                first = next(
                    layer for layer in units.layers(unit) if self.shape.layer(layer).experts
                )
                chosen = UnitChoice(choices[first].expert_bits, choices[first].on_host)
            of_unit.append(self.unit_choices.index(chosen))
        return tuple(map(units.layer_of_unit.index, first_layer)), tuple(of_unit)

    def quality(self, assignment: Assignment) -> float:
        """The summed omega of an assignment of `units`."""
        if self.experts_apart:
            chosen = range(len(assignment.bitwidth)), assignment.bitwidth
            return float(self.sensitivity[chosen].sum())
        _, bitwidth = self.expanded(assignment)
        return float(self.omega[range(len(bitwidth)), bitwidth].sum())

    def mean_bits(self, assignment: Assignment) -> float:
        """Mean bits of the layers, by their weights where experts have bits of their own."""
        _, bitwidth = self.expanded(assignment)
        chosen = [self.choices[each] for each in bitwidth]
        if not self.experts_apart:
            return sum(each.bits for each in chosen) / len(chosen)
        weights = weighed = 0
        for layer, each in enumerate(chosen):
            shape = self.shape.layer(layer)
            rest = sum(linear.parameters for linear in shape.layer_linears)
            experts = shape.layer_linear_parameters - rest
            weights += rest + experts
            weighed += rest * each.bits + experts * each.expert_bits
        return weighed / weights


def expert_share(shape: ModelShape) -> float:
    """The share of experts in what a layer of one kind loses by rounding, as `llmpq indicator`
    counts it: every linear errs by the same share of its outputs, and all gates of experts are
    one linear, as are all ups and downs. The k of E that a token asks share its weight there, so
    that neither number counts.
    """
    if shape.experts is None:
        return 0.0
    return _EXPERT_LINEARS / (_EXPERT_LINEARS + len(shape.layer_linears))
