"""Dividing a cluster's devices into those that prefill and those that decode (ExeGPT section 4.1).

WAA-C divides them by computing time: both sides should serve equally many requests per second.
WAA-M divides them by memory: both should be filled alike. With equal devices that is a share of
their number, as published; the printed floors leave a device over, so the two numbers nearest to
the share are tried. Where kinds differ, every number of each kind may prefill, so that devices rich
in computing can go to one side and those rich in bandwidth to the other; the best balanced of all
divisions are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.cluster.device import Device
from planner.cluster.spec import equal_devices
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel
from planner.scheduling import ScheduleKind
from planner.workload import Job

MOST_DIVISIONS = 512
"""Divisions that are looked at: of larger clusters, devices go to a side in steps."""

TRIED_ALIKE, TRIED_MIXED = 2, 6
"""Divisions for which layers are placed, of equal devices and of different ones."""

PREFILL_TOKENS, DECODING = 2048, 64
"""Tokens of a prefill and requests of a decode step by which devices are compared."""


@dataclass(frozen=True)
class PhaseDivision:
    """The devices that prefill, and those that decode."""

    prefill: tuple[Device, ...]
    decode: tuple[Device, ...]


def balanced_divisions(kind: ScheduleKind, costs: CostModel, job: Job) -> list[PhaseDivision]:
    """The divisions to try, first the best balanced by what the kind goes by."""
    found = list(divisions(equal_devices(costs.cluster)))
    imbalance = _by_computing(costs, job) if kind == "waa-c" else _by_memory(costs, job)
    kinds = {device.cost_kind for device in costs.cluster.devices}
    tried = TRIED_ALIKE if len(kinds) == 1 else TRIED_MIXED
    return sorted(found, key=imbalance)[:tried]


def divisions(pools: Sequence[Sequence[Device]]) -> Iterator[PhaseDivision]:
    """Yield the divisions with some of each pool of equal devices on either side, any number where
    that gives few enough; none with an empty side.
    """
    steps = 1
    while math.prod(len(_counts(len(pool), steps)) for pool in pools) > MOST_DIVISIONS:
        steps *= 2
    for counts in itertools.product(*(_counts(len(pool), steps) for pool in pools)):
        chosen = list(zip(pools, counts, strict=True))
        prefill = tuple(device for pool, count in chosen for device in pool[:count])
        decode = tuple(device for pool, count in chosen for device in pool[count:])
        if prefill and decode:
            yield PhaseDivision(prefill, decode)


def _counts(most: int, step: int) -> list[int]:
    return sorted({*range(0, most + 1, step), most})


def _by_computing(costs: CostModel, job: Job) -> Callable[[PhaseDivision], float]:
    """How unlike the requests per second of both sides are, each device with all layers."""
    rates = {device.name: _rates(costs, job, device) for device in costs.cluster.devices}

    def imbalance(division: PhaseDivision) -> float:
        prefill = sum(rates[device.name][0] for device in division.prefill)
        decode = sum(rates[device.name][1] for device in division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _rates(costs: CostModel, job: Job, device: Device) -> tuple[float, float]:
    """Requests per second that a device with all layers prefills, and that it decodes, at the
    bitwidth that is fastest for each.
    """
    lengths, latency, dtype = job.lengths, costs.latency, costs.dtype(device)
    prompt, context = round(lengths.mean_prompt), round(lengths.mean_context)
    at_once = max(1, PREFILL_TOKENS // prompt)
    bits = costs.options.bits
    prefill_s = min(latency.layer_prefill_s(device, b, at_once, prompt, dtype) for b in bits)
    step_s = min(latency.layer_decode_s(device, b, DECODING, context, dtype) for b in bits)
    steps = max(lengths.mean_output - 1, 1e-3)
    layers = costs.shape.layers
    return at_once / (layers * prefill_s), DECODING / (layers * step_s * steps)


def _by_memory(costs: CostModel, job: Job) -> Callable[[PhaseDivision], float]:
    """How unlike the filled shares of both sides are, with as many requests as fill all devices.

    Both have all layers: at the most bits with which two copies fill half of the memory at most,
    else at the fewest.
    """
    devices = costs.cluster.devices
    first, offered = devices[0], _bytes(costs, devices)
    weights = [_weights(costs, first, bits) for bits in costs.options.bits]
    copy = max((each for each in weights if 4 * each <= offered), default=min(weights))
    token = costs.shape.layers * costs.kv_bytes_per_layer(first) / costs.workload.kv_tokens
    prompts, whole = job.lengths.mean_prompt, job.lengths.mean_reserved
    decoding = max(1.0, job.lengths.mean_output - 1)  # for each newcomer
    newcomers = max(0.0, offered - 2 * copy) / (token * (prompts + decoding * whole))

    def imbalance(division: PhaseDivision) -> float:
        prefill = (copy + newcomers * token * prompts) / _bytes(costs, division.prefill)
        decode = (copy + newcomers * token * decoding * whole) / _bytes(costs, division.decode)
        return abs(math.log(prefill / decode))

    return imbalance


def _bytes(costs: CostModel, devices: Sequence[Device]) -> float:
    return float(sum(costs.limit_bytes(device) for device in devices))


def _weights(costs: CostModel, device: Device, bits: int) -> float:
    dtype = costs.dtype(device)
    return costs.shape.layers * layer_weight_bytes(costs.shape, bits, device, dtype)
