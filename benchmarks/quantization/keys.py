"""What 8-bit keys and values cost where a pair of key channels is large.

    python -m benchmarks.quantization.keys [--models demo smollm2] [--tokens 8192]

Each model as it is, and with one rotary pair of every key head times 32 and 128 (its queries
divided, function kept): one scale for a token's key in a head, beside factors per channel from the
keys of random ids. Weights and arithmetic are those of float32. Perplexity above that of 16-bit
keys and values and divergence from it, with standard errors over windows; bytes are those of keys
and values beside 16-bit ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from actors.attention.kv_cache import CacheForm
from actors.stage.stage import make_cache
from actors.stage.transformers_config import read_config
from benchmarks.machine import processor_name
from benchmarks.quality import importance_of
from benchmarks.quantization.models import MODELS, with_large_keys
from benchmarks.quantization.texts import add_arguments, texts_for
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Windows
from planner.model.finding import model_shape
from quant.importance.file import Importance
from quant.loading.emulated_kernels import LayerScheme
from quant.scheme import WEIGHTED

CPU = torch.device("cpu")
TIMES = (1, 32, 128)


def subject(name: str, layers: int, kv_bits: int, importance: Importance | None = None) -> Subject:
    """Plain weights, and keys and values of `kv_bits`."""
    scheme = LayerScheme(rounding=WEIGHTED, kv_bits=kv_bits)
    return Subject(name, (scheme,) * layers, torch.float32, torch.float32, importance)


def print_rows(name: str, times: int, folder: Path, windows: Windows) -> None:
    """One scale, and factors."""
    shape = model_shape(str(folder))
    importance = importance_of(folder, shape)
    subjects = [
        subject("16 bit", shape.layers, 16),
        subject("one scale", shape.layers, 8),
        subject("factors", shape.layers, 8, importance),
    ]
    full, *others = evaluate(folder, windows, subjects, CPU)
    for given, found in zip(subjects[1:], others, strict=True):
        above, error = found.above(full)
        share = bytes_share(folder, given.importance)
        print(
            f"| {name} | {times} | {given.name} | {full.perplexity:.3f} | {above:+.3f} ± "
            f"{error:.3f} | {1e4 * (found.divergence or 0):.2f} ± "
            f"{1e4 * (found.divergence_error or 0):.2f} | {share:.3f} |",
            flush=True,
        )


def bytes_share(folder: Path, importance: Importance | None) -> float:
    """Bytes of 8-bit keys and values, of those of 16-bit ones."""
    config = read_config(folder)
    layers = range(config.num_hidden_layers)
    known = None if importance is None else importance.layers
    full, coded = (
        make_cache(config, layers, 64, CacheForm(torch.bfloat16, CPU, bits), known).nbytes
        for bits in (16, 8)
    )
    return coded / full


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="few tokens")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}\n")
    print("| model | times | keys | 16 bit | above it | divergence, 1e-4 nats | bytes, of 16 bit |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        model = MODELS[name]()
        windows = texts_for(model, options).held_out
        for times in TIMES:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "model"
                with_large_keys(model, folder, times)
                print_rows(name, times, folder, windows)


if __name__ == "__main__":
    main()
