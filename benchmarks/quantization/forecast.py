"""What plans say of quality, beside what is measured: models at one bitwidth, and at mixtures.

    python -m benchmarks.quantization.forecast [--models smollm2 demo] [--layers] [--anchors]
    python -m benchmarks.quantization.forecast --model FOLDER --text TEXT --calibration TEXT

`calibrated` is what a plan says that has no measured layers (`planner.profiles.calibration`), as
times what is measured; with --layers also what one says with the omega file that `llmpq indicator`
makes on the calibration text. Measured are the KL divergence from 16 bit and the logarithm of the
ratio of perplexities, both in nats a token, on held-out text with this machine's kernels in
float32. --anchors prints the divergences at one bitwidth for each way of rounding, from which the
calibration is made.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.lab import header, processor_name
from benchmarks.quantization.models import MODELS, Texts, texts_for
from benchmarks.quantization.quality import importance_of
from llmpq.quality.omega import measure_omega
from llmpq.quality.options import IndicatorOptions
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import evaluate
from llmpq.quality.subjects import bits_subject
from planner.model.finding import model_shape
from planner.profiles.calibration import scale_of
from planner.profiles.sensitivity import DEFAULT_SOURCE, Omega, default_sensitivity
from quant.checkpoint.reader import Checkpoint
from quant.scheme import BITWIDTHS, FULL_BITS, ROUNDINGS, WEIGHTED

CPU = torch.device("cpu")
Bits = tuple[int, ...]
PAIRS = ((8, 16), (4, 16), (4, 8), (3, 8), (3, 4))
"""Bits of layers by turns, in mixtures beside one bitwidth for all."""
FEW = 6  # every so many layers has 4 bit, the others 16, in one more mixture
TOKENS, CALIBRATION_TOKENS = 2048, 4096


def assignments(layers: int) -> Iterator[tuple[str, Bits]]:
    """Bits of every layer, by their name: one for all, two by turns, and few layers at 4."""
    for bits in reversed(BITWIDTHS[:-1]):
        yield str(bits), (bits,) * layers
    for pair in PAIRS:
        yield f"{pair[0]} and {pair[1]} by turns", tuple(pair[i % 2] for i in range(layers))
    few = tuple(4 if i % FEW == 0 else FULL_BITS for i in range(layers))
    yield f"4 for every {FEW}th layer, else 16", few


def measured(model: Path, texts: Texts, chosen: Sequence[Bits], rounding: str) -> list[Perplexity]:
    """The model at 16 bit, then at each of the `chosen` bits."""
    shape = model_shape(str(model))
    importance = importance_of(model, shape) if rounding == WEIGHTED else None
    every = [(FULL_BITS,) * shape.layers, *chosen]
    subjects = [
        replace(bits_subject(bits, shape.layers, CPU, "float32", rounding), importance=importance)
        for bits in every
    ]
    return evaluate(Checkpoint(model), texts.held_out, subjects, CPU)


def lost(full: Perplexity, other: Perplexity) -> tuple[float, float, float]:
    """Divergence from `full`, its standard error, and the logarithm of the perplexities' ratio."""
    return other.divergence or 0.0, other.divergence_error or 0.0, other.nll - full.nll


def print_forecasts(name: str, model: Path, texts: Texts, layers: bool) -> list[float]:
    """Print forecasts of each assignment beside what came; the calibration's, as times that."""
    shape = model_shape(str(model))
    cells = default_sensitivity(shape, BITWIDTHS)
    scale = scale_of(Omega(cells, DEFAULT_SOURCE), shape, WEIGHTED, BITWIDTHS)
    omega = None
    if layers:
        documents = [tuple(map(int, row)) for row in texts.calibration.token_ids]
        omega = measure_omega(model, documents, IndicatorOptions(bits=BITWIDTHS, device="cpu"))
    named = dict(assignments(shape.layers))
    full, *found = measured(model, texts, list(named.values()), WEIGHTED)
    print(f"\n{name}: {full.tokens} tokens, perplexity {full.perplexity:.3f} at 16 bit\n")
    print(
        header("bits | KL, nats | ± 1 σ | ln of the ratio | calibrated | times | by layers | times")
    )
    ratios = []
    for (label, bits), result in zip(named.items(), found, strict=True):
        divergence, error, log_ratio = lost(full, result)
        columns = [BITWIDTHS.index(each) for each in bits]
        expected = scale.at(math.fsum(cells[range(len(bits)), columns]))
        ratios.append(expected / divergence)
        by_layers = ["", ""]
        if omega is not None:
            summed = omega.summed(bits)
            by_layers = [f"{summed:.4f}", f"{summed / divergence:.2f}"]
        print(
            f"| {label} | {divergence:.4f} | {error:.4f} | {log_ratio:+.4f} | {expected:.4f} "
            f"| {ratios[-1]:.2f} | {' | '.join(by_layers)} |",
            flush=True,
        )
    return ratios


def print_anchors(name: str, model: Path, texts: Texts) -> None:
    """Print the divergences at one bitwidth for all layers, for each way of rounding."""
    layers = model_shape(str(model)).layers
    lower = BITWIDTHS[:-1]
    for rounding in ROUNDINGS:
        full, *found = measured(model, texts, [(bits,) * layers for bits in lower], rounding)
        each = [f"{lost(full, result)[0]:.5f}" for result in found]
        print(f"| {name} | {rounding} | {' | '.join(each)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
    models = {name: MODELS[name]() for name in options.models}
    if options.model:
        models = {folder.name: folder for folder in options.model}
    if options.anchors:
        print(header(f"model | rounding | {' | '.join(f'{b} bit' for b in BITWIDTHS[:-1])}"))
    ratios = []
    for name, model in models.items():
        texts = texts_for(model, options)
        if options.anchors:
            print_anchors(name, model, texts)
        else:
            ratios += print_forecasts(name, model, texts, options.layers)
    if ratios:
        worst = max(max(ratio, 1 / ratio) for ratio in ratios)
        print(f"\nThe calibration is within a factor of {worst:.2f} of all {len(ratios)}.")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--model", type=Path, nargs="+", help="folders of other models")
    parser.add_argument("--text", type=Path, nargs="+", help="their held-out text")
    parser.add_argument("--calibration", type=Path, nargs="+", help="their calibration text")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="most of the held-out text")
    parser.add_argument("--calibration-tokens", type=int, default=CALIBRATION_TOKENS)
    parser.add_argument("--layers", action="store_true", help="measure the layers too")
    parser.add_argument("--anchors", action="store_true", help="divergences at one bitwidth")
    parser.set_defaults(quick=False)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
