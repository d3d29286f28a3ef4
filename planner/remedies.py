"""What would make an infeasible plan fit: a smaller batch, fewer bits, more devices of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.costs import CostModel
from planner.device import Device
from planner.memory import KV_BITWIDTHS
from planner.micro_batches import MicroBatches
from planner.optimiser.capacity import is_feasible
from quant.scheme import BITWIDTHS

MOST_MORE_DEVICES = 32
SMALLEST_SIZES = MicroBatches(prefill=1, decode=1)


def remedies(costs: CostModel, devices: Sequence[Device]) -> str:
    """One sentence of what would fit, each part tried; `devices` is the order that came closest."""
    found = [
        text
        for text in (
            _smaller_cache(costs, devices),
            _smaller_batch(costs, devices),
            _fewer_bits(costs, devices),
            _more_devices(costs, devices),
        )
        if text
    ]
    if not found:
        return "Nothing simple makes it fit: use a smaller model or GPUs with more memory"
    return f"It would fit with {', or '.join(found)}"


def _fits(costs: CostModel, devices: Sequence[Device]) -> bool:
    return is_feasible(costs.problem(devices, SMALLEST_SIZES))


def _smaller_cache(costs: CostModel, devices: Sequence[Device]) -> str:
    """Keys and values in the fewest bits."""
    fewest = min(KV_BITWIDTHS)
    options = replace(costs.options, kv_bits=fewest)
    if costs.kv_bits > fewest and _fits(replace(costs, options=options), devices):
        return f"keys and values in {fewest} bit (--kv_bits {fewest})"
    return ""


def _smaller_batch(costs: CostModel, devices: Sequence[Device]) -> str:
    """The largest batch that fits, if any does."""
    low, high = 0, costs.workload.global_batch
    while low + 1 < high:
        middle = (low + high) // 2
        workload = replace(costs.workload, global_batch=middle)
        fits = _fits(replace(costs, workload=workload), devices)
        low, high = (middle, high) if fits else (low, middle)
    if low:
        return f"--global_bz {low} instead of {costs.workload.global_batch}"
    return ""


def _fewer_bits(costs: CostModel, devices: Sequence[Device]) -> str:
    """The highest bitwidth below those allowed that makes it fit."""
    for bits in reversed([b for b in BITWIDTHS if b < min(costs.options.bits)]):
        allowed = (bits, *costs.options.bits)
        options = replace(costs.options, bits=allowed)
        sensitivity = costs.sensitivity[:, :1].repeat(len(allowed), axis=1)
        if _fits(replace(costs, options=options, sensitivity=sensitivity), devices):
            return f"{bits} bit allowed (--bits)"
    return ""


def _more_devices(costs: CostModel, devices: Sequence[Device]) -> str:
    """How many more of the kind that needs the fewest."""
    best: tuple[int, str] | None = None
    for kind in {device.accelerator.name: device for device in devices}.values():
        most = MOST_MORE_DEVICES if best is None else best[0] - 1
        for count in range(1, most + 1):
            added = [replace(kind, index=1000 + i) for i in range(count)]
            if _fits(costs, [*devices, *added]):
                best = count, kind.accelerator.name
                break
    return f"{best[0]} more {best[1]}" if best else ""
