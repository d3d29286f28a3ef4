"""Ways of rounding weights: what they cost, and the perplexity that they leave a model.

    python -m benchmarks.rounding [--quick] [--part costs|perplexity]
    python -m benchmarks.rounding --part perplexity --model FOLDER --text FILE --calibration FILE

Without a model it is the demo model: perplexities are of held-out topics, those of GPTQ after
calibrating on what the model was trained on (`benchmarks.quality`). Weights are rounded,
activations are not. `costs` times what loading a layer takes: rounding and packing, the roundings
in turns, between two probes of the machine's pace. One thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.stage.layer_stream import compute_on
from benchmarks.machine import pace_probe, processor_name
from benchmarks.quality import MODEL, read_texts, weight_only
from llmpq.quality.indicator import Calibration
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Windows, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from quant.backends.kernel_classes import BACKENDS
from quant.canonical import dequantize, quantize
from quant.gptq.rounding import GptqOptions, gptq
from quant.importance.statistics import InputStatistics
from quant.rounding.ways import Rounding
from quant.scheme import ROUNDINGS

LAYER = {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}
"""`[out, in]` of the linears of a LLaMA-7B decoder layer, and how many there are of each."""

BITS = (3, 4, 8)
KERNELS = {3: "int3pack", 4: "int4pack", 8: "int8pack"}
"""The backend that packs the layer: those of any CPU in bfloat16."""

GPTQ_WAYS = {
    "GPTQ": GptqOptions(),
    "GPTQ, symmetric": GptqOptions(symmetric=True),
    "GPTQ, columns in order": GptqOptions(act_order=False),
}
_CPU = torch.device("cpu")
_LENGTH = 512


@dataclass(frozen=True)
class Case:
    """A model in `folder` and the documents of two texts: to calibrate on, and held out, of which
    at most `tokens` count.
    """

    folder: Path
    calibration: Sequence[str]
    held_out: Sequence[str]
    tokens: int | None = None

    @property
    def layers(self) -> int:
        return int(json.loads((self.folder / "config.json").read_text())["num_hidden_layers"])


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


def perplexities(case: Case, sequences: int) -> Iterator[tuple[str, int, Perplexity]]:
    """Way of rounding, bits and result; first the model as it is."""
    tokenizer = load_tokenizer(case.folder)
    windows = token_windows(case.held_out, tokenizer, _LENGTH, case.tokens)
    calibration = Calibration.sample(
        token_windows(case.calibration, tokenizer, _LENGTH, 4 * sequences * _LENGTH), sequences, 0
    )
    keys = [("", 16)] + [(rounding, bits) for bits in BITS for rounding in ROUNDINGS]
    subjects = [rounded(case, bits, rounding or ROUNDINGS[0]) for rounding, bits in keys]
    results = evaluate(case.folder, windows, subjects, _CPU)
    yield from ((way, bits, result) for (way, bits), result in zip(keys, results, strict=True))
    for bits in BITS:
        for way, options in GPTQ_WAYS.items():
            yield way, bits, calibrated(case, bits, options, calibration, windows)


def rounded(case: Case, bits: int, rounding: str) -> Subject:
    """The model with all layers at `bits`."""
    plain = weight_only((bits,) * case.layers)
    return replace(plain, layers=tuple(replace(each, rounding=rounding) for each in plain.layers))


def calibrated(
    case: Case, bits: int, options: GptqOptions, calibration: Calibration, windows: Windows
) -> Perplexity:
    """The perplexity of a checkpoint that GPTQ makes of the model."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "made"
        token_ids = torch.from_numpy(calibration.token_ids)
        compute = compute_on(_CPU, torch.float32)
        wanted = Quantization((bits,) * case.layers, token_ids, compute, options)
        quantize_checkpoint(case.folder, target, wanted)
        (result,) = evaluate(target, windows, [weight_only((bits,) * case.layers)], _CPU)
    return result


def print_perplexities(case: Case, sequences: int) -> None:
    """Perplexity by way and bits, with its distance from rounding to the nearest."""
    print(f"\n{case.folder.name}, held-out text; GPTQ on {sequences} x {_LENGTH} tokens:\n")
    print("| bits | rounding | perplexity | above 16 bit | less than nearest |")
    print("|---|---|---|---|---|")
    found = {(bits, way): result for way, bits, result in perplexities(case, sequences)}
    exact = found.pop((16, ""))
    print(f"| 16 | | {exact.perplexity:.3f} | | |")
    for (bits, way), result in sorted(found.items(), key=lambda item: -item[0][0]):
        above = f"{above_of(result, exact)}"
        nearest = found[bits, "nearest"]
        gained = "" if result is nearest else above_of(nearest, result)
        print(f"| {bits} | {way} | {result.perplexity:.3f} | {above} | {gained} |")


def above_of(result: Perplexity, other: Perplexity) -> str:
    """By how much `result` is above `other`, with the standard error over windows of the text."""
    difference, error = result.above(other)
    return f"{difference:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def case_of(options: argparse.Namespace) -> Case:
    """The model and the texts that were asked for."""
    if options.model is None:
        return Case(MODEL, *read_texts(), options.tokens)
    calibration, held_out = ([file.read_text()] for file in (options.calibration, options.text))
    return Case(options.model, calibration, held_out, options.tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and sequences")
    parser.add_argument("--part", choices=("all", "costs", "perplexity"), default="all")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="another model to round")
    parser.add_argument("--text", type=Path, metavar="FILE", help="its held-out text")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="its text for GPTQ")
    parser.add_argument("--tokens", type=int, help="most tokens of the held-out text")
    options = parser.parse_args(arguments)
    if options.model and not (options.text and options.calibration):
        parser.error("--model needs --text and --calibration")
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
    sizes: Mapping[str, int] = (
        {"repetitions": 1, "sequences": 8, "linear": 1024}
        if options.quick
        else {"repetitions": 5, "sequences": 64, "linear": 4096}
    )
    if options.part != "perplexity":
        print_costs(sizes["repetitions"])
        print_gptq_seconds(sizes["linear"])
    if options.part != "costs":
        print_perplexities(case_of(options), sizes["sequences"])


if __name__ == "__main__":
    main()
