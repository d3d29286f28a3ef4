"""What plans say of quality, beside what is measured: models at one bitwidth, and at mixtures.

    python -m benchmarks.quantization.forecast [--models smollm2 demo] [--layers] [--anchors]
    python -m benchmarks.quantization.forecast --pairs 3 4 [--calibration-tokens 1024]
    python -m benchmarks.quantization.forecast --model FOLDER --text TEXT --calibration TEXT

`calibrated` is what a plan says that has no measured layers (`planner.profiles.calibration`), as
times what is measured; with --layers also what one says with the omega file that `llmpq indicator`
makes on the calibration text. Measured are the KL divergence from 16 bit and the logarithm of the
ratio of perplexities, both in nats a token, on held-out text with this machine's kernels in
float32. --anchors prints the divergences at one bitwidth for each way of rounding, from which the
calibration is made. --pairs sets what layers lose one by one beside what they lose together, on the
calibration text, and measures the bits that either chooses at equal memory.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.lab import header, processor_name
from benchmarks.quantization.models import MODELS, Texts, texts_for
from benchmarks.quantization.quality import Setting, choose, importance_of, layer_bytes
from benchmarks.quantization.quality_tables import divergence_above
from llmpq.quality.omega import measure_omega
from llmpq.quality.options import IndicatorOptions
from llmpq.quality.perplexity import Perplexity, error_of_mean
from llmpq.quality.scoring import Nats, evaluate
from llmpq.quality.subjects import bits_subject
from llmpq.quality.text_windows import Windows
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
PAIR_LENGTH = 128  # of windows in which pairs are measured, so that there are some in few tokens
PAIR_SHARES = (0.25, 0.5, 0.75)  # of the way from all layers at the lower bits to all at the higher


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


def sets_of(layers: int, bits: int) -> list[list[Bits]]:
    """Each layer at `bits` and the others at 16, each with the next one, all but each, and all."""
    alone = [tuple(bits if i == j else FULL_BITS for j in range(layers)) for i in range(layers)]
    adjacent = [tuple(map(min, own, after)) for own, after in itertools.pairwise(alone)]
    without = [tuple(FULL_BITS + bits - each for each in own) for own in alone]
    return [alone, adjacent, without, [(bits,) * layers]]


def print_together(name: str, model: Path, texts: Texts, bits: int) -> tuple[Nats, Nats]:
    """Print what layers lose at `bits` one by one and together. Return `[layers]` what each loses
    alone, and the mean of that and of what it adds to all others: with half of what each of its
    pairs loses more, where nothing but pairs does.
    """
    sets = sets_of(model_shape(str(model)).layers, bits)
    _, *found = measured(model, texts, list(itertools.chain(*sets)), WEIGHTED)
    nats = np.array([each.window_divergence for each in found])  # [sets, windows]
    ends = np.cumsum([len(each) for each in sets])[:-1]
    alone, adjacent, without, (whole,) = np.split(nats, ends)
    halves = (alone + whole - without) / 2
    more = adjacent - alone[:-1] - alone[1:]
    counts = found[0].window_tokens
    sums = [alone.sum(0), more.sum(0), halves.sum(0), whole]
    cells = [f"{c.sum() / sum(counts):.5f} ± {error_of_mean(c, counts) or 0:.5f}" for c in sums]
    times = [f"{sums[column].sum() / whole.sum():.2f}" for column in (0, 2)]
    print(f"| {name} | {bits} | {' | '.join(cells + times)} |", flush=True)
    return alone.sum(1) / sum(counts), halves.sum(1) / sum(counts)


def print_pairs(name: str, model: Path, texts: Texts, bitwidths: Sequence[int]) -> None:
    """Print losses of layers alone and together, and those of bits chosen by either."""
    shape, text = model_shape(str(model)), texts.calibration.token_ids
    short = text.reshape(-1, PAIR_LENGTH)
    windows = Windows(short, np.full(len(short), PAIR_LENGTH))
    print(header("model | bits | alone | adjacent pairs more | with pairs | all | times | times"))
    omegas = np.zeros((2, shape.layers, len(BITWIDTHS)))
    for bits in bitwidths:
        found = print_together(name, model, Texts(windows, windows), bits)
        omegas[..., BITWIDTHS.index(bits)] = found
    setting = Setting(model, shape, layer_bytes(shape), texts.held_out, WEIGHTED, None)
    least, most = (setting.bytes_of((bits,) * shape.layers) for bits in bitwidths)
    budgets = [least + share * (most - least) for share in PAIR_SHARES]
    chosen = [tuple(choose(own, setting, b, bitwidths) for own in omegas) for b in budgets]
    _, *results = measured(model, texts, list(itertools.chain(*chosen)), WEIGHTED)
    print(f"\n{header('model | share | other bits | chosen by alone | with pairs | more, paired')}")
    by_share = zip(PAIR_SHARES, chosen, results[::2], results[1::2], strict=True)
    for share, bits, alone, pairs in by_share:
        more, error = divergence_above(pairs, alone)
        print(
            f"| {name} | {share:.2f} | {sum(map(int.__ne__, *bits))} | {alone.divergence:.5f} "
            f"| {pairs.divergence:.5f} | {more:+.5f} ± {error or 0:.5f} |",
            flush=True,
        )


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
        elif options.pairs:
            print_pairs(name, model, texts, sorted(options.pairs))
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
    parser.add_argument(
        "--pairs", type=int, nargs=2, choices=BITWIDTHS[:-1], help="losses together"
    )
    parser.set_defaults(quick=False)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
