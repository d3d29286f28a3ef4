"""What deterministic stages cost on a CPU, and what they give.

    python -m benchmarks.deterministic [--models demo wide] [--bits 16 8 4 3] [--rows 32]

One stage in this process, one thread, with the native 16-bit type or float32: milliseconds of a
prefill and of decode steps as usual and deterministic, in turns, medians. `demo` is the model of
`llmpq demo`; `wide` a layer of LLaMA-3-8B's sizes with random weights. `--rows` tries numbers of
rows that passes are filled up to. Then 16 rows, half of them greedy and half drawn, one at a time
and all at once: how many of them differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.messages import Admission, MicroBatch, Request, Sampling, TokenRange
from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.stage import stage as stages
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from benchmarks.machine import native_dtype, processor_name
from planner.model.finding import model_shape
from quant.checkpoint.model_reference import resolve
from quant.processor import local_processor
from quant.scheme import BITWIDTHS
from tests.actors.local_pipeline import LocalPipeline, drive

CPU = torch.device("cpu")
SLOTS, SLOT_TOKENS = 32, 320
TURNS = 7
WORK = (
    ("prefill 1 x 256", 1, 0, 256),
    ("prefill 16 x 64", 16, 0, 64),
    ("decode 1", 1, 256, 1),
    ("decode 8", 8, 256, 1),
    ("decode 32", 32, 256, 1),
)
"""Name, requests, tokens that they have and tokens that come."""

ROWS, NEW_TOKENS = 16, 40


def wide_layer(folder: Path) -> Path:
    """A model of one layer with the sizes of LLaMA-3-8B and few tokens."""
    config = LlamaConfig(
        vocab_size=1024, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def stage_of(folder: Path, bits: int, dtype: str, deterministic: bool) -> Stage:
    """The whole model as one stage."""
    layers = model_shape(str(folder)).layers
    spec = StageSpec(
        0, 1, range(layers), (bits,) * layers, dtype, SLOTS, SLOT_TOKENS, SLOTS * SLOT_TOKENS,
        deterministic=deterministic,
    )  # fmt: skip
    return Stage(spec, folder, CPU, local_processor(CPU))


def step_s(stage: Stage, requests: int, held: int, new: int) -> float:
    """Seconds of one pass; nothing is sampled, as that is the same for both."""
    slots = np.arange(requests)
    full = np.ones_like(slots)
    batch = MicroBatch(
        slots, full * held, full * new, slots * SLOT_TOKENS, samples=np.zeros(requests, bool)
    )
    tokens = torch.arange(requests * new) % 1000
    began = time.perf_counter()
    stage.step(batch, tokens)
    return time.perf_counter() - began


def admit_all(stage: Stage) -> None:
    """Give every slot a request that never ends."""
    slots = np.arange(SLOTS)
    rooms = [TokenRange(slot * SLOT_TOKENS, SLOT_TOKENS) for slot in slots.tolist()]
    admitted = tuple(
        Admission(slot, str(slot), SLOT_TOKENS, Sampling(), room=room)
        for slot, room in enumerate(rooms)
    )
    ones = np.ones_like(slots)
    stage.step(
        MicroBatch(
            slots, ones * 0, ones, slots * SLOT_TOKENS, admitted, samples=np.zeros(SLOTS, bool)
        ),
        torch.ones(SLOTS, dtype=torch.int64),
    )


def price_rows(name: str, folder: Path, bits: int, dtype: str) -> Iterator[str]:
    """A line of the table for each kind of work."""
    both = [stage_of(folder, bits, dtype, deterministic) for deterministic in (False, True)]
    for stage in both:
        admit_all(stage)
    for work, *sizes in WORK:
        times: list[list[float]] = [[], []]
        for _ in range(TURNS):
            for stage, each in zip(both, times, strict=True):
                each.append(step_s(stage, *sizes))
        usual, fixed = (1e3 * median(each[1:]) for each in times)
        yield f"| {name} | {bits} | {work} | {usual:.1f} | {fixed:.1f} | {fixed / usual:.2f} |"


def tokens_of(stage: Stage, at_once: int) -> list[tuple[int, ...]]:
    """The new tokens of rows that are in flight so many at once."""
    draw = np.random.default_rng(0)
    requests = [
        Request(
            str(i),
            tuple(draw.integers(3, 1000, draw.integers(4, 64)).tolist()),
            NEW_TOKENS,
            Sampling(temperature=float(i % 2), seed=11, ignore_eos=True),
        )
        for i in range(ROWS)
    ]
    scheduler = StaticScheduler(QueueSizes(at_once, at_once, at_once, SLOT_TOKENS), 1)
    scheduler.add(requests, last=True)
    ended = [each for some in drive(scheduler, LocalPipeline([stage])) for each in some]
    found = {each.custom_id: each.token_ids for each in ended}
    return [found[request.custom_id] for request in requests]


def difference(name: str, folder: Path, bits: int, dtype: str) -> str:
    """How many rows differ, as usual and deterministic."""
    counts = []
    for deterministic in (False, True):
        alone, together = (
            tokens_of(stage_of(folder, bits, dtype, deterministic), each) for each in (1, ROWS)
        )
        differ = [one != other for one, other in zip(alone, together, strict=True)]
        counts.append(f"{sum(differ[::2])} greedy and {sum(differ[1::2])} drawn")
    return (
        f"{name}, {bits} bit: of {ROWS // 2} rows each differ {' | deterministic: '.join(counts)}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo", "wide"])
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4, 3], choices=BITWIDTHS)
    parser.add_argument("--rows", type=int, nargs="+", default=[stages.FIXED_ROWS])
    parser.add_argument("--dtype", default=native_dtype())
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tell = sys.stdout.write
    tell(f"{processor_name()}, 1 thread, {options.dtype}\n")
    with tempfile.TemporaryDirectory() as made:
        for rows in options.rows:
            with patch.object(stages, "FIXED_ROWS", rows):
                tell(f"\npasses of {rows} rows\n\n")
                tell("| model | bits | work | ms | deterministic, ms | ratio |\n")
                tell("| --- | --- | --- | --- | --- | --- |\n")
                for name in options.models:
                    folder = wide_layer(Path(made)) if name == "wide" else resolve(name)
                    for bits in options.bits:
                        for line in price_rows(name, folder, bits, options.dtype):
                            tell(line + "\n")
                            sys.stdout.flush()
        tell("\n")
        for bits in options.bits if "demo" in options.models else ():
            tell(difference("demo", resolve("demo"), bits, options.dtype) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
