"""What is chosen at equal memory with 5 and 6 bit beside 3, 4, 8 and 16, and what that loses.

    python -m benchmarks.quantization.more_bitwidths [--text FILE] [--calibration FILE]

SmolLM2, its layers measured as `llmpq indicator` does on the calibration text. Bits of layers have
the least summed sensitivity within the bytes of uniform 4 bit, and of 5 and 6.5 bits a weight;
measured is the divergence on held-out text, weights rounded, products in float32.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.lab import PAPER_BITS, header, processor_name
from benchmarks.quantization.models import smollm2, texts_for
from benchmarks.quantization.quality import (
    Bits,
    Measured,
    Setting,
    choose,
    importance_of,
    layer_bytes,
)
from llmpq.quality.omega import measure_omega
from llmpq.quality.options import IndicatorOptions
from planner.model.finding import model_shape
from quant.scheme import BITWIDTHS, WEIGHTED

BITS_A_WEIGHT = (5.0, 6.5)


def told(bits: Bits) -> str:
    counts = Counter(bits)
    return ", ".join(f"{counts[each]} at {each}" for each in sorted(counts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, nargs="+", help="held-out text")
    parser.add_argument("--calibration", type=Path, nargs="+", help="calibration text")
    parser.add_argument("--tokens", type=int, default=2048, help="most of the held-out text")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.set_defaults(quick=False)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = smollm2()
    shape, texts = model_shape(str(model)), texts_for(model, options)
    importance = importance_of(model, shape)
    setting = Setting(model, shape, layer_bytes(shape), texts.held_out, WEIGHTED, importance)
    documents = [tuple(map(int, row)) for row in texts.calibration.token_ids]
    omega = measure_omega(model, documents, IndicatorOptions(bits=BITWIDTHS, device="cpu"))
    weights = shape.layers * sum(linear.parameters for linear in shape.layer_linears)
    budgets = [setting.bytes_of((4,) * shape.layers), *(b * weights / 8 for b in BITS_A_WEIGHT)]
    rows = [
        (budget, name, choose(omega.matrix, setting, budget, bits))
        for budget in budgets
        for name, bits in (("3 4 8 16", PAPER_BITS), ("3 4 5 6 8 16", BITWIDTHS))
    ]
    measured = Measured(setting)
    measured.measure(bits for *_, bits in rows)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}\n")
    print(header("bits a weight | of | chosen | bits a weight | forecast, nats | measured | ± 1 σ"))
    for budget, name, bits in rows:
        found = measured.known[bits]
        print(
            f"| {8 * budget / weights:.2f} | {name} | {told(bits)} "
            f"| {8 * setting.bytes_of(bits) / weights:.2f} | {omega.summed(bits):.4f} "
            f"| {found.divergence or 0:.4f} | {found.divergence_error or 0:.4f} |"
        )


if __name__ == "__main__":
    main()
