"""One kernel backend: right against float64, fast against the plain product and the memory.

Weights lie in as many copies as leave the GPU's cache behind, and each call takes the next one.
*eager*: twenty calls from an idle GPU on, launches included, as the runtime makes them today.
*in a graph*: the same kernels replayed, which leaves the GPU's own time.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.findings import Findings, Place, Table
from benchmarks.gpu.measurements.marlin import check_marlin, hold_marlin
from benchmarks.gpu.measurements.models import Recorder
from benchmarks.lab import BFLOAT16_CAPABILITY, seconds_of
from benchmarks.speed.linear import (
    Held,
    Product,
    Result,
    Setting,
    copy_bytes_per_s,
    distinct_shapes,
    hold_packed,
    hold_plain,
    measure,
    random_weight,
)
from quant.backends.cuda.packed import CudaPacked
from quant.backends.cuda.products import PACKED, RESTORED, TENSOR
from quant.backends.kernel_classes import BACKENDS, self_test
from quant.backends.kernel_rule import KernelRule
from quant.backends.table import KERNEL_RULES
from quant.linear import dtype_name
from quant.scheme import LinearShape

MODEL, LARGE_MODEL = "llama-3-8b", "opt-30b"
SMALL = LinearShape(in_features=256, out_features=192)
ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
TURNING_ROWS = (4, 8, 16, 24, 32, 64, 128, 256)
GRAPH_S, MOST_CALLS, MOST_REPLAYS, SAMPLES = 0.005, 64, 5, 3
SHORT_CALL_S = 1e-4
SECONDS = 0.1
"""About, for each case as it runs: a part has some sixty."""
BFLOAT16_SHAPES = 2
GB = 1e9

ROUNDS_ACTIVATIONS = ("cuda_w8a8",)
_ERROR_OF_ROUNDED = 0.03
_ERRORS_IN_UNITS = 2.0
"""Relative error (Frobenius norm) that a right kernel stays below: rounding outputs, and weights
that are restored first, to the compute type costs about 0.3 of its `eps` each; rounding activations
to 8 bit 0.009."""


@dataclass(frozen=True)
class _Bench:
    """Settings that all cases of a part share; `copy_rate` in bytes a second, read and written."""

    findings: Findings
    table: Table
    copy_rate: float
    recorder: Recorder


def run(findings: Findings, place: Place, backend: str) -> None:
    """Measure `backend` in float16, on some shapes in bfloat16 too where the GPU has it."""
    if backend.startswith("bnb"):
        importlib.import_module("bitsandbytes")
    rule = next((each for each in KERNEL_RULES if each.name == backend), None)
    if rule is None:  # another project's
        check_marlin(place.device)
    copy_rate = copy_bytes_per_s(place.device)
    findings.note(f"a copy moves {copy_rate / GB:.0f} GB/s, bytes read and written")
    table = findings.table(
        "", type="{}", out_x_in="{}", rows="{}", eager="{:.1f} us", __of_plain="{:.2f} x",
        in_a_graph="{:.1f} us", of_plain_="{:.2f} x", GB_per_s="{:.0f}", of_copy="{:.0%}",
        error="{:.2%}", kernel_error="{:.4%}",
    )  # fmt: skip
    bench = _Bench(findings, table, copy_rate, Recorder(findings, place.device))
    with torch.inference_mode():
        for setting, shapes in _settings(place):
            if rule is not None:
                _check_self(findings, rule, setting)
            for shape in shapes:
                weight = random_weight(shape, setting)
                hold = hold_marlin if rule is None else partial(hold_packed, rule)
                held = hold_plain(weight, setting), hold(weight, setting)
                for rows in place.size(ROWS, (1, 30)):
                    _measure_rows(bench, shape, held, rows, setting)
        if rule is not None and issubclass(BACKENDS[backend], CudaPacked):
            _turning_point(bench, rule, place)


def _settings(place: Place) -> list[tuple[Setting, list[LinearShape]]]:
    seconds = place.size(SECONDS, 0.0)
    if place.dry_run:
        return [(Setting(place.device, torch.bfloat16, seconds, cache_bytes=0), [SMALL])]
    shapes = list(distinct_shapes([MODEL]))
    largest = max(distinct_shapes([LARGE_MODEL]), key=lambda shape: shape.parameters)
    settings = [(Setting(place.device, torch.float16, seconds), [*shapes, largest])]
    if torch.cuda.get_device_capability(place.device) >= BFLOAT16_CAPABILITY:
        own = Setting(place.device, torch.bfloat16, seconds)
        settings.append((own, shapes[:BFLOAT16_SHAPES]))
    return settings


def _check_self(findings: Findings, rule: KernelRule, setting: Setting) -> None:
    complaint = self_test(BACKENDS[rule.name], setting.dtype, setting.device)
    if complaint is not None:
        findings.complain(f"{rule.name} in {dtype_name(setting.dtype)}: {complaint}")


def _measure_rows(
    bench: _Bench, shape: LinearShape, held: Sequence[Held], rows: int, setting: Setting
) -> None:
    """Measure the plain product and the other one of `held`."""
    plain, own = results = measure(shape, rows, held, setting)
    x = torch.randn(rows, shape.in_features, device=setting.device).to(setting.dtype)
    plain_replayed, replayed = (
        replayed_seconds(bench.recorder, each.backend, each.products, x, result.seconds)
        for each, result in zip(held, results, strict=True)
    )
    ratio = plain_replayed / replayed if plain_replayed and replayed else None
    bytes_per_s = held[1].nbytes / (replayed or own.seconds)
    bench.findings.row(
        bench.table,
        dtype_name(setting.dtype),
        f"{shape.out_features} x {shape.in_features}",
        rows,
        own.seconds * 1e6,
        own.ratio,
        None if replayed is None else replayed * 1e6,
        ratio,
        bytes_per_s / GB,
        bytes_per_s / bench.copy_rate,
        own.error,
        own.kernel_error,
    )
    for each in (plain, own):
        complaint = wrong(each, setting.dtype)
        if complaint is not None:
            bench.findings.complain(complaint)


def wrong(result: Result, dtype: torch.dtype) -> str | None:
    """Describe what is wrong with the output behind `result`, computed in `dtype`; else None."""
    limit = _ERRORS_IN_UNITS * torch.finfo(dtype).eps
    if result.backend in ROUNDS_ACTIVATIONS:
        limit = _ERROR_OF_ROUNDED
    if result.kernel_error <= limit:  # and not NaN
        return None
    return (
        f"{result.backend} computes {result.rows} rows of {result.shape.out_features} x "
        f"{result.shape.in_features} wrongly in {dtype_name(dtype)}: off by "
        f"{result.kernel_error:.2%}, at most {limit:.2%} can be rounding"
    )


def replayed_seconds(
    recorder: Recorder, name: str, products: Sequence[Product], x: torch.Tensor, eager_s: float
) -> float | None:
    """Seconds of one of `products`, each in turn, in a replayed graph of whole turns.

    `eager_s`: of one call, about. The graph is long enough for its launch to be nothing beside it.
    None where it cannot be recorded.
    """
    least = min(MOST_CALLS, math.ceil(GRAPH_S / eager_s))
    calls = list(products) * (math.ceil(least / len(products)) if x.is_cuda else 1)

    def work() -> None:
        for product in calls:
            product(x)

    recorded = recorder.record(f"{name} on {len(x)} rows", work)
    if recorded is None:
        return None
    burst = max(1, min(MOST_REPLAYS, int(GRAPH_S / seconds_of(x.device, recorded.replay))))

    def replays() -> None:  # the GPU does not wait for the next one to be launched
        for _ in range(burst):
            recorded.replay()

    taken = [seconds_of(x.device, replays) for _ in range(SAMPLES)]
    return median(taken) / (len(calls) * burst)


def _turning_point(bench: _Bench, rule: KernelRule, place: Place) -> None:
    """Every way of our CUDA kernels by the number of rows, and the one that was chosen."""
    if place.dry_run:
        bench.findings.note("the ways in which our CUDA kernels multiply have no CPU twin")
        return
    setting = Setting(place.device, torch.float16, SECONDS)
    table = bench.findings.table(
        "Ways to multiply, in a graph, and the one timed as the fastest at first use",
        out_x_in="{}", rows="{}", packed="{:.1f} us", on_tensor_cores="{:.1f} us",
        restored="{:.1f} us", chosen="{}",
    )  # fmt: skip
    backend: Any = BACKENDS[rule.name]
    for shape in (LinearShape(4096, 4096), LinearShape(4096, 14336)):
        weight = random_weight(shape, setting)
        copies = range(setting.copies(rule.nbytes(shape, "float16")))
        packed = [backend.from_weight(weight, setting.dtype, setting.device) for _ in copies]
        kernels = packed[0].kernels(setting.dtype)
        for rows in TURNING_ROWS:
            x = torch.randn(rows, shape.in_features, device=setting.device).half()
            seconds = {
                way: replayed_seconds(
                    bench.recorder, rule.name, [_product(each, way) for each in packed], x,
                    SHORT_CALL_S,
                )
                for way in kernels.ways
            }  # fmt: skip
            found = [seconds.get(way) for way in (PACKED, TENSOR, RESTORED)]
            bench.findings.row(
                table,
                f"{shape.out_features} x {shape.in_features}",
                rows,
                *(each and each * 1e6 for each in found),
                kernels.way_for(packed[0].codes, rows),
            )


def _product(packed: CudaPacked, way: str) -> Product:
    kernels = packed.kernels(torch.float16)
    assert kernels is not None, "on a GPU"
    return lambda x: kernels.multiply(packed.codes, x, way=way)
