"""Perplexity and KL divergence of a model: by bitwidth, and by what chose bits at equal memory.

    python -m benchmarks.quantization.quality [--quick] [--seeds 24] [--rounding weighted]
    python -m benchmarks.quantization.quality --model FOLDER --text TEXT --calibration TEXT

Bits per layer minimise the summed sensitivity within a budget of bytes (kernel rules, linears of
the decoder layers), solved exactly by the planner. Indicators see calibration text alone. Without
--model it is the demo model; its perplexity is that of held-out topics, and both texts come from
the documentation in this CPython (`examples/demo_text.py`). Weights are rounded, activations are
not. `sizes` is the planner's default without a measurement, `alone` the divergence measured with
each layer alone at each bitwidth; `random` the mean over seeds with its 95 % interval. Divergences
are from the predictions at 16 bit, and differences are paired over windows, with 1 standard error.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics as PYDOC_TOPICS

import numpy as np
import numpy.typing as npt
import torch

from actors.importance import measure_layers
from actors.sample_text import what_is_seen
from actors.stage.layer_stream import compute_on
from benchmarks.lab import header, processor_name
from benchmarks.quantization.quality_tables import (
    Bits,
    Row,
    print_choices,
    print_goals,
    print_pairs,
    print_rows,
)
from llmpq.quality.indicator import LayerAlone, measure_indicators, stored_here
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Document, Windows, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from planner.optimiser.assignment import SolveOptions
from planner.optimiser.solve import AssignmentProblem, solve_by
from planner.profiles.sensitivity import default_sensitivity
from quant.backends.table import fallback_rule
from quant.checkpoint.reader import Checkpoint
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import Importance
from quant.rounding.indicators import (
    ErrorStatistics,
    HessianStatistics,
    Indicator,
    Matrix,
    VarianceStatistics,
    in_nats,
    random_indicator,
)
from quant.scheme import BITWIDTHS, ROUNDINGS, WEIGHTED, Processor, VarianceForm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "demo_model"
CPU = torch.device("cpu")

# Shares of the way from all layers at 3 bit to all at 16: 4 bit is at 0.08, 8 bit at 0.38.
BUDGETS = (0.02, 0.05, 0.08, 0.12, 0.18, 0.25, 0.32, 0.40, 0.50, 0.60, 0.75, 0.90)
QUICK_BUDGETS = (0.05, 0.25, 0.50, 0.90)
SEQUENCE_LENGTH = 512
CALIBRATION_SEQUENCES = 32
AT_ONCE = 24  # subjects of one pass: their hidden states fit in 200 MB
W8A8 = "onednn_w8a8"
FLOAT32 = LayerScheme(dtype=torch.float32)
VNNI = Processor(instruction_sets=frozenset({"avx512_vnni"}))  # represented where it is missing
SEEDS, QUICK_SEEDS = 24, 5
QUICK_TOKENS = 4096


@dataclass(frozen=True)
class Setting:
    """A model, how it is rounded, a layer's bytes at each bitwidth, and the text to measure on."""

    model: Path
    shape: ModelShape
    layer_bytes: npt.NDArray[np.float64]  # [K]
    held_out: Windows
    rounding: str
    importance: Importance | None

    def subject(self, bits: Bits) -> Subject:
        """Every layer by the backend that rounds weights alone."""
        return weight_only(bits, self.rounding, self.importance)

    @property
    def full(self) -> Bits:
        """All layers at 16 bit."""
        return (16,) * self.shape.layers

    def budget(self, share: float) -> float:
        """Bytes of all layers' linears at `share` of the way from all-3 to all-16 bit."""
        least, most = self.layer_bytes[0], self.layer_bytes[-1]
        return float(self.shape.layers * (least + share * (most - least)))

    def best_uniform(self, budget_bytes: float) -> Bits:
        """The highest bitwidth that fits for all layers."""
        uniform = [(bits,) * self.shape.layers for bits in BITWIDTHS]
        return [bits for bits in uniform if self.bytes_of(bits) <= 1.0001 * budget_bytes][-1]

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
        full = self.setting.full
        missing = sorted(set(wanted) - self.known.keys() - {full})
        for first in range(0, len(missing), AT_ONCE):
            part = [full, *missing[first : first + AT_ONCE]]
            subjects = [self.setting.subject(bits) for bits in part]
            found = evaluate(self.setting.model, self.setting.held_out, subjects, CPU)
            self.known |= dict(zip(part, found, strict=True))


