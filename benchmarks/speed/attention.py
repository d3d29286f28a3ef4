"""Decode attention on a CPU: the compiled loop, PyTorch's flash kernel and batched products.

    python -m benchmarks.speed.attention [--threads 1 2]

bfloat16, one new token a request; the ways in turn with emptied caches between, medians. GB/s are
of keys and values read, beside those of summing as many bytes; codes of 8 bit are half of the bytes
that are counted for them. The error is that of the output against float64, relative to the largest
output.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from actors.attention.addresses import Scoring
from actors.attention.cpu import attend_in_place
from actors.attention.stored import Stored, quantized
from actors.messages import MicroBatch
from benchmarks.lab import header, processor_name

SHAPES = {
    "170M LLaMA, 32 x 160": (32, 16, 16, 64, 160),
    "the same, 4 key heads": (32, 16, 4, 64, 160),
    "LLaMA-3-8B, 8 x 1000": (8, 32, 8, 128, 1000),
    "the same, 8 x 160": (8, 32, 8, 128, 160),
    "the same, 2 x 4000": (2, 32, 8, 128, 4000),
    "OPT-13b, 4 x 600": (4, 40, 40, 128, 600),
}
"""Requests, heads, key heads, head size, tokens."""
TURNS = 15
SPARE_TOKENS = 32
CACHE_BYTES = 1 << 27  # more than processors' caches


def ways(
    query: Tensor, keys: Tensor, values: Tensor, tokens: int
) -> dict[str, Callable[[], Tensor]]:
    """Each way of attending over the first `tokens` of every slot."""
    requests, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    scale = head_dim**-0.5
    slots = np.arange(requests)
    batch = MicroBatch(
        slots, np.full(requests, tokens - 1), np.ones_like(slots), slots * keys.shape[2]
    )

    def flash() -> Tensor:
        return functional.scaled_dot_product_attention(
            query[:, :, None],
            keys[:, :, :tokens],
            values[:, :, :tokens],
            scale=scale,
            enable_gqa=heads > kv_heads,
        )[:, :, 0]

    def products() -> Tensor:
        grouped = (query * scale).view(requests, kv_heads, heads // kv_heads, head_dim)
        shares = (grouped @ keys[:, :, :tokens].transpose(2, 3)).softmax(-1)
        return (shares @ values[:, :, :tokens]).reshape(query.shape)

    question = query, batch, Scoring(scale)
    held = [Stored(stored.transpose(0, 1).flatten(1, 2)) for stored in (keys, values)]
    codes = [Stored(*quantized(stored.numbers)) for stored in held]
    return {
        "flash kernel": flash,
        "batched products": products,
        "compiled": lambda: attend_in_place(*question, *held),
        "compiled, 8 bit": lambda: attend_in_place(*question, *codes),
    }


def seconds(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of interleaved turns, caches emptied before each."""
    spare = torch.zeros(CACHE_BYTES, dtype=torch.uint8)
    found: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(TURNS + 1):
        for name, each in work.items():
            spare.add_(1)
            began = time.perf_counter()
            each()
            if turn:
                found[name].append(time.perf_counter() - began)
    return {name: median(times) for name, times in found.items()}


def report(name: str, threads: int) -> None:
    """The rows of one shape."""
    requests, heads, kv_heads, head_dim, tokens = SHAPES[name]
    torch.manual_seed(0)
    stored = (requests, kv_heads, tokens + SPARE_TOKENS, head_dim)
    keys, values = torch.randn(stored).bfloat16(), torch.randn(stored).bfloat16()
    query = torch.randn(requests, heads, head_dim).bfloat16()
    read_bytes = 4 * requests * kv_heads * tokens * head_dim
    numbers = torch.ones(read_bytes // 4)
    attending = ways(query, keys, values, tokens)
    times = seconds({**attending, "sum": numbers.sum})
    exact = ways(query.double(), keys.double(), values.double(), tokens)["batched products"]()
    for way, attend in attending.items():
        error = float((attend().double() - exact).abs().max() / exact.abs().max())
        print(
            f"| {name} | {threads} | {way} | {times[way] * 1e3:.2f} "
            f"| {times['flash kernel'] / times[way]:.1f} | {read_bytes / times[way] / 1e9:.1f} "
            f"| {read_bytes / times['sum'] / 1e9:.1f} | {error:.1e} |"
        )


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    print(f"{processor_name()}, torch {torch.__version__}\n")
    print(header("layer | threads | way | ms | times flash | GB/s | GB/s of a sum | error"))
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in SHAPES:
            report(name, threads)


if __name__ == "__main__":
    main()
