"""Milliseconds of choosing one token for each request of a decode step, with and without penalties
and log-probabilities.

    python -m benchmarks.speed.sampling

Kinds of batches take turns, and each figure is the median of its turns.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from actors.messages import Admission, MicroBatch, Sampling
from actors.stage.sampler import Sampler, choose_tokens
from benchmarks.lab import processor_name

REQUESTS, VOCABULARY, PROMPT_TOKENS, TURNS = 32, 50_272, 300, 25
GREEDY = Sampling(ignore_eos=True)
PENALISED = Sampling(ignore_eos=True, repetition_penalty=1.1, frequency_penalty=0.2)
KINDS = {
    "greedy": [GREEDY] * REQUESTS,
    "one of them with penalties": [PENALISED] + [GREEDY] * (REQUESTS - 1),
    "all with penalties": [PENALISED] * REQUESTS,
    "one of them with 20 log-probabilities": [GREEDY] * REQUESTS,
    "all with 20 log-probabilities": [GREEDY] * REQUESTS,
}
ASKING = {"one of them with 20 log-probabilities": 1, "all with 20 log-probabilities": REQUESTS}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    logits = torch.randn(REQUESTS, VOCABULARY).bfloat16()
    tokens = tuple(range(PROMPT_TOKENS))
    slots = np.arange(REQUESTS)
    step = MicroBatch(slots, slots + PROMPT_TOKENS, np.ones_like(slots), slots)
    samplers = {kind: Sampler(()) for kind in KINDS}
    for kind, sampling in KINDS.items():
        admitted = tuple(
            Admission(
                i,
                str(i),
                10**6,
                s,
                prompt_tokens=tokens if s is PENALISED else (),
                top_logprobs=20 if i < ASKING.get(kind, 0) else None,
            )
            for i, s in enumerate(sampling)
        )
        first = MicroBatch(slots, slots * 0, slots * 0 + 1, slots, admitted)
        samplers[kind].sample(first, logits)
    seconds: dict[str, list[float]] = {kind: [] for kind in ("largest logits alone", *KINDS)}
    for _ in range(TURNS):
        began = time.perf_counter()
        choose_tokens(logits, [GREEDY] * REQUESTS, [0.0] * REQUESTS)
        seconds["largest logits alone"].append(time.perf_counter() - began)
        for kind, sampler in samplers.items():
            began = time.perf_counter()
            sampler.sample(step, logits)
            seconds[kind].append(time.perf_counter() - began)
    table = Table(title=f"{REQUESTS} requests, {VOCABULARY} logits; {processor_name()}, one thread")
    table.add_column("batch")
    table.add_column("ms a step", justify="right")
    for kind, taken in seconds.items():
        table.add_row(kind, f"{1e3 * statistics.median(taken):.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
