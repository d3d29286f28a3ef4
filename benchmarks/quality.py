"""Perplexity of the demo model: by bitwidth, and by what chose the bits of equally large plans.

    python -m benchmarks.quality [--quick] [--seeds 24] [--json FILE]

Bits per layer minimise the summed sensitivity within a budget of bytes (kernel rules, linears of
the decoder layers), solved exactly by the planner. Indicators see calibration text alone, and the
perplexity is that of held-out topics; both come from the documentation in this CPython
(`examples/demo_text.py`), the calibration text from what the model was trained on. Weights are
rounded, activations are not. `sizes` is the planner's default without a measurement; `random` the
mean over seeds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics as PYDOC_TOPICS

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import t as student

from actors.stage.layer_stream import compute_on
from benchmarks.divergence import Divergence
from benchmarks.machine import processor_name
from llmpq.quality.indicator import measure_indicators
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Windows, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import ModelShape, model_shape
from planner.optimiser.solve import AssignmentProblem, solve
from planner.quality.sensitivity import default_sensitivity
from quant.backends.selection import fallback_rule
from quant.loading.emulated_kernels import LayerScheme
from quant.scheme import BITWIDTHS, Processor
from quant.sensitivity.indicators import (
    HessianStatistics,
    Indicator,
    Matrix,
    VarianceStatistics,
    random_indicator,
)
from quant.sensitivity.variance_form import VarianceForm

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = EXAMPLES / "demo_model"
CPU = torch.device("cpu")

# Shares of the way from all layers at 3 bit to all at 16: 4 bit is at 0.08, 8 bit at 0.38.
BUDGETS = (0.02, 0.05, 0.08, 0.12, 0.18, 0.25, 0.32, 0.40, 0.50, 0.60, 0.75, 0.90)
QUICK_BUDGETS = (0.05, 0.25, 0.50, 0.90)
SEQUENCE_LENGTH = 512
CALIBRATION_SEQUENCES = 32
AT_ONCE = 24  # subjects of one pass: their hidden states fit in 200 MB
W8A8 = "onednn_w8a8"
VNNI = Processor(instruction_sets=frozenset({"avx512_vnni"}))  # represented where it is missing
UNRESOLVED = 0.8  # share from which 8 bit and 16 bit differ by less than the text can tell
SEEDS, QUICK_SEEDS = 24, 5
QUICK_TOKENS = 4096

Bits = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """The model, its layers' bytes at each bitwidth, and the text to measure on."""

    shape: ModelShape
    layer_bytes: npt.NDArray[np.float64]  # [K]
    held_out: Windows

    def budget(self, share: float) -> float:
        """Bytes of all layers' linears at `share` of the way from all-3 to all-16 bit."""
        least, most = self.layer_bytes[0], self.layer_bytes[-1]
        return float(self.shape.layers * (least + share * (most - least)))

    def bytes_of(self, bits: Bits) -> float:
        """Bytes of the layers' linears at these bitwidths."""
        return float(sum(self.layer_bytes[BITWIDTHS.index(b)] for b in bits))


@dataclass
class Measured:
    """Perplexities by bits, each measured once."""

    setting: Setting
    known: dict[Bits, Perplexity] = field(default_factory=dict)

    def measure(self, wanted: Iterable[Bits]) -> None:
        """Fill in what is not known, many at a time; those that begin alike share their work."""
        missing = sorted(set(wanted) - self.known.keys())
        for first in range(0, len(missing), AT_ONCE):
            part = missing[first : first + AT_ONCE]
            subjects = [weight_only(bits) for bits in part]
            found = evaluate(MODEL, self.setting.held_out, subjects, CPU)
            self.known |= dict(zip(part, found, strict=True))


def weight_only(bits: Bits) -> Subject:
    """Every layer by the backend that rounds weights alone."""
    schemes = {b: LayerScheme(b, fallback_rule(b).name, torch.float32) for b in sorted(set(bits))}
    return Subject("bits", tuple(schemes[b] for b in bits), torch.float32, torch.float32)


def read_texts() -> tuple[list[str], list[str]]:
    """Calibration documents from the training split, and the held-out ones."""
    sys.path.insert(0, str(EXAMPLES))
    demo_text = importlib.import_module("demo_text")
    corpus = demo_text.read_corpus(PYDOC_TOPICS, Path(sysconfig.get_path("stdlib")))
    shuffled = np.random.default_rng(0).permutation(sorted(set(corpus.train)))
    return shuffled.tolist(), corpus.held_out


def layer_bytes(shape: ModelShape) -> npt.NDArray[np.float64]:
    """Bytes `[K]` of one decoder layer's linears by the kernel rules, 16 bit in float16."""
    return np.array(
        [
            sum(fallback_rule(bits).nbytes(linear, "float16") for linear in shape.layer_linears())
            for bits in BITWIDTHS
        ],
        dtype=np.float64,
    )


