"""The layer latencies that LLM-PQ's authors published in 2023, and rows extrapolated from them.

Measured are T4 and V100 at all bitwidths and P100 at 4 and 16 bit. What is missing is derived from
the measured row of the device named below, by a rule written down before any table was computed:

P100 at 3 and 8 bit: its own 4- and 16-bit rows times the ratio of the two bitwidths on V100, which
like P100 has no integer tensor cores.

A100 and A800, prefill: 16 bit from V100 by the fp16 rate; 8 bit from T4, which has integer tensor
cores too, by the int8 rate; 3 and 4 bit from V100 by the fp32 rate, as their kernels used no tensor
cores. Decode: 3, 4 and 16 bit from V100 by memory bandwidth; 8 bit as on T4, since LLM.int8() took
6.1 to 7.9 ms on T4 and 7.3 to 8.1 ms on V100 of nearly three times the bandwidth, so that kernel
launches bound it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from planner.cluster.accelerators import Accelerator, find_accelerator
from planner.profiles.rows import ProfileRow, read_profiles

T4, V100, P100 = "T4-16GB", "V100-SXM2-32GB", "P100-PCIE-12GB"
EXTRAPOLATED_DEVICES = ("A100-SXM4-40GB", "A800-SXM4-80GB")
P100_FROM = {3: 4, 8: 16}

Rate = Literal["fp16_flops", "int8_ops", "fp32_flops", "memory_bytes_per_s"]


@dataclass(frozen=True)
class Scaling:
    """Times of `device` are divided by the ratio of `rate`; None leaves them."""

    device: str
    rate: Rate | None


AMPERE_FROM = {
    ("prefill", 16): Scaling(V100, "fp16_flops"),
    ("prefill", 8): Scaling(T4, "int8_ops"),
    ("prefill", 4): Scaling(V100, "fp32_flops"),
    ("prefill", 3): Scaling(V100, "fp32_flops"),
    ("decode", 16): Scaling(V100, "memory_bytes_per_s"),
    ("decode", 8): Scaling(T4, None),
    ("decode", 4): Scaling(V100, "memory_bytes_per_s"),
    ("decode", 3): Scaling(V100, "memory_bytes_per_s"),
}


def profile_rows(measured_csv: Path) -> tuple[ProfileRow, ...]:
    """Measured rows and what is extrapolated from them."""
    measured = read_profiles(measured_csv)
    return (*measured, *_pascal_rows(measured), *_ampere_rows(measured))


def _pascal_rows(measured: tuple[ProfileRow, ...]) -> Iterator[ProfileRow]:
    seconds = {_key(row): row.seconds for row in measured}
    for bits, base in P100_FROM.items():
        for row in measured:
            if (row.device, row.bits) == (P100, base):
                wanted = replace(row, device=V100, bits=bits)
                ratio = seconds[_key(wanted)] / seconds[_key(replace(wanted, bits=base))]
                yield replace(row, bits=bits, seconds=row.seconds * ratio)


def _ampere_rows(measured: tuple[ProfileRow, ...]) -> Iterator[ProfileRow]:
    for name in EXTRAPOLATED_DEVICES:
        for row in measured:
            scaling = AMPERE_FROM[row.phase, row.bits]
            if row.device == scaling.device:
                faster = _ratio(find_accelerator(name), find_accelerator(row.device), scaling.rate)
                yield replace(row, device=name, seconds=row.seconds / faster)


def _ratio(wanted: Accelerator, known: Accelerator, rate: Rate | None) -> float:
    """How many times faster `wanted` is by its datasheet."""
    if rate is None:
        return 1.0
    rates = [getattr(accelerator, rate) for accelerator in (wanted, known)]
    if None in rates:
        raise ValueError(f"the registry knows no {rate} of {wanted.name} or {known.name}")
    return float(rates[0] / rates[1])


def _key(row: ProfileRow) -> tuple[str, str, int, int]:
    return row.device, row.phase, row.bits, row.batch_size
