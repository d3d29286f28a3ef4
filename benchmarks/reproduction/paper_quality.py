"""LLM-PQ's experiments on what quantization does to quality: its table 1, figure 4, and the
perplexities of tables 4, 5 and 7.

They need a model, and run on the two that need no download: SmolLM2-135M-Instruct and the
repository's demo model. Bits are rounded as `llmpq run` rounds them by default, activations are
not rounded, and perplexities and divergences are of held-out text (`quantization.texts`).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from actors.stage.layer_stream import compute_on
from benchmarks.quantization.models import MODELS, Texts, texts_for
from benchmarks.quantization.quality import CPU, importance_of, weight_only
from benchmarks.quantization.quality_tables import Bits
from benchmarks.reproduction.paper_report import bits_by_layers, markdown_table, number
from llmpq.quality.indicator import measure_indicators
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import evaluate
from planner.model.finding import model_shape
from quant.rounding.indicators import VarianceStatistics
from quant.scheme import ROUNDINGS

THIRDS = 3
LOW_BITS = 4  # of the layers chosen in table 1
SEEDS = 5  # of bitwidths mixed at random
UNIFORM = (16, 8, 4, 3)
MIXED = {"mixed4-8": (4, 8), "mixed3-4": (3, 4)}
ORDER = ("16", "8", "mixed4-8", "4", "mixed3-4", "3")
HELD_OUT_TOKENS, CALIBRATION_TOKENS = 4096, 8192

# Table 1: perplexity (mean of three texts) and accuracy with the n-th third at 4 bit.
TABLE_1 = {
    "OPT-1.3b": ((15.52, 62.82), (15.78, 62.49), (15.98, 61.67)),
    "BLOOM-3b": ((17.65, 60.71), (17.88, 60.24), (17.94, 60.37)),
}


@dataclass(frozen=True)
class Measured:
    """A model's layers, the perplexity of each choice of bits, and the variance indicator."""

    layers: int
    found: Mapping[Bits, Perplexity]
    indicator: tuple[float, ...] = ()

    @property
    def full(self) -> Perplexity:
        """All layers at 16 bit."""
        return self.found[(16,) * self.layers]


def table_1() -> str:
    """Perplexity with each third of the layers at 4 bit and the others at 16."""
    header = ["model", f"layers at {LOW_BITS} bit", "perplexity", "above 16 bit", "± 1 σ"]
    header += ["divergence, 0.001 nats", "± 1 σ", "share of the variance indicator", "accuracy (%)"]
    rows = []
    for name, thirds in TABLE_1.items():
        for place, (perplexity, accuracy) in enumerate(thirds, 1):
            cells = [f"{name} (paper)", f"third {place}", f"{perplexity:.2f}"]
            rows.append([*cells, *["–"] * 5, f"{accuracy:.2f}"])
    for name, folder in MODELS.items():
        rows += _third_rows(name, folder())
    return markdown_table(header, rows)