def weight_only(
    bits: Bits, rounding: str = "nearest", importance: Importance | None = None
) -> Subject:
    """Every layer by the backend that rounds weights alone."""
    schemes = {
        b: LayerScheme(b, fallback_rule(b).name, torch.float32, rounding=rounding)
        for b in sorted(set(bits))
    }
    layers = tuple(schemes[b] for b in bits)
    return Subject("bits", layers, FLOAT32, FLOAT32, importance)


def importance_of(model: Path, shape: ModelShape) -> Importance:
    """What a stage measures by itself, without a text of the user's."""
    compute = compute_on(CPU, torch.float32)
    schemes = [LayerScheme()] * shape.layers
    _, layers = measure_layers(model, compute, range(shape.layers), schemes)
    return Importance(tuple(layers), what_is_seen(shape), shape.fingerprint())


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
            sum(fallback_rule(bits).nbytes(linear, "float16") for linear in shape.layer_linears)
            for bits in BITWIDTHS
        ],
        dtype=np.float64,
    )


def choose(
    omega: Matrix, setting: Setting, budget_bytes: float, bitwidths: Sequence[int] = BITWIDTHS
) -> Bits:
    """Bits of least summed `omega` `[L, K]` within the budget: one device that takes no time."""
    columns = [BITWIDTHS.index(bits) for bits in bitwidths]
    nothing = np.zeros((1, len(bitwidths)))
    problem = AssignmentProblem(
        prefill_s=nothing,
        decode_s=nothing,
        fixed_prefill_s=nothing[:, 0],
        fixed_decode_s=nothing[:, 0],
        prefill_comm_s=nothing[:, 0],
        decode_comm_s=nothing[:, 0],
        layer_bytes=setting.layer_bytes[None, columns],
        memory_bytes=np.array([budget_bytes]),
        sensitivity=omega[:, columns] / omega.max(),
        theta=1.0,
        bitwidths=tuple(bitwidths),
        prefill_micro_batches=1,
        decode_micro_batches=1,
        new_tokens=1,
    )
    found = solve_by("auto", problem, SolveOptions(relative_gap=0.0))
    return tuple(bitwidths[index] for index in found.bitwidth)


def indicators_of(setting: Setting, calibration: Windows) -> dict[str, Matrix]:
    """Indicators `[L, K]` by name, measured in one pass of the calibration text, and what each
    layer alone costs on a part of it.
    """
    compute, shape = compute_on(CPU, torch.float32), setting.shape
    stored = stored_here(setting.rounding, compute)
    forms: dict[str, Indicator] = {
        "variance": VarianceStatistics,
        "variance by group": lambda: VarianceStatistics(VarianceForm(scales="group")),
        "hessian": HessianStatistics,
        "error": lambda: ErrorStatistics(stored),
    }
    text = calibration.token_ids
    found, _ = measure_indicators(setting.model, text, forms, BITWIDTHS, compute)
    like = LayerScheme(dtype=torch.float32, rounding=setting.rounding)
    importance = setting.importance or importance_of(setting.model, shape)
    alone = LayerAlone(Checkpoint(setting.model), text, BITWIDTHS, like, importance)
    measured = alone.divergence(CPU, every_bitwidth=True)
    partly = measured.copy()
    partly[..., BITWIDTHS.index(4)] = np.nan  # 3 and 8 bit are what llmpq indicator measures
    found |= {"error": in_nats(found["error"], partly), "alone": measured}
    whole = {name: parts.sum(axis=0) for name, parts in found.items()}
    return whole | {"sizes": default_sensitivity(shape, BITWIDTHS)}


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
        chosen = {"uniform": setting.best_uniform(budget)} | chosen
        measured.measure([*chosen.values(), *drawn])
        results = {name: measured.known[bits] for name, bits in chosen.items()}
        rows.append(Row(share, budget, results, tuple(measured.known[bits] for bits in drawn)))
    return rows


