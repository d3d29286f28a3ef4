"""Ways of rounding weights: what they cost, and what they leave of the demo model.

    python -m benchmarks.rounding [--quick] [--part costs|quality]

`costs` times what loading a layer takes: rounding and packing, the roundings in turns, between two
probes of the machine's pace. `quality` is the part of `benchmarks.quantization` without other
libraries, which has more models. One thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.machine import pace_probe, processor_name
from benchmarks.quantization.__main__ import main as compare_quality
from quant.backends.kernel_classes import BACKENDS
from quant.canonical import dequantize, quantize
from quant.gptq.options import GptqOptions
from quant.gptq.rounding import gptq
from quant.importance.statistics import InputStatistics
from quant.rounding.ways import Rounding
from quant.scheme import ROUNDINGS

LAYER = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}
"""`[out, in]` of the linears of a LLaMA-7B decoder layer, and how many there are of each."""

BITS = (3, 4, 8)
KERNELS = {3: "int3pack", 4: "int4pack", 8: "int8pack"}
"""The backend that packs the layer: those of any CPU in bfloat16."""

_CPU = torch.device("cpu")


def layer_seconds(repetitions: int) -> dict[tuple[int, str], float]:
    """Rounding and packing a layer, by bits and rounding: sums of medians of interleaved runs."""
    total: dict[tuple[int, str], float] = {}
    generator = torch.Generator().manual_seed(0)
    for shape, count in LAYER.items():
        weight = torch.randn(shape, generator=generator).bfloat16()
        squares = torch.rand(shape[1], generator=generator) ** 4
        inputs = InputStatistics(squares, squares.sqrt())
        runs: dict[tuple[int, str], list[float]] = {(b, r): [] for b in BITS for r in ROUNDINGS}
        for turn in range(repetitions + 1):  # the first compiles
            for (bits, rounding), seconds in runs.items():
                began = time.perf_counter()
                kernel = BACKENDS[KERNELS[bits]]
                kernel.from_weight(weight, torch.bfloat16, _CPU, Rounding(rounding), inputs)
                if turn:
                    seconds.append(time.perf_counter() - began)
        for key, seconds in runs.items():
            total[key] = total.get(key, 0.0) + count * statistics.median(seconds)
    return total


def squared_errors() -> dict[tuple[int, str, str], float]:
    """Squared error relative to the squared weights, by bits, rounding and distribution."""
    torch.manual_seed(0)
    weights = {
        "normal": torch.randn(1024, 1024),
        "Student t, 5 degrees": torch.distributions.StudentT(5.0).sample((1024, 1024)),
    }
    found = {}
    for name, weight in weights.items():
        for bits in BITS:
            for rounding in ROUNDINGS:
                restored = dequantize(quantize(weight, bits, rounding=Rounding(rounding)))
                error = (restored - weight).square().sum() / weight.square().sum()
                found[bits, rounding, name] = float(error)
    return found


def print_costs(repetitions: int) -> None:
    """Both tables of the rounding alone."""
    probe = pace_probe()
    before, seconds = probe(), layer_seconds(repetitions)
    pace, errors = before.mean(probe()), squared_errors()
    names = sorted({name for _, _, name in errors})
    print("\nRounding and packing a LLaMA-7B decoder layer while it loads:\n")
    print(f"| bits | rounding | seconds | times nearest | {' | '.join(names)} |")
    print(f"|---|---|---|---|{'---|' * len(names)}")
    for bits in BITS:
        for rounding in ROUNDINGS:
            ratio = seconds[bits, rounding] / seconds[bits, "nearest"]
            cells = " | ".join(f"{errors[bits, rounding, name]:.2e}" for name in names)
            print(
                f"| {bits} | {rounding} | {seconds[bits, rounding]:.2f} | {ratio:.2f} | {cells} |"
            )
    print("\nThe last columns are squared errors relative to the squared weights.")
    print(
        f"Pace of the machine: {pace.matmul_gflop_per_s:.0f} GFLOP/s in bfloat16, a copy "
        f"{pace.copy_gbyte_per_s:.1f} GB/s."
    )


def print_gptq_seconds(size: int) -> None:
    """GPTQ of one square linear whose X^T X is given."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator)
    inputs = torch.randn(2 * size, size, generator=generator)
    gram = inputs.t() @ inputs
    began = time.perf_counter()
    gptq(weight, gram, 4, GptqOptions())
    print(f"\nGPTQ of a {size} x {size} linear at 4 bit: {time.perf_counter() - began:.1f} s.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and tokens")
    parser.add_argument("--part", choices=("all", "costs", "quality"), default="all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.part != "quality":
        print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
        print_costs(1 if options.quick else 5)
        print_gptq_seconds(1024 if options.quick else 4096)
    if options.part != "costs":
        quality = ["--models", "demo", "--parts", "ours"]
        compare_quality(quality + ["--quick"] * options.quick)


if __name__ == "__main__":
    main()
