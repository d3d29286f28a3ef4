"""Seconds of decoder layers and of the LM head by the datasheet's estimate, and as they are.

Layers pass as in a stage, from an idle GPU whose cache holds none of their weights. What is
measured is kept as a profile, by which part `plan` predicts once more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, quantiles

import torch

from actors.profiling.head import TimedHead
from actors.profiling.layers import TimedLayers
from actors.profiling.task import Timed
from benchmarks.gpu.findings import Findings, Place
from benchmarks.gpu.measurements.models import (
    accelerator_of,
    backends_here,
    note_substitutes,
    opt_config,
    planned_device,
    quiet,
    release,
)
from benchmarks.lab import evictor, seconds_of
from planner.cluster.device import Device
from planner.costs.roofline import RooflineLatency
from planner.model.finding import shape_from_config
from planner.model.shape import ModelShape
from planner.profiles.design import DesignSpace, LayerWorkload, design
from planner.profiles.layer_terms import HEAD, LayerTerms
from planner.profiles.rows import ProfileRow, write_profiles
from quant.devices import local_processor
from quant.linear import LayerForm
from quant.scheme import BITWIDTHS, HEAD_BITWIDTHS

PROFILE = "layer_profile.csv"
BUDGET_S = 20.0
"""For each bitwidth; what is left of its workloads then is not measured."""
MOST_PASSES = 20
LONG_S = 0.5


@dataclass(frozen=True)
class _Timed:
    """One workload: median seconds of a layer or of the head, and their interquartile range over
    it.
    """

    is_head: bool
    bits: int
    workload: LayerWorkload
    seconds: float
    spread: float
    passes: int


def run(findings: Findings, place: Place, _: str) -> None:
    """Measure a design of workloads at every bitwidth, and hold the estimates against them."""
    quiet()
    accelerator_of(place)
    device, config = planned_device(place), opt_config(place)
    dtype = device.compute_dtype()
    shape = shape_from_config("opt", json.loads(config.to_json_string()))
    backends = backends_here(place, BITWIDTHS, dtype)
    note_substitutes(findings, place, backends, dtype)
    table = findings.table(
        "", of="{}", bits="{}", backend="{}", phase="{}", requests="{}", length="{}",
        estimated="{:.1f} us", measured="{:.1f} us", measured_over_estimated="{:.2f}",
        spread="{:.0%}",
    )  # fmt: skip
    found: list[_Timed] = []
    ratios: dict[tuple[str, int, str], list[float]] = {}
    cases = [("layer", bits) for bits in BITWIDTHS] + [(HEAD, bits) for bits in HEAD_BITWIDTHS]
    for what, bits in cases:
        timed: list[_Timed] = []
        with findings.trying(f"{what}, {bits} bit"):
            timed += _timed(place, what, bits, dtype, backends[bits])
        release(place.device)
        for each in timed:
            found.append(each)
            estimated = _estimated_s(shape, device, each, dtype)
            ratio = each.seconds / estimated
            work = each.workload
            ratios.setdefault((what, bits, work.phase), []).append(ratio)
            findings.row(
                table, what, bits, backends[bits], work.phase, work.batch_size, work.length,
                estimated * 1e6, each.seconds * 1e6, ratio, each.spread,
            )  # fmt: skip
    _summarise(findings, ratios)
    write_profiles(place.kept / PROFILE, _rows(found, shape, device, dtype))


def profile_of(place: Place) -> Path | None:
    """The profile that this part has measured, None where it has not."""
    path = place.kept / PROFILE
    return path if path.exists() else None


def _summarise(findings: Findings, ratios: dict[tuple[str, int, str], list[float]]) -> None:
    table = findings.table(
        "Measured over estimated", of="{}", bits="{}", phase="{}", geometric_mean="{:.2f}",
        least="{:.2f}", most="{:.2f}",
    )  # fmt: skip
    for case, own in ratios.items():
        findings.row(table, *case, geometric_mean(own), min(own), max(own))


def _estimated_s(shape: ModelShape, device: Device, each: _Timed, dtype: str) -> float:
    work = each.workload
    if each.is_head:
        latency = RooflineLatency(shape.with_all(head_bits=each.bits))
        return latency.final_s(device, work.batch_size, dtype)
    roofline = RooflineLatency(shape)
    estimate = roofline.layer_prefill_s if work.phase == "prefill" else roofline.layer_decode_s
    return estimate(device, each.bits, work.batch_size, work.length, dtype)


def _timed(place: Place, what: str, bits: int, dtype: str, backend: str) -> Iterator[_Timed]:
    device, config = place.device, opt_config(place)
    form = LayerForm(bits, local_processor(device), getattr(torch, dtype), device, backend)
    timed: Timed = TimedHead(config, form) if what == HEAD else TimedLayers(config, form)
    evict = evictor(device)
    space = place.size(DesignSpace(), DesignSpace((1, 2), 4, 16, 32, 32))
    points = place.size(8, 4)
    workloads = design(space, "prefill", points) + design(space, "decode", points)
    if what == HEAD:
        workloads = tuple(LayerWorkload("decode", rows, 0) for rows in space.batch_sizes)
    end = time.monotonic() + BUDGET_S
    for workload in workloads:
        if time.monotonic() > end:
            return
        prepared = timed.prepare(workload)
        taken: list[float] = []
        while len(taken) < place.size(MOST_PASSES, 2) and sum(taken) < LONG_S:
            evict()
            seconds = seconds_of(device, lambda: timed.pass_through(prepared))  # noqa: B023
            taken.append(seconds / prepared.copies)
        low, middle, high = quantiles(
            taken if len(taken) > 1 else taken * 2, n=4, method="inclusive"
        )
        yield _Timed(what == HEAD, bits, workload, middle, (high - low) / middle, len(taken))


def _rows(
    found: Iterable[_Timed], shape: ModelShape, device: Device, dtype: str
) -> Iterator[ProfileRow]:
    for each in found:
        is_prefill = each.workload.phase == "prefill"
        yield ProfileRow(
            device=device.accelerator.name,
            model=shape.name,
            layer=LayerTerms.of_head(shape) if each.is_head else LayerTerms.of(shape),
            intermediate_size=shape.intermediate_size,
            phase=each.workload.phase,
            bits=each.bits,
            batch_size=each.workload.batch_size,
            prompt_length=each.workload.length if is_prefill else 1,
            context_length=0 if is_prefill else each.workload.length,
            seconds=each.seconds,
            dtype=dtype,
            threads=device.threads,
            spread=each.spread,
            repetitions=each.passes,
            unlike=each.workload.unlike,
            source=PROFILE,
        )
