"""What ways of rounding lose on SmolLM2 or Gemma 3: perplexity and divergence from 16 bit, held-out
English.

    python -m benchmarks.quantization.rounding [--model gemma3] [--bits 4 3]

Weights are rounded, products are float32. `gptq` is calibrated on other papers, as a plan of that
rounding is on its prompts; `weighted, by text` has seen the same ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from actors.importance import measure_layers
from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from benchmarks.lab import header, processor_name
from benchmarks.quantization.models import Texts, gemma3, smollm2, texts_for
from benchmarks.quantization.quality import FLOAT32, importance_of
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from llmpq.quality.scoring import evaluate
from llmpq.quality.subjects import bits_subject
from planner.model.finding import model_shape
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import Importance
from quant.scheme import FULL_BITS, WEIGHTED, GptqOptions

CPU = torch.device("cpu")
_MODELS = {"smollm2": smollm2, "gemma3": gemma3}
_GEMMA_BEGINS = 2
_BY_TEXT = "weighted, by text"
_WAYS = ("nearest", "weighted", _BY_TEXT, "gptq")
IN_FLOAT32 = compute_on(CPU, torch.float32)


def by_text(model: Path, texts: Texts) -> Importance:
    """What the calibration text shows of the inputs of each linear."""
    shape, stream = model_shape(str(model)), LayerStream(model, IN_FLOAT32)
    hidden = stream.embed(torch.from_numpy(texts.calibration.token_ids), FLOAT32)
    schemes = [LayerScheme()] * shape.layers
    _, layers = measure_layers(model, IN_FLOAT32, range(shape.layers), schemes, hidden)
    return Importance(tuple(layers), "text", shape.fingerprint())


def rounded_when_loaded(
    model: Path, texts: Texts, bits: Sequence[int], wanted: Sequence[str]
) -> tuple[Perplexity, list[tuple[str, int, Perplexity]]]:
    """16 bit, and each way that is wanted at each bitwidth."""
    shape = model_shape(str(model))
    own = importance_of(model, shape)
    ways = {"nearest": ("nearest", own), "weighted": (WEIGHTED, own)}
    if _BY_TEXT in wanted:
        ways[_BY_TEXT] = (WEIGHTED, by_text(model, texts))
    named = [(name, each) for each in bits for name in ways if name in wanted]
    subjects = [bits_subject((FULL_BITS,) * shape.layers, shape.layers, CPU, "float32", WEIGHTED)]
    for name, each in named:
        rounding, importance = ways[name]
        made = bits_subject((each,) * shape.layers, shape.layers, CPU, "float32", rounding)
        subjects.append(replace(made, importance=importance))
    full, *found = evaluate(model, texts.held_out, subjects, CPU)
    return full, [(*of, result) for of, result in zip(named, found, strict=True)]


def calibrated(model: Path, texts: Texts, bits: int) -> tuple[float, float, float]:
    """Nats a token by the model as GPTQ rounds it, its divergence, and the error of that."""
    layers = model_shape(str(model)).layers
    token_ids = torch.from_numpy(texts.calibration.token_ids)
    options = GptqOptions(narrow=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "made"
        wanted = Quantization((bits,) * layers, token_ids, IN_FLOAT32, options)
        quantize_checkpoint(model, folder, wanted)
        found = _normed(folder, texts, [LayerScheme(bits, dtype=torch.float32)] * layers)
    return _nats(model, texts, found, _normed(model, texts, None))


def _normed(folder: Path, texts: Texts, schemes: list[LayerScheme] | None) -> torch.Tensor:
    """Hidden states `[windows, length, width]` after the final norm."""
    stream = LayerStream(folder, IN_FLOAT32)
    *_, last = stream_layers(stream, torch.from_numpy(texts.held_out.token_ids), schemes)
    return torch.cat([stream.tail().normed(row[None]) for row in last.hidden])


@torch.no_grad()
def _nats(
    model: Path, texts: Texts, found: torch.Tensor, expected: torch.Tensor
) -> tuple[float, float, float]:
    tail, counts = LayerStream(model, IN_FLOAT32).tail(), texts.held_out.counts
    sums = np.zeros((2, len(counts)))
    for row, count in enumerate(counts):
        targets = torch.from_numpy(texts.held_out.token_ids[row, 1:count])
        own, right = (
            torch.log_softmax(tail.logits(each[row, : count - 1]), -1) for each in (found, expected)
        )
        sums[0, row] = -float(own.gather(-1, targets[:, None]).double().sum())
        sums[1, row] = float((right.exp() * (right - own)).sum(-1).double().sum())
    nll, divergence = sums.sum(1) / (counts - 1).sum()
    error = np.std(sums[1] / (counts - 1), ddof=1) / np.sqrt(len(counts))
    return float(nll), float(divergence), float(error)


def rows_of(model: Path, texts: Texts, bits: Sequence[int], wanted: Sequence[str]) -> Iterator[str]:
    """Lines of the table."""
    full, found = rounded_when_loaded(model, texts, bits, wanted)
    yield f"16 bit | 16 | {full.perplexity:.3f} | 1.000 | 0"
    for name, each, result in found:
        ratio = result.perplexity / full.perplexity
        kl = f"{result.divergence:.4f} ± {result.divergence_error or 0:.4f}"
        yield f"{name} | {each} | {result.perplexity:.3f} | {ratio:.3f} | {kl}"
    for each in bits if "gptq" in wanted else ():
        nll, divergence, error = calibrated(model, texts, each)
        ratio = float(np.exp(nll - full.nll))
        kl = f"{divergence:.4f} ± {error:.4f}"
        yield f"gptq | {each} | {np.exp(nll):.3f} | {ratio:.3f} | {kl}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=_MODELS, default="smollm2")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=_WAYS)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--text", type=Path, nargs="+", help="held-out text")
    parser.add_argument("--calibration", type=Path, nargs="+", help="calibration text")
    parser.add_argument("--tokens", type=int, default=8192, help="most of the held-out text")
    parser.add_argument("--calibration-tokens", type=int, default=8192)
    parser.set_defaults(quick=False)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = _MODELS[options.model]()
    texts = texts_for(model, options)
    if options.model == "gemma3":  # whose predictions need the token that begins texts
        for windows in (texts.held_out, texts.calibration):
            windows.token_ids[:, 0] = _GEMMA_BEGINS
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}\n")
    print(header("rounded | bits | perplexity | of 16 bit | divergence, nats"))
    for row in rows_of(model, texts, options.bits, options.ways):
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
