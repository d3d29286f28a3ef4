"""The costs of stages at one pair of micro-batch sizes, once a kind of device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.cluster.device import Device
from planner.costs.communication import Transfers
from planner.costs.latency_model import MicroBatchTimes
from planner.costs.memory import StageEnds
from planner.optimiser.problem import FloatArray, JobPasses
from planner.workload import MicroBatches

if TYPE_CHECKING:
    from planner.costs.model import CostModel


class StageRows:
    """The costs of stages at one pair of sizes, once a kind of device: orders are thousands."""

    def __init__(self, costs: CostModel, sizes: MicroBatches, stages: int) -> None:
        self._costs, self.sizes, self._stages = costs, sizes, stages
        self._seconds: dict[Hashable, list[list[float]]] = {}
        self._units: dict[Hashable, FloatArray] = {}
        self._free: dict[Hashable, float] = {}
        self._hops: dict[Hashable, tuple[float, float]] = {}

    @cached_property
    def passes(self) -> JobPasses | None:
        return self._costs.passes(self.sizes, self._stages)

    @cached_property
    def _times(self) -> MicroBatchTimes:
        return self._costs.times(self.sizes, self._stages)

    @cached_property
    def _transfers(self) -> Transfers:
        return self._costs.transfers(self.sizes, self._stages)

    def layer_seconds(self, devices: Sequence[Device]) -> FloatArray:
        """Seconds of a layer in prefill and in decode by kind and bitwidth: `[N, 2, C * K]`."""
        for device in devices:
            if device.cost_kind not in self._seconds:
                self._seconds[device.cost_kind] = self._seconds_on(device)
        return np.array([self._seconds[device.cost_kind] for device in devices])

    def unit_tables(self, devices: Sequence[Device]) -> FloatArray:
        """Of units of each kind at each choice `[5, N, U * K]`: seconds in prefill and in decode,
        bytes on the device and on the host, and how many of their layers lack the choice.
        """
        for device in devices:
            if device.cost_kind not in self._units:
                each = np.concatenate(
                    [self._part_table(device, False), self._part_table(device, True)], axis=1
                )
                self._units[device.cost_kind] = self._costs.placing.units.summed(each)
        found = np.array([self._units[device.cost_kind] for device in devices])
        return found.swapaxes(0, 1).reshape(len(found[0]), len(devices), -1)

    def _part_table(self, device: Device, experts: bool) -> FloatArray:
        """As `unit_tables`, on one device `[5, C, K]`, of each kind's experts or its rest."""
        costs, dtype, rows = self._costs, self._costs.dtype(device), list[list[list[float]]]()
        held, hosted, lacks = costs.part_bytes(device, experts)
        for kind, shape in enumerate(costs.shape_on(device).kind_shapes):
            if experts and shape.experts is None:
                continue
            times, cells = self._times.of_kind(kind), list[list[float]]()
            parts, copies_s = times.latency.parts, 0.0 if experts else self._copies_s(device, kind)
            for choice, (bits, on_host) in enumerate(costs.placing.unit_choices):
                part = parts.experts if experts else parts.rest
                if on_host and not lacks[len(rows), choice]:
                    part = parts.hosted
                own = replace(times, latency=part)
                cells.append(
                    [
                        own.prefill_s(device, bits, dtype) + copies_s,
                        own.decode_s(device, bits, dtype),
                    ]
                )
            rows.append(cells)
        return np.concatenate([np.moveaxis(np.array(rows), 2, 0), [held, hosted, lacks]])

    def free_bytes(self, places: Sequence[tuple[Device, int]]) -> FloatArray:
        """Bytes left for layers on devices as such stages [N]; negative where others do not fit."""
        return np.array([self._free_bytes(device, j) for device, j in places])

    def hops(self, devices: Sequence[Device]) -> FloatArray:
        """Seconds of the transfer behind each stage per prefill and decode micro-batch [2, N]."""
        onward = [self._hop_s(*pair, self._transfers.onward_s) for pair in pairwise(devices)]
        back = self._hop_s(devices[-1], devices[0], self._transfers.back_s)
        return np.array([*onward, back]).T

    def fixed_s(self, places: Sequence[tuple[Device, int]]) -> FloatArray:
        """Seconds of embedding and head per prefill and per decode micro-batch: `[2, N]`."""
        seconds = np.zeros((2, len(places)))
        head_stage = self._costs.head_stage(self._stages)
        for place, (device, stage) in enumerate(places):
            if stage == 0:
                seconds[:, place] += self._times.embedding_s(device, self._costs.dtype(device))
            if stage == head_stage:
                seconds[:, place] += self._times.final_s(device, self._costs.dtype(device))
        return seconds

    def _seconds_on(self, device: Device) -> list[list[float]]:
        dtype, bits = self._costs.dtype(device), self._costs.options.bits
        kinds = range(len(self._costs.shape.kind_shapes))
        cells = [(self._times.of_kind(kind), each) for kind in kinds for each in bits]
        copies_s = [self._copies_s(device, kind) for kind in kinds for _ in bits]
        return [
            [
                float(times.prefill_s(device, each, dtype)) + copy_s
                for (times, each), copy_s in zip(cells, copies_s, strict=True)
            ],
            [float(times.decode_s(device, each, dtype)) for times, each in cells],
        ]

    def _copies_s(self, device: Device, kind: int) -> float:
        """Seconds in which a layer of a kind restores the heads of a prefill's prompts."""
        return self._times.prefill_requests * self._costs.head_copy_s(device, kind)

    def _free_bytes(self, device: Device, stage: int) -> float:
        is_first, is_last = stage == 0, stage == self._stages - 1
        key = device.cost_kind, is_first, is_last
        if key not in self._free:
            ends = StageEnds.of(stage, self._stages, self._costs.head_on_first)
            held = self._costs.memory_with(device, ends, self.sizes).total
            self._free[key] = float(self._costs.limit_bytes(device) - held)
        return self._free[key]

    def _hop_s(
        self,
        sender: Device,
        receiver: Device,
        seconds: Callable[[Device, Device, str], tuple[float, float]],
    ) -> tuple[float, float]:
        key = sender.cost_kind, receiver.cost_kind, sender.node == receiver.node, seconds.__name__
        if key not in self._hops:
            self._hops[key] = seconds(sender, receiver, self._costs.dtype(sender))
        return self._hops[key]
