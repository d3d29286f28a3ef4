"""How many rows get other greedy tokens under another policy, on this machine's CPU.

    python -m benchmarks.speed.same_tokens [--models demo smollm2] [--rows 200]

One stage in this process, one thread, 16 bits, 16 rows at once, prompts of 8 to 64 tokens out of
this repository's pages; in float32, in bfloat16, and in bfloat16 with deterministic stages. A row
differs where any of its tokens is not that of `static`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from actors.messages import Request, Sampling
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from benchmarks.lab import header, processor_name, table_row
from benchmarks.quantization.models import MODELS
from llmpq.quality.text_windows import read_documents, token_windows
from llmpq.tokenizing.requests import load_tokenizer
from planner.model.finding import model_shape
from planner.scheduling import PolicyName
from quant.devices import local_processor
from tests.actors.driving import drive
from tests.actors.local_pipeline import LocalPipeline

PAGES = Path(__file__).resolve().parents[2] / "docs"
CPU = torch.device("cpu")
AT_ONCE, PREFILL, PART_TOKENS = 16, 4, 32
SHORTEST, LONGEST = 8, 64
POLICIES: tuple[PolicyName, ...] = ("orca", "s3")
COMPUTED = (("float32", False), ("bfloat16", False), ("bfloat16", True))

Answers = dict[str, tuple[int, ...]]


def requests_of(folder: Path, rows: int, new_tokens: int) -> list[Request]:
    """Greedy requests whose prompts are pieces of the pages; answers of unlike lengths."""
    pages = read_documents(sorted(PAGES.glob("*.md")))
    windows = token_windows(pages, load_tokenizer(folder), LONGEST, rows * LONGEST)
    draw = np.random.default_rng(0)
    lengths = draw.integers(SHORTEST, LONGEST + 1, rows).tolist()
    outputs = draw.integers(new_tokens // 4, new_tokens + 1, rows).tolist()
    drawn = zip(windows.token_ids.tolist(), lengths, outputs, strict=True)
    return [
        Request(str(i), tuple(ids[:length]), most, Sampling(ignore_eos=True))
        for i, (ids, length, most) in enumerate(drawn)
    ]


def sizes_of(policy: PolicyName, longest: int) -> QueueSizes:
    """As many rows at once under each policy, with as much memory."""
    sizes = QueueSizes(AT_ONCE, PREFILL, AT_ONCE, longest, policy)
    if policy == "static":
        return sizes
    tokens = AT_ONCE * longest
    mixed = replace(sizes, max_batch_size=AT_ONCE, prefill_chunk_tokens=PART_TOKENS)
    return replace(mixed, kv_tokens=tokens, n_slots=tokens)


def answers(stage: Stage, sizes: QueueSizes, requests: Sequence[Request]) -> Answers:
    """The tokens of each request."""
    scheduler = make_scheduler(sizes, 1)
    scheduler.add(requests)
    ended = drive(scheduler, LocalPipeline([stage]))
    return {each.custom_id: each.token_ids for some in ended for each in some}


def line(name: str, dtype: str, deterministic: bool, options: argparse.Namespace) -> str:
    """A line of the table: of how many rows the tokens are not those of `static`."""
    folder = MODELS[name]()
    layers = model_shape(str(folder)).layers
    longest = LONGEST + options.new_tokens
    sizes = AT_ONCE, longest, AT_ONCE * longest
    bits = (16,) * layers
    spec = StageSpec(0, 1, range(layers), bits, dtype, *sizes, deterministic=deterministic)
    requests = requests_of(folder, options.rows, options.new_tokens)

    def run(policy: PolicyName) -> Answers:
        stage = Stage(spec, folder, CPU, local_processor(CPU))
        return answers(stage, sizes_of(policy, longest), requests)

    static = run("static")
    differ = [sum(static[i] != each[i] for i in static) for each in map(run, POLICIES)]
    return table_row([name, dtype, "yes" if deterministic else "no", len(static), *differ])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "smollm2"], choices=MODELS)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--new_tokens", type=int, default=32, help="the most of a row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread\n")
    print(header(f"model | type | deterministic | rows | {' | '.join(POLICIES)}"))
    for name in options.models:
        for dtype, deterministic in COMPUTED:
            print(line(name, dtype, deterministic, options), flush=True)


if __name__ == "__main__":
    main()