def _third_rows(name: str, model: Path) -> Iterator[list[str]]:
    layers = model_shape(str(model)).layers
    ends = [layers * third // THIRDS for third in range(THIRDS + 1)]
    chosen = [range(first, stop) for first, stop in itertools.pairwise(ends)]
    assignments = [
        tuple(LOW_BITS if layer in third else 16 for layer in range(layers)) for third in chosen
    ]
    measured = measure(model, assignments, with_indicator=True)
    yield [name, "none", f"{measured.full.perplexity:.3f}", *["–"] * 6]
    for third, bits in zip(chosen, assignments, strict=True):
        share = sum(measured.indicator[layer] for layer in third) / sum(measured.indicator)
        cells = _figures(measured, [bits])
        yield [name, f"{third.start}-{third.stop}", *cells, f"{share:.2f}", "–"]


def figure_4() -> str:
    """Perplexity of one bitwidth for all layers, and of two that are mixed at random."""
    header = ["model", "bits", "mean bits", "perplexity", "above 16 bit", "± 1 σ"]
    header += ["divergence, 0.001 nats", "± 1 σ", "of single seeds"]
    rows = [row for name, folder in MODELS.items() for row in _mixture_rows(name, folder())]
    return markdown_table(header, rows)


def _mixture_rows(name: str, model: Path) -> Iterator[list[str]]:
    layers = model_shape(str(model)).layers
    groups: dict[str, list[Bits]] = {str(bits): [(bits,) * layers] for bits in UNIFORM}
    for label, pair in MIXED.items():
        draws = (np.random.default_rng(seed).choice(pair, layers) for seed in range(SEEDS))
        groups[label] = [tuple(int(bits) for bits in draw) for draw in draws]
    measured = measure(model, [bits for group in groups.values() for bits in group])
    for label in ORDER:
        group = groups[label]
        mean_bits = np.mean(group)
        if label == "16":
            cells = [f"{measured.full.perplexity:.3f}", *["–"] * 4]
        else:
            cells = _figures(measured, group)
        single = [measured.found[bits].perplexity for bits in group]
        told = "–" if len(group) == 1 else f"{min(single):.3f} to {max(single):.3f}"
        yield [name, label, f"{mean_bits:.2f}", *cells, told]


Told = tuple[float | None, Sequence[int] | None]
"""The perplexity of a scheme in the paper, and its bits here by layer; None where it has no room.
"""


def perplexities(plans: Mapping[tuple[str, str], Mapping[str, Told]], models: Sequence[str]) -> str:
    """Perplexity of the bits of plans by table, cluster and scheme, each laid over the layers of
    the models that can be had; and whether schemes of a cluster come in the paper's order.
    """
    schemes = list(next(iter(plans.values())))
    found = {}
    for name in models:
        folder = MODELS[name]
        layers = model_shape(str(folder())).layers
        laid = {
            (key, scheme): stretched(bits, layers)
            for key, told in plans.items()
            for scheme, (_, bits) in told.items()
            if bits is not None
        }
        measured = measure(folder(), list(laid.values()))
        found[name] = {key: measured.found[bits].perplexity for key, bits in laid.items()}
    header = ["table", "cluster"]
    header += [f"{scheme} {each}" for scheme in schemes for each in ("paper", "bits", *models)]
    rows = []
    for key, told in plans.items():
        cells = list(key)
        for scheme, (paper, bits) in told.items():
            own = [number(found[name].get((key, scheme)), ".2f") for name in models]
            counts = "–" if bits is None else bits_by_layers(bits)
            cells += [number(paper, ".2f"), counts, *own]
        rows.append(cells)
    order = [f"{name} {_in_order(plans, found[name])}" for name in models]
    told_order = f"Pairs of schemes that differ in both, in the paper's order: {', '.join(order)}."
    return f"{markdown_table(header, rows)}\n\n{told_order}"


def stretched(bits: Sequence[int], layers: int) -> Bits:
    """Bits of so many layers that have those of the others at the same depth."""
    return tuple(bits[int((layer + 0.5) * len(bits) / layers)] for layer in range(layers))


def _in_order(
    plans: Mapping[tuple[str, str], Mapping[str, Told]],
    found: Mapping[tuple[tuple[str, str], str], float],
) -> str:
    agreed = compared = 0
    for key, told in plans.items():
        for one, other in itertools.combinations(told, 2):
            papers = told[one][0], told[other][0]
            own = found.get((key, one)), found.get((key, other))
            if None in (*papers, *own) or papers[0] == papers[1] or own[0] == own[1]:
                continue
            compared += 1
            agreed += (papers[0] > papers[1]) == (own[0] > own[1])  # type: ignore[operator]
    return f"{agreed} of {compared}"


def _figures(measured: Measured, group: Sequence[Bits]) -> list[str]:
    """Perplexity, its increase and the divergence with errors, of a choice or the mean of some.

    The error is over windows of the text for one choice, over the choices for some.
    """
    results = [measured.found[bits] for bits in group]
    increases = [each.above(measured.full) for each in results]
    perplexity = np.mean([each.perplexity for each in results])
    increase = np.mean([value for value, _ in increases])
    divergence = np.mean([each.divergence or 0.0 for each in results])
    if len(group) == 1:
        errors = (increases[0][1] or 0.0, results[0].divergence_error or 0.0)
    else:
        root = len(group) ** 0.5
        errors = (
            float(np.std([value for value, _ in increases], ddof=1)) / root,
            float(np.std([each.divergence or 0.0 for each in results], ddof=1)) / root,
        )
    return [
        f"{perplexity:.3f}",
        f"{increase:+.3f}",
        f"{errors[0]:.3f}",
        f"{1000 * divergence:.2f}",
        f"{1000 * errors[1]:.2f}",
    ]


def measure(model: Path, wanted: Sequence[Bits], with_indicator: bool = False) -> Measured:
    """Measure each choice of bits on held-out text, and the indicator at 4 bit if asked to."""
    torch.set_num_threads(1)
    shape, texts = model_shape(str(model)), _texts(model)
    importance = importance_of(model, shape)
    assignments = list(dict.fromkeys([(16,) * shape.layers, *wanted]))
    subjects = [weight_only(bits, ROUNDINGS[0], importance) for bits in assignments]
    found = evaluate(model, texts.held_out, subjects, CPU)
    indicator: tuple[float, ...] = ()
    if with_indicator:
        compute, text = compute_on(CPU, torch.float32), texts.calibration.token_ids
        forms = {"variance": VarianceStatistics}
        parts = measure_indicators(model, text, forms, (LOW_BITS,), compute)[0]["variance"]
        indicator = tuple(float(value) for value in parts.sum(axis=0)[:, 0])
    by_bits = dict(zip(assignments, found, strict=True))
    return Measured(shape.layers, by_bits, indicator)


def _texts(model: Path) -> Texts:
    """The texts that `benchmarks.quantization` uses without options, fewer tokens of them."""
    options = argparse.Namespace(
        text=None,
        calibration=None,
        tokens=HELD_OUT_TOKENS,
        calibration_tokens=CALIBRATION_TOKENS,
        quick=False,
    )
    return texts_for(model, options)
