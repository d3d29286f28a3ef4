"""What 8-bit keys and values cost where a pair of key channels is large.

    python -m benchmarks.quantization.keys [--model FOLDER --text FILE] [--tokens 8192]

The demo model, or another of the Llama family, and copies of it: of every key head of every layer
one rotary pair of keys is multiplied and that of the queries divided, which keeps the function. One
scale for a token's key in a head, beside factors per channel by the keys of random ids. Weights and
arithmetic are those of float32; perplexity above that of 16-bit keys and values, with its standard
error over windows, and the mean divergence from it in 1e-4 nats a token. Bytes are those of keys
and values beside 16-bit ones.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.attention.kv_cache import CacheForm
from actors.stage.importance import measure_layer, random_token_ids
from actors.stage.layer_stream import LayerStream, compute_on
from actors.stage.stage import kv_shape, make_cache
from actors.stage.transformers_config import read_config
from benchmarks.quality import MODEL, read_texts
from llmpq.quality.text_windows import Windows, read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from quant.importance.statistics import LayerImportance
from quant.loading.emulated_kernels import LayerScheme

CPU = torch.device("cpu")
TIMES = (1, 32, 128)
LENGTH = 256
CHANNEL = 3  # and the one that it rotates into
_WEIGHTS = "model.safetensors"


def enlarge(folder: Path, copy: Path, times: float) -> None:
    """Write a copy of a checkpoint of one file whose keys have large pairs."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(_WEIGHTS))
    head_dim = kv_shape(read_config(copy))[1]
    pair = [CHANNEL, CHANNEL + head_dim // 2]
    tensors = {name: tensor.float() for name, tensor in load_file(folder / _WEIGHTS).items()}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if part in ("k_proj", "q_proj"):
            rows = tensor.unflatten(0, (-1, head_dim))  # [heads, head_dim, ...], a view
            rows[:, pair] *= times if part == "k_proj" else 1 / times
    save_file(tensors, copy / _WEIGHTS, {"format": "pt"})


def measured(folder: Path) -> list[LayerImportance]:
    """Importance of every layer, by random ids."""
    stream = LayerStream(folder, compute_on(CPU, torch.float32))
    hidden = stream.embed(random_token_ids(stream.config))
    return [measure_layer(stream.layer(index, hidden)) for index in range(stream.layers)]


def log_probabilities(
    folder: Path, windows: Windows, kv_bits: int, importance: Sequence[LayerImportance] | None
) -> list[Tensor]:
    """Of every next token, a tensor `[tokens, vocabulary]` a window."""
    stream = LayerStream(folder, compute_on(CPU, torch.float32))
    hidden = stream.embed(torch.from_numpy(windows.token_ids))
    for index in range(stream.layers):
        known = None if importance is None else importance[index]
        stream.layer(index, hidden, LayerScheme(kv_bits=kv_bits), known).advance()
    tail = stream.tail()
    return [
        tail.logits(tail.normed(row[None]))[0, : count - 1].log_softmax(-1)
        for row, count in zip(hidden, windows.counts, strict=True)
    ]


def losses(found: Sequence[Tensor], windows: Windows) -> npt.NDArray[np.float64]:
    """Mean negative log-likelihood of each window, float64."""
    rows = zip(windows.token_ids, windows.counts, strict=True)
    targets = [torch.from_numpy(ids[1:count]) for ids, count in rows]
    return np.array(
        [
            -float(own.gather(1, wanted[:, None]).double().mean())
            for own, wanted in zip(found, targets, strict=True)
        ]
    )


def row(name: str, full: Sequence[Tensor], found: Sequence[Tensor], windows: Windows) -> str:
    """Excess of perplexity and divergence over windows, as cells of a table."""
    expected, own = losses(full, windows), losses(found, windows)
    perplexity = np.exp(expected.mean())
    excess = np.exp(own.mean()) - perplexity
    error = perplexity * (own - expected).std(ddof=1) / len(own) ** 0.5
    apart = [float((p.exp() * (p - q)).sum(-1).mean()) for p, q in zip(full, found, strict=True)]
    return f"{name} | {perplexity:.2f} | {excess:+.3f} ± {error:.3f} | {np.mean(apart) * 1e4:.2f}"


def bytes_share(folder: Path, importance: Sequence[LayerImportance] | None) -> float:
    """Bytes of 8-bit keys and values, of those of 16-bit ones."""
    config = read_config(folder)
    layers = range(config.num_hidden_layers)
    full, coded = (
        make_cache(config, layers, 64, CacheForm(torch.bfloat16, CPU, bits), importance).nbytes
        for bits in (16, 8)
    )
    return coded / full


def report(model: Path, windows: Windows) -> None:
    """Print the rows of one model."""
    for times in TIMES:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            enlarge(model, folder, times)
            full = log_probabilities(folder, windows, 16, None)
            for name, known in (("one scale", None), ("factors", measured(folder))):
                found = log_probabilities(folder, windows, 8, known)
                cells = row(name, full, found, windows)
                share = bytes_share(folder, known)
                print(f"| {model.name} | {times} | {cells} | {share:.3f} |", flush=True)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with model.safetensors")
    parser.add_argument("--text", type=Path, nargs="+", help="held-out text for another model")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    if options.text is None and options.model != MODEL:
        parser.error("name a --text for --model")
    documents = read_texts()[1] if options.text is None else read_documents(options.text)
    whole = token_windows(documents, load_tokenizer(options.model), LENGTH)
    count = max(2, options.tokens // LENGTH)
    windows = Windows(whole.token_ids[:count], whole.counts[:count])
    print("| model | times | keys | 16 bit | perplexity above | divergence (1e-4) | bytes |")
    print("|---|---|---|---|---|---|---|")
    report(options.model, windows)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