def print_uniform(setting: Setting) -> None:
    """Perplexity at one bitwidth for all layers, and at 8 bit with activations rounded too."""
    layers = setting.shape.layers
    subjects = [setting.subject((bits,) * layers) for bits in reversed(BITWIDTHS)]
    scheme = LayerScheme(8, W8A8, torch.float32, VNNI, "float32")
    subjects += [Subject(W8A8, (scheme,) * layers, FLOAT32, FLOAT32)]
    full, *others = evaluate(setting.model, setting.held_out, subjects, CPU)
    print(f"\nHeld-out perplexity, {full.tokens} tokens in {full.windows} windows:\n")
    print(header("bits | perplexity | ± 1 σ | above 16 bit | ± 1 σ | KL, 0.001 nats | ± 1 σ"))
    print(f"| 16 | {full.perplexity:.3f} | {full.standard_error:.3f} | | | | |")
    names = [*(str(bits) for bits in reversed(BITWIDTHS[:-1])), f"8, activations too ({W8A8})"]
    for name, result in zip(names, others, strict=True):
        above, error = result.above(full)
        print(
            f"| {name} | {result.perplexity:.3f} | {result.standard_error:.3f} | {above:+.3f} "
            f"| {error:.3f} | {1000 * (result.divergence or 0):.3f} "
            f"| {1000 * (result.divergence_error or 0):.3f} |",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    began = time.perf_counter()
    setting, calibration = read_setting(options)
    measured = Measured(setting)
    print(
        f"{processor_name()}, 1 thread, torch {torch.__version__}, "
        f"Python {platform.python_version()}; rounding {setting.rounding}"
    )
    print_uniform(setting)
    rows = compare(
        measured,
        indicators_of(setting, calibration),
        min(options.seeds, QUICK_SEEDS) if options.quick else options.seeds,
        options.shares or (QUICK_BUDGETS if options.quick else BUDGETS),
    )
    print_rows(rows, setting.shape)
    print_pairs(rows)
    print_choices(rows)
    if options.seeds:
        print_goals(rows)
    print(f"\n{len(measured.known)} assignments measured, {time.perf_counter() - began:.0f} s")


def read_setting(options: argparse.Namespace) -> tuple[Setting, Windows]:
    """What is measured, and the text to calibrate on."""
    calibration_text: Sequence[Document]
    held_out_text: Sequence[Document]
    if options.model == MODEL:
        calibration_text, held_out_text = read_texts()
    else:
        held_out_text = read_documents([options.text])
        calibration_text = read_documents([options.calibration])
    tokenizer, shape = load_tokenizer(options.model), model_shape(str(options.model))
    most = options.calibration_sequences * options.length
    calibration = token_windows(calibration_text, tokenizer, options.length, most)
    tokens = QUICK_TOKENS if options.quick else options.tokens
    held_out = token_windows(held_out_text, tokenizer, options.length, tokens)
    importance = importance_of(options.model, shape) if options.rounding == WEIGHTED else None
    bytes_by_bits = layer_bytes(shape)
    setting = Setting(options.model, shape, bytes_by_bits, held_out, options.rounding, importance)
    return setting, calibration


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few budgets, seeds and tokens")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="random indicators")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of another model")
    parser.add_argument("--text", type=Path, help="its held-out text")
    parser.add_argument("--calibration", type=Path, help="its calibration text")
    parser.add_argument("--tokens", type=int, help="most tokens of the held-out text (all)")
    parser.add_argument("--length", type=int, default=SEQUENCE_LENGTH, help="tokens of a window")
    parser.add_argument("--calibration-sequences", type=int, default=CALIBRATION_SEQUENCES)
    parser.add_argument("--rounding", choices=ROUNDINGS, default=ROUNDINGS[0])
    parser.add_argument("--shares", type=float, nargs="+", help="budgets instead of the usual ones")
    options = parser.parse_args(arguments)
    if options.seeds == 1 or options.seeds < 0:
        parser.error(f"--seeds is {options.seeds}; an interval needs at least 2, 0 leaves it out")
    if options.model != MODEL and not (options.text and options.calibration):
        parser.error("--model needs --text and --calibration")
    return options


if __name__ == "__main__":
    main()
