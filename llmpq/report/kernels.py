"""Why fewer bits are not faster on a device: times of a layer, and what its kernels do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.report.formatting import listed, seconds
from llmpq.report.reasons import LEAST_GAIN
from planner.cluster.device import Device
from planner.costs.model import CostModel
from planner.explanation.planned_assignment import PlannedAssignment, planned_assignment
from planner.plan.spec import PlanSpec, StagePlan
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import rule_for
from quant.scheme import DTYPE_BYTES, LinearShape

_SHAPE = LinearShape(4096, 4096)


@dataclass(frozen=True)
class BitsTimes:
    """Seconds of a layer of `bits` over a full micro-batch of each phase, and how it multiplies."""

    bits: int
    kernel: str
    way: str
    prefill_s: float
    decode_s: float

    def slower_phases(self, other: BitsTimes) -> list[str]:
        """The phases in which it takes longer than `other`."""
        least = 1 + LEAST_GAIN
        is_slower = {
            "prefill": self.prefill_s > other.prefill_s * least,
            "decode": self.decode_s > other.decode_s * least,
        }
        return [phase for phase, slower in is_slower.items() if slower]


@dataclass(frozen=True)
class KernelReason:
    """A kind of device on which fewer bits than the plan's are slower, with all its bitwidths."""

    device: str
    sentence: str
    times: Sequence[BitsTimes]


def kernel_reasons(plan: PlanSpec, costs: CostModel) -> list[KernelReason]:
    planned = planned_assignment(plan, costs)
    found: dict[str, KernelReason] = {}
    for stage in plan.stages:
        reason = _of_stage(planned, stage)
        if reason is not None:
            found.setdefault(reason.sentence, reason)
    return list(found.values())


def _of_stage(planned: PlannedAssignment, stage: StagePlan) -> KernelReason | None:
    unit = _typical_unit(planned, stage.index)
    if unit is None:
        return None
    choices = [each for each in planned.usable(stage.index, unit) if not planned.chosen(each)[1]]
    every = [_times(planned, stage, (unit, choice)) for choice in choices]
    used = {planned.chosen(planned.bitwidth[each]).bits for each in _alike(planned, stage, unit)}
    present = [each for each in every if each.bits in used]
    for own in sorted(present, key=lambda each: each.bits):
        slower = [each for each in every if each.bits < own.bits and each.slower_phases(own)]
        if slower:
            slower.sort(key=lambda each: -each.bits)
            sentence = _sentence(stage, _subject(planned, unit), (own, *slower))
            return KernelReason(stage.accelerator, sentence, every[::-1])
    return None


def _typical_unit(planned: PlannedAssignment, stage: int) -> int | None:
    """The first unit of the most usual kind of a stage, experts, with other kernels, apart."""
    units = range(*planned.first_layer[stage : stage + 2])
    kinds = {unit: planned.cell(unit, 0) for unit in units if planned.part(unit) != "experts"}
    counts = Counter(kinds.values())
    return max(kinds, key=lambda unit: counts[kinds[unit]], default=None)


def _alike(planned: PlannedAssignment, stage: StagePlan, unit: int) -> list[int]:
    units = range(*planned.first_layer[stage.index : stage.index + 2])
    return [each for each in units if planned.cell(each, 0) == planned.cell(unit, 0)]


def _subject(planned: PlannedAssignment, unit: int) -> str:
    if planned.problem.is_even:
        return "A layer"
    apart = " without its experts" if planned.part(unit) == "rest" else ""
    return f"Layer {planned.layers(unit).start}{apart}"


def _times(planned: PlannedAssignment, stage: StagePlan, at: tuple[int, int]) -> BitsTimes:
    """A unit at a choice; groups of layers have the seconds of their layers together."""
    problem, bits = planned.problem, planned.chosen(at[1]).bits
    prefill_s, decode_s = (
        float(table[stage.index, planned.cell(*at)]) / planned.group
        for table in (problem.prefill_s, problem.decode_s)
    )
    device = planned.devices[stage.index]
    emulated = device.emulated and not device.stand_in and stage.dtype != "float32"
    dtype = device.accelerator.default_dtype if emulated else stage.dtype
    processor = device.accelerator.processor
    rule = rule_for(processor, bits, _SHAPE, dtype, decode_rows=planned.sizes.decode)
    return BitsTimes(bits, rule.name, _way(rule, device, dtype), prefill_s, decode_s)


def _sentence(stage: StagePlan, subject: str, times: Sequence[BitsTimes]) -> str:
    """Say that all but the first of `times` are slower than it."""
    own, *slower = times
    bits: dict[str, list[str]] = {}
    for each in slower:
        bits.setdefault(_phases(each.slower_phases(own)), []).append(str(each.bits))
    names = [f"{listed(alike)} bit in {phases}" for phases, alike in bits.items()]
    prefill = listed([seconds(each.prefill_s) for each in slower])
    decode = listed([seconds(each.decode_s) for each in slower])
    way = slower[0].way
    return (
        f"On {stage.accelerator} these are slower than {own.bits} bit: {listed(names)}. {subject} "
        f"takes {prefill} instead of {seconds(own.prefill_s)} for a prefill micro-batch, and "
        f"{decode} instead of {seconds(own.decode_s)} for a decode step. The "
        f"{slower[0].bits}-bit kernel ({slower[0].kernel}) {way}; that of {own.bits} bit "
        f"({own.kernel}) {own.way}."
    )


def _phases(names: Sequence[str]) -> str:
    return "both phases" if len(names) > 1 else names[0]


def _way(rule: KernelRule, device: Device, dtype: str) -> str:
    """How a kernel multiplies; begins with a verb."""
    cost = rule.cost_of(device.accelerator.processor, _SHAPE, dtype)
    if rule.kernel is None:
        return f"multiplies weights of {8 * DTYPE_BYTES[dtype]} bit as they are"
    if cost.integer:
        rate = "at the rate of its int8 units" if device.accelerator.int8_ops else "as integers"
        return f"multiplies the codes themselves, {rate}"
    restored = (
        f"restores weights to 16 bit in memory and reads them again, {cost.passes:g} bytes for "
        "each weight"
    )
    if cost.restores_from <= 1:
        return restored
    few = "multiplies few rows without the matrix units"
    if cost.scalar is None:
        few = "reads the codes directly for few rows"
    return f"{few}, and from {cost.restores_from} rows on {restored}"
