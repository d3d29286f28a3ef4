"""Cost of the variance and of the Hessian-based indicator: part by part, and as whole runs.

    python -m benchmarks.indicator [--hidden 2048] [--intermediate 5632] [--sequences 32]

One decoder layer of a LLaMA with random weights, one thread, float32. The inputs of its linears are
recorded once; then both indicators are computed from them by turns, and each part's median over the
turns is printed. The Hessian-based indicator is done well: inputs that linears share are taken
once, X X^T by the BLAS routine for symmetric products in batches of tokens, its largest eigenvalue
by power iteration (Lanczos), rounding errors in blocks that stay in the cache. X X^T by a general
product, as GPTQ codes have it, stands beside it. Whole runs add what both need: loading the layer
and sending the text through it.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the BLAS libraries are loaded

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.stage.layer_stream import compute_on
from benchmarks.machine import processor_name
from llmpq.quality.sensitivity.indicator import TokenIds, measure_indicators
from quant.sensitivity.gram import Gram, squared_rounding_error
from quant.sensitivity.indicators import (
    HessianStatistics,
    RunningMoments,
    VarianceStatistics,
    weight_noises,
)
from quant.sensitivity.variance_form import VarianceForm

BITS = (3, 4, 8, 16)
VOCABULARY = 1024
CPU = torch.device("cpu")


class Recorder:
    """Keeps what an indicator would see of the layer."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}
        self.weights: Mapping[str, Tensor] = {}

    def observe(self, source: str, inputs: Tensor) -> None:
        """Keep a copy of `inputs`, as one batch of tokens."""
        self.inputs.setdefault(source, []).append(inputs.clone())

    def omega(
        self, weights: Mapping[str, Tensor], source_of: Mapping[str, str], bitwidths: Sequence[int]
    ) -> list[float]:
        """Keep the weights; no indicator."""
        self.weights = dict(weights)
        return [0.0] * len(bitwidths)


class Clock:
    """Seconds of each named part, one figure for each turn."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def time(self, part: str, work: Callable[[], object]) -> None:
        """Do `work` and note its seconds."""
        began = time.perf_counter()
        work()
        self.seconds.setdefault(part, []).append(time.perf_counter() - began)

    def median(self, *parts: str) -> float:
        """Summed medians of the parts."""
        return sum(median(self.seconds[part]) for part in parts)


VARIANCE = ("mean and variance of the inputs", "least and largest weight")
HESSIAN = ("X X^T", "largest eigenvalue", "rounding errors at 3, 4 and 8 bit")
GENERAL = "X X^T by a general product"


def one_turn(seen: Recorder, clock: Clock) -> None:
    """Both indicators from the recorded inputs, every part timed."""
    form = VarianceForm()
    clock.time(VARIANCE[0], lambda: [moments(batches) for batches in seen.inputs.values()])
    clock.time(VARIANCE[1], lambda: [weight_noises(form, w, BITS) for w in seen.weights.values()])
    grams: list[Gram] = []
    clock.time(HESSIAN[0], lambda: grams.extend(map(gram, seen.inputs.values())))
    clock.time(HESSIAN[1], lambda: [each.top_eigenvalue() for each in grams])
    clock.time(
        HESSIAN[2],
        lambda: [
            squared_rounding_error(w, bits) for w in seen.weights.values() for bits in BITS[:-1]
        ],
    )
    clock.time(GENERAL, lambda: [general_gram(batches) for batches in seen.inputs.values()])


def moments(batches: Sequence[Tensor]) -> RunningMoments:
    """Mean and variance over all batches."""
    found = RunningMoments()
    for batch in batches:
        found.add(batch)
    return found


def gram(batches: Sequence[Tensor]) -> Gram:
    """X X^T over all batches."""
    found = Gram(batches[0].shape[-1], CPU)
    for batch in batches:
        found.add(batch)
    return found


def general_gram(batches: Sequence[Tensor]) -> Tensor:
    """X X^T by torch's matrix product."""
    size = batches[0].shape[-1]
    found = torch.zeros(size, size)
    for batch in batches:
        rows = batch.reshape(-1, size)
        found.addmm_(rows.T, rows)
    return found


def save_model(folder: Path, options: argparse.Namespace) -> None:
    """A LLaMA of one layer with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=1,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.sequence_length,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def whole_runs(folder: Path, token_ids: TokenIds, clock: Clock, turns: int) -> Recorder:
    """Each indicator from the checkpoint on, by turns, after a run that records and warms up."""
    compute, seen = compute_on(CPU, torch.float32), Recorder()
    measure_indicators(folder, token_ids, {"recorder": lambda: seen}, BITS, compute)
    for _ in range(turns):
        for name, indicator in (("variance", VarianceStatistics), ("hessian", HessianStatistics)):
            clock.time(
                name,
                lambda name=name, indicator=indicator: measure_indicators(
                    folder, token_ids, {name: indicator}, BITS, compute
                ),
            )
    return seen


def rows_of(clock: Clock) -> Iterator[tuple[str, float, float]]:
    """Yield the printed rows: a part, its seconds, and their ratio to the variance indicator's."""
    variance = clock.median(*VARIANCE)
    for part in (*VARIANCE, "**variance indicator**", *HESSIAN, "**Hessian-based indicator**"):
        parts = {"**v": VARIANCE, "**H": HESSIAN}.get(part[:3], (part,))
        yield part, clock.median(*parts), clock.median(*parts) / variance
    yield GENERAL, clock.median(GENERAL), clock.median(GENERAL) / variance
    general = clock.median(GENERAL, *HESSIAN[1:])
    yield "Hessian-based indicator with that", general, general / variance


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    token_ids = generator.integers(0, VOCABULARY, (options.sequences, options.sequence_length))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options)
        seen = whole_runs(Path(folder), token_ids, clock, options.turns)
    for _ in range(options.turns):
        one_turn(seen, clock)
    print(
        f"{processor_name()}, torch {torch.__version__}, 1 thread; one layer, hidden size "
        f"{options.hidden}, MLP {options.intermediate}, {token_ids.size} tokens; medians of "
        f"{options.turns} turns\n"
    )
    print("| part | seconds | times the variance indicator |\n|---|---|---|")
    for part, seconds, ratio in rows_of(clock):
        print(f"| {part} | {seconds:.3f} | {ratio:.1f} |")
    variance, hessian = clock.median("variance"), clock.median("hessian")
    print(
        f"\nWhole runs, loading and the text's way through the layer included: variance "
        f"{variance:.2f} s, Hessian {hessian:.2f} s, {hessian / variance:.2f} times."
    )


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--sequence_length", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