def choose(omega: Matrix, setting: Setting, budget_bytes: float) -> Bits:
    """Bits of least summed `omega` `[L, K]` within the budget: one device that takes no time."""
    nothing = np.zeros((1, len(BITWIDTHS)))
    problem = AssignmentProblem(
        prefill_s=nothing,
        decode_s=nothing,
        fixed_prefill_s=nothing[:, 0],
        fixed_decode_s=nothing[:, 0],
        prefill_comm_s=nothing[:, 0],
        decode_comm_s=nothing[:, 0],
        layer_bytes=setting.layer_bytes[None],
        memory_bytes=np.array([budget_bytes]),
        sensitivity=omega / omega.max(),
        theta=1.0,
        bitwidths=BITWIDTHS,
        prefill_micro_batches=1,
        decode_micro_batches=1,
        new_tokens=1,
    )
    return tuple(BITWIDTHS[index] for index in solve(problem, relative_gap=0.0).bitwidth)


def indicators_of(shape: ModelShape, calibration: Windows) -> dict[str, Matrix]:
    """Indicators `[L, K]` by name, measured in one pass of the calibration text."""
    forms: dict[str, Indicator] = {
        "variance": VarianceStatistics,
        "variance by group": lambda: VarianceStatistics(VarianceForm(scales="group")),
        "hessian": HessianStatistics,
    }
    compute = compute_on(CPU, torch.float32)
    found = measure_indicators(MODEL, calibration.token_ids, forms, BITWIDTHS, compute)
    return found | {"sizes": default_sensitivity(shape, BITWIDTHS)}


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean (Student's t)."""
    quantile = float(student.ppf(0.975, len(values) - 1))
    return quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


@dataclass(frozen=True)
class Row:
    """One budget: what each indicator and each random seed came to."""

    share: float
    budget_bytes: float
    chosen: Mapping[str, Perplexity]
    drawn: tuple[Perplexity, ...]

    @property
    def random(self) -> list[float]:
        """Perplexities by seed."""
        return [result.perplexity for result in self.drawn]

    @property
    def random_mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.random))

    @property
    def random_half_width(self) -> float:
        """Half of the 95 % interval of their mean."""
        return half_width(self.random)

    @property
    def text_error(self) -> float:
        """Standard error, over windows of the text, of variance's perplexity less random's."""
        nats = np.mean([result.window_nll for result in self.drawn], axis=0)
        typical = replace(self.drawn[0], window_nll=tuple(nats.tolist()))
        return self.chosen["variance"].above(typical)[1] or math.nan


def compare(
    measured: Measured, indicators: Mapping[str, Matrix], seeds: int, shares: Sequence[float]
) -> list[Row]:
    """Perplexities of what each indicator and each seed chooses at each budget."""
    setting = measured.setting
    draws = [random_indicator(setting.shape.layers, BITWIDTHS, seed) for seed in range(seeds)]
    rows = []
    for share in shares:
        budget = setting.budget(share)
        chosen = {name: choose(omega, setting, budget) for name, omega in indicators.items()}
        drawn = [choose(omega, setting, budget) for omega in draws]
        measured.measure([*chosen.values(), *drawn])
        results = {name: measured.known[bits] for name, bits in chosen.items()}
        rows.append(Row(share, budget, results, tuple(measured.known[bits] for bits in drawn)))
    return rows


def print_uniform(setting: Setting) -> None:
    """Perplexity at one bitwidth for all layers, and at 8 bit with activations rounded too."""
    layers = setting.shape.layers
    subjects = [weight_only((bits,) * layers) for bits in reversed(BITWIDTHS)]
    scheme = LayerScheme(8, W8A8, torch.float32, VNNI, "float32")
    subjects += [Subject(W8A8, (scheme,) * layers, torch.float32, torch.float32)]
    full, *others = evaluate(MODEL, setting.held_out, subjects, CPU)
    print(f"\nHeld-out perplexity, {full.tokens} tokens in {full.windows} windows:\n")
    print("| bits | perplexity | ± 1 σ | above 16 bit | ± 1 σ |")
    print("|---|---|---|---|---|")
    print(f"| 16 | {full.perplexity:.3f} | {full.standard_error:.3f} | | |")
    names = [*(str(bits) for bits in reversed(BITWIDTHS[:-1])), f"8, activations too ({W8A8})"]
    for name, result in zip(names, others, strict=True):
        above, error = result.above(full)
        print(
            f"| {name} | {result.perplexity:.3f} | {result.standard_error:.3f} | {above:+.3f} "
            f"| {error:.3f} |"
        )


