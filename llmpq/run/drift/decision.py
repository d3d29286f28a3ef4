"""Whether another plan saves more time than the switch to it costs, and which way costs least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llmpq.run.drift.lengths import OutputLengths
from planner.cluster.device import Slowdown
from planner.plan.simulate import time_scale
from planner.plan.spec import PlanSpec, StagePlan

MARGIN = 1.5
"""A switch has to save so many times its cost: both are estimates, and a start may take longer."""


@dataclass(frozen=True)
class RunLengths:
    """Mean tokens of prompts and outputs, the longest output, and the mean tokens that rows in
    flight have, and still lack.
    """

    prompt: float
    output: float
    longest: float
    so_far: float

    @classmethod
    def of(cls, mean_prompt: float, outputs: OutputLengths) -> RunLengths:
        """The lengths that were measured."""
        return cls(mean_prompt, outputs.mean, outputs.longest, outputs.mean_so_far)


@dataclass(frozen=True)
class Outlook:
    """What is left of a run: `rows_left` that no stage has yet, `waiting` ones that wait for a
    slot, and how the present plan gets on.

    `tokens_per_s` is measured, `start_s` are the seconds in which the stages started before,
    `slowdowns` the measured shares of the planned seconds by device.
    """

    rows_left: int
    waiting: int
    lengths: RunLengths
    tokens_per_s: float
    start_s: float
    slowdowns: Mapping[str, Slowdown] = field(default_factory=dict)


@dataclass(frozen=True)
class Switch:
    """A switch to `plan`: what is in flight is finished first ("drain"), or goes on from its tokens
    so far ("replay"). It saves `saved_s`, and costs `cost_s` of these. Where nothing but the
    schedule differs, the same stages go on by it ("follow"): that costs nothing.
    """

    plan: PlanSpec
    how: Literal["drain", "replay", "follow"]
    saved_s: float = 0.0
    cost_s: float = 0.0

    @property
    def is_worth_it(self) -> bool:
        """Whether it saves clearly more than it costs."""
        return self.saved_s > MARGIN * self.cost_s


def best_switch(old: PlanSpec, new: PlanSpec, outlook: Outlook) -> Switch:
    """The cheaper way from `old` to `new`.

    Both plans' seconds are by one formula, in proportion to what was measured of the old one: what
    the formula leaves out slows both. Few rows take as long as a turn of all slots.
    """
    lengths, slots = outlook.lengths, old.workload.global_batch
    old_s, new_s = seconds_per_row(old, lengths, outlook.slowdowns), seconds_per_row(new, lengths)
    by_formula = lengths.output / outlook.tokens_per_s / old_s

    def saved_s(rows: float) -> float:
        took_s = max(rows, slots) * old_s
        return by_formula * (took_s - max(rows, new.workload.global_batch) * new_s)

    token_s = slots / outlook.tokens_per_s  # for each row in flight
    idle_s = (lengths.longest - lengths.so_far) * token_s
    left = outlook.rows_left
    drain = Switch(new, "drain", saved_s(left) if left else 0.0, outlook.start_s + idle_s)
    again_s = slots * _prefill_s_per_row(new, lengths.prompt + lengths.so_far)
    left_in_slots = slots * (1 - lengths.so_far / lengths.output)
    rows = left + outlook.waiting + left_in_slots
    replay = Switch(new, "replay", saved_s(rows), outlook.start_s + again_s)
    return max(drain, replay, key=lambda switch: switch.saved_s - switch.cost_s)


def seconds_per_row(
    plan: PlanSpec, lengths: RunLengths, slowdowns: Mapping[str, Slowdown] | None = None
) -> float:
    """Seconds of a row with all slots in use: its prefill, and its share of decode rounds, by the
    slowest stage or by the way round all of them.
    """
    slots, sizes = plan.workload.global_batch, plan.micro_batches
    groups = -(-slots // sizes.decode)
    decode_s = [
        _decode_s(plan, stage, lengths) * _factor(slowdowns or {}, stage).decode
        for stage in plan.stages
    ]
    hops_s = sum(stage.decode_comm_s for stage in plan.stages)
    round_s = max(groups * max(decode_s), sum(decode_s) + hops_s)
    requests = min(slots, groups * plan.timed_sizes[1])
    decode_row_s = (lengths.output - 1) * round_s * time_scale(plan) / requests
    return _prefill_s_per_row(plan, lengths.prompt, slowdowns) + decode_row_s


def _prefill_s_per_row(
    plan: PlanSpec, tokens: float, slowdowns: Mapping[str, Slowdown] | None = None
) -> float:
    """Seconds of the slowest stage for a prompt of so many tokens in a planned micro-batch."""
    slowest_s = max(
        _prefill_s(plan, stage, tokens) * _factor(slowdowns or {}, stage).prefill
        for stage in plan.stages
    )
    return slowest_s * time_scale(plan)


def _prefill_s(plan: PlanSpec, stage: StagePlan, tokens: float) -> float:
    if stage.modelled is None:
        return stage.prefill_s * tokens / plan.timed_sizes[0]
    size = plan.micro_batches.prefill
    return stage.modelled.compute_s(False, np.full(size, round(tokens))) / size


def _decode_s(plan: PlanSpec, stage: StagePlan, lengths: RunLengths) -> float:
    if stage.modelled is None:
        return stage.decode_s
    requests, context = max(1, round(plan.timed_sizes[1])), round(lengths.prompt + lengths.so_far)
    return stage.modelled.compute_s(True, np.full(requests, context))


def _factor(slowdowns: Mapping[str, Slowdown], stage: StagePlan) -> Slowdown:
    return slowdowns.get(stage.device, Slowdown())


def is_same(old: PlanSpec, new: PlanSpec) -> bool:
    """Whether both plans run the same: devices, layers, bits, slots, micro-batches and policy."""
    return _runs(old) == _runs(new)


def _runs(plan: PlanSpec) -> object:
    stages = [
        (stage.device_names, stage.layers, stage.bitwidths, stage.dtype) for stage in plan.stages
    ]
    sizes = plan.workload, plan.micro_batches, plan.policy
    return stages, sizes, plan.kv_bits, plan.head_on_first
