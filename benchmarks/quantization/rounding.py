"""What ways of rounding lose: perplexity and divergence from 16 bit, held-out English.

    python -m benchmarks.quantization.rounding [--model gemma3] [--bits 4 3]
    python -m benchmarks.quantization.rounding --tokens 40000 --bits 8 --ways alone onednn_w8a8

Weights are rounded, products are float32. `gptq` is calibrated on other papers, as a plan of that
rounding is on its prompts; `weighted, by text` has seen the same ones. At 8 bit there are weights
alone, and the kernels that round activations too, on any machine as they compute.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from actors.importance import measure_layers
from actors.stage.layer_stream import LayerStream, compute_on, stream_layers
from benchmarks.lab import header, processor_name
from benchmarks.quantization.models import Texts, demo, gemma3, smollm2, texts_for
from benchmarks.quantization.quality import FLOAT32, VNNI, importance_of
from llmpq.quality.perplexity import Perplexity
from llmpq.quality.quantize import Quantization, quantize_checkpoint
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.subjects import bits_subject
from planner.model.finding import model_shape
from quant.backends.table import fallback_rule
from quant.checkpoint.model_reference import demo_gguf
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import Importance
from quant.scheme import FULL_BITS, NEAR_FULL_BITS, NEAREST, WEIGHTED, GptqOptions, Processor

CPU = torch.device("cpu")
_MODELS = {"smollm2": smollm2, "smollm2-stored": demo_gguf, "gemma3": gemma3, "demo": demo}
_GEMMA_BEGINS = 2
_BY_TEXT = "weighted, by text"
_GPTQ = "gptq"
_ALONE = LayerScheme(NEAR_FULL_BITS, fallback_rule(NEAR_FULL_BITS).name, torch.float32)
_T4 = Processor(compute_capability=(7, 5))
_EIGHT = {
    "alone-nearest": replace(_ALONE, rounding=NEAREST),
    "alone": _ALONE,
    "onednn_w8a8": LayerScheme(NEAR_FULL_BITS, "onednn_w8a8", torch.float32, VNNI),
    "cuda_w8a8": LayerScheme(NEAR_FULL_BITS, "cuda_w8a8", torch.float32, _T4, "float16"),
}
"""Ways of 8 bit: weights alone, and kernels that round activations too."""
_WAYS = ("nearest", "weighted", _BY_TEXT, _GPTQ, *_EIGHT)
IN_FLOAT32 = compute_on(CPU, torch.float32)


def by_text(model: Path, texts: Texts) -> Importance:
    """What the calibration text shows of the inputs of each linear."""
    shape, stream = model_shape(str(model)), LayerStream(model, IN_FLOAT32)
    hidden = stream.embed(torch.from_numpy(texts.calibration.token_ids), FLOAT32)
    schemes = [LayerScheme()] * shape.layers
    _, layers = measure_layers(model, IN_FLOAT32, range(shape.layers), schemes, hidden)
    return Importance(tuple(layers), "text", shape.fingerprint())


def subjects_at(
    model: Path, texts: Texts, bits: Sequence[int], wanted: Sequence[str]
) -> list[Subject]:
    """16 bit, and each way of rounding while loading that is wanted, at each bitwidth it has."""
    shape = model_shape(str(model))
    own, layers = importance_of(model, shape), shape.layers
    ways = {"nearest": (NEAREST, own), "weighted": (WEIGHTED, own)}
    if _BY_TEXT in wanted:
        ways[_BY_TEXT] = (WEIGHTED, by_text(model, texts))
    full = bits_subject((FULL_BITS,), layers, CPU, "float32")
    found = [full]
    for each in bits:
        forms = [(name, scheme, own) for name, scheme in _EIGHT.items()]
        if each != NEAR_FULL_BITS:
            forms = [
                (name, LayerScheme(each, dtype=torch.float32, rounding=rounding), importance)
                for name, (rounding, importance) in ways.items()
            ]
        found += [
            replace(full, name=name, layers=(scheme,) * layers, importance=importance)
            for name, scheme, importance in forms
            if name in wanted
        ]
    return found


def calibrated(model: Path, texts: Texts, bits: int) -> Perplexity:
    """The model as GPTQ rounds it."""
    layers = model_shape(str(model)).layers
    token_ids = torch.from_numpy(texts.calibration.token_ids)
    options = GptqOptions(narrow=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "made"
        wanted = Quantization((bits,) * layers, token_ids, IN_FLOAT32, options)
        quantize_checkpoint(model, folder, wanted)
        found = _normed(folder, texts, [LayerScheme(bits, dtype=torch.float32)] * layers)
    nll, divergence = _nats(model, texts, found, _normed(model, texts, None))
    tokens = tuple(map(int, texts.held_out.counts - 1))
    dtypes = ("float32",)
    return Perplexity("gptq", (bits,) * layers, nll, tokens, dtypes, window_divergence=divergence)


def _normed(folder: Path, texts: Texts, schemes: list[LayerScheme] | None) -> torch.Tensor:
    """Hidden states `[windows, length, width]` after the final norm."""
    stream = LayerStream(folder, IN_FLOAT32)
    *_, last = stream_layers(stream, torch.from_numpy(texts.held_out.token_ids), schemes)
    return torch.cat([stream.tail().normed(row[None]) for row in last.hidden])


@torch.no_grad()
def _nats(
    model: Path, texts: Texts, found: torch.Tensor, expected: torch.Tensor
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Summed negative log-likelihood and divergence of each window."""
    tail, counts = LayerStream(model, IN_FLOAT32).tail(), texts.held_out.counts
    nll, divergence = [], []
    for row, count in enumerate(counts):
        targets = torch.from_numpy(texts.held_out.token_ids[row, 1:count])
        own, right = (
            torch.log_softmax(tail.logits(each[row, : count - 1]), -1) for each in (found, expected)
        )
        nll.append(-float(own.gather(-1, targets[:, None]).double().sum()))
        divergence.append(float((right.exp() * (right - own)).sum(-1).double().sum()))
    return tuple(nll), tuple(divergence)


def rows_of(model: Path, texts: Texts, bits: Sequence[int], wanted: Sequence[str]) -> Iterator[str]:
    """Lines of the table."""
    full, *found = evaluate(model, texts.held_out, subjects_at(model, texts, bits, wanted), CPU)
    yield f"16 bit | 16 | {full.perplexity:.3f} | | 1.0000 | 0"
    for result in found:
        yield _row(full, result)
    for each in bits if _GPTQ in wanted else ():
        if each != NEAR_FULL_BITS:
            yield _row(full, calibrated(model, texts, each))


def _row(full: Perplexity, result: Perplexity) -> str:
    above, error = result.above(full)
    return (
        f"{result.name} | {result.bitwidths[0]} | {result.perplexity:.3f} "
        f"| {above:+.3f} ± {error or 0:.3f} | {result.perplexity / full.perplexity:.4f} "
        f"| {result.divergence:.5f} ± {result.divergence_error or 0:.5f}"
    )


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
    print(header("rounded | bits | perplexity | above 16 bit | of it | divergence, nats"))
    for row in rows_of(model, texts, options.bits, options.ways):
        print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