def print_rows(rows: Sequence[Row], shape: ModelShape) -> None:
    """Perplexity of each indicator's choice, and of the random ones."""
    weights = shape.layers * sum(linear.parameters for linear in shape.layer_linears())
    names = list(rows[0].chosen)
    print(f"\nPerplexity of the bits chosen at equal memory, {len(rows[0].drawn)} random seeds:\n")
    print(f"| share | bits a weight | {' | '.join(names)} | random | best seed |")
    print("|---" * (len(names) + 4) + "|")
    for row in rows:
        cells = [f"{result.perplexity:.3f}" for result in row.chosen.values()]
        print(
            f"| {row.share:.2f} | {8 * row.budget_bytes / weights:.2f} | {' | '.join(cells)} "
            f"| {row.random_mean:.3f} ± {row.random_half_width:.3f} | {min(row.random):.3f} |"
        )


def print_goals(rows: Sequence[Row]) -> None:
    """Variance against random and Hessian at each budget."""
    print("\nVariance beside random (mean of the seeds; 1 σ of the text) and beside Hessian:\n")
    print("| share | variance - random | 1 σ | beyond the 95 % | seeds beaten | over Hessian |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        own, hessian = row.chosen["variance"].perplexity, row.chosen["hessian"].perplexity
        difference = own - row.random_mean
        beaten = sum(own < other for other in row.random)
        beyond = "yes" if difference < -row.random_half_width else "no"
        print(
            f"| {row.share:.2f} | {difference:+.3f} | {row.text_error:.3f} | {beyond} "
            f"| {beaten} of {len(row.drawn)} | {own / hessian - 1:+.2%} |"
        )


def print_divergences(rows: Sequence[Row], setting: Setting) -> None:
    """Print how far predictions move, at the budgets where perplexities are too close to tell."""
    rows = [row for row in rows if row.share > UNRESOLVED]
    if not rows:
        return
    reference = weight_only((16,) * setting.shape.layers)
    divergence = Divergence(MODEL, setting.held_out, reference)
    print("\nDivergence from the predictions at 16 bit, 1e-6 nats a token:\n")
    print("| share | variance | hessian | random (95 % of the mean) | seeds beaten |")
    print("|---|---|---|---|---|")
    for row in rows:
        own, hessian, *drawn = (
            1e6 * divergence.nats_per_token(weight_only(result.bitwidths))
            for result in (row.chosen["variance"], row.chosen["hessian"], *row.drawn)
        )
        beaten = sum(own < other for other in drawn)
        print(
            f"| {row.share:.2f} | {own:.1f} | {hessian:.1f} | {np.mean(drawn):.1f} ± "
            f"{half_width(drawn):.1f} | {beaten} of {len(drawn)} |"
        )


def print_choices(rows: Sequence[Row]) -> None:
    """The bits that variance and Hessian chose, first layer first."""
    letters = {3: "3", 4: "4", 8: "8", 16: "F"}
    print("\nBits of each layer (F: 16):\n\n| share | variance | hessian |\n|---|---|---|")
    for row in rows:
        cells = [
            "".join(letters[bits] for bits in row.chosen[name].bitwidths)
            for name in ("variance", "hessian")
        ]
        print(f"| {row.share:.2f} | `{cells[0]}` | `{cells[1]}` |")


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Every figure of the tables."""
    content = [
        {
            "share": row.share,
            "budget_bytes": row.budget_bytes,
            "chosen": {name: result.to_dict() for name, result in row.chosen.items()},
            "random": row.random,
        }
        for row in rows
    ]
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    began = time.perf_counter()
    calibration_text, held_out_text = read_texts()
    tokenizer, shape = load_tokenizer(MODEL), model_shape(MODEL)
    most = CALIBRATION_SEQUENCES * SEQUENCE_LENGTH
    calibration = token_windows(calibration_text, tokenizer, SEQUENCE_LENGTH, most)
    held_out = token_windows(
        held_out_text, tokenizer, SEQUENCE_LENGTH, QUICK_TOKENS if options.quick else None
    )
    setting = Setting(shape, layer_bytes(shape), held_out)
    measured = Measured(setting)
    print(
        f"{processor_name()}, 1 thread, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    print_uniform(setting)
    indicators = indicators_of(shape, calibration)
    rows = compare(
        measured,
        indicators,
        QUICK_SEEDS if options.quick else options.seeds,
        QUICK_BUDGETS if options.quick else BUDGETS,
    )
    print_rows(rows, shape)
    print_goals(rows)
    print_divergences(rows, setting)
    print_choices(rows)
    print(f"\n{len(measured.known)} assignments measured, {time.perf_counter() - began:.0f} s")
    if options.json:
        write_json(options.json, rows)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few budgets, seeds and tokens")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="random indicators")
    parser.add_argument("--json", type=Path, help="write every figure")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds is {options.seeds}; an interval needs at least 2")
    return options


if __name__ == "__main__":
    main()
