"""Where a stage's step goes on this CPU: decode steps of 8 and 32 requests, a prompt and eight.

    python -m benchmarks.speed.step [--threads 2] [--before OTHER/CHECKOUT] [--turns 2]

One stage with all layers of the LLaMA of `benchmarks.speed.throughput`, alone in a process with the
environment of a stage's. The step's time is measured without the profiler, and its parts with it;
Python is the rest. What runs below attention, or sampling, belongs to it. With `--before`, stages
of both checkouts take turns, pass by pass, and shares are shown of both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.lab import (
    ROOT,
    Contestant,
    Prompts,
    header,
    processor_name,
    serve,
    spread,
    table_row,
)

PROMPT, STEPS, WARM_UPS = 128, 4, 1
CASES = {
    "decode, 8 requests": 8,
    "decode, 32 requests": 32,
    "a prompt of 128": -1,
    "8 prompts of 128": -8,
}
"""Requests of a step; negative: prompts."""

PARTS = ("products", "attention", "element-wise", "copies", "sampling", "Python")
_MARKS = {
    "actors.stage.sampler.Sampler.sample": "sampling",
    "actors.attention.ragged.attend_stored": "attention",
    "actors.attention.kv_cache.KVCache.append": "copies",
    "actors.stage.layers.cpu_layer.LayerLoops.add": "element-wise",
    "actors.stage.layers.cpu_layer.LayerLoops._turn": "element-wise",
    "actors.stage.layers.cpu_layer.LayerLoops.activate": "element-wise",
    "quant.backends.cpu.widened.multiply": "products",
}
"""Functions whose whole time belongs to a part; those that a checkout does not have are passed
over."""

_PRODUCTS = ("linear", "mm", "matmul", "bmm", "pack_mm", "qlinear")
_COPIES = ("copy", "cat", "clone", "contiguous", "index", "embedding", "gather", "stack", "fill")


def _part_of(event: Any) -> str | None:
    """The part that an event of the profiler belongs to; None: Python's."""
    above = event
    while above is not None:
        if above.name in PARTS:
            return str(above.name)
        above = above.cpu_parent
    _, _, name = event.name.partition("::")
    if not name:
        return None
    if any(name.strip("_").startswith(each) or each in name for each in _PRODUCTS):
        return "products"
    return "copies" if any(each in name for each in _COPIES) else "element-wise"


def _mark_parts() -> None:
    import importlib

    from torch.profiler import record_function

    def marked(work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with record_function(part):
                return work(*arguments, **named)

        return call

    for path, part in _MARKS.items():
        module, *owner, name = path.split(".")
        found: Any = None
        for step in (module, *owner):
            module = step if found is None else f"{module}.{step}"
            try:
                found = getattr(found, step, None) or importlib.import_module(module)
            except ImportError:
                break
        else:
            if hasattr(found, name):
                setattr(found, name, marked(getattr(found, name), part))


class _Stage:
    """A stage and the micro-batches of its cases, which leave it as it was."""

    def __init__(self, folder: Path) -> None:
        import numpy as np
        import torch

        from actors.messages import Admission, MicroBatch, Sampling, TokenRange
        from actors.stage.spec import StageSpec
        from actors.stage.stage import Stage
        from quant.devices import local_processor

        config = json.loads((folder / "config.json").read_text())
        most, longest = max(map(abs, CASES.values())), PROMPT + STEPS + 1
        spec = StageSpec(
            index=0, stages=1, layers=range(config["num_hidden_layers"]),
            bitwidths=(16,) * config["num_hidden_layers"], slots=most, max_tokens=longest,
            kv_tokens=most * longest, dtype="bfloat16",
        )  # fmt: skip
        device = torch.device("cpu")
        self.stage = Stage(spec, folder, device, local_processor(device))

        def batch(requests: int, tokens: int) -> MicroBatch:
            slots = np.arange(abs(requests))
            starts = slots * 0 + (0 if tokens > 1 else PROMPT)
            rooms = [TokenRange(int(slot) * longest, longest) for slot in slots]
            admitted = tuple(
                Admission(int(slot), str(slot), 10**9, Sampling(ignore_eos=True), room=room)
                for slot, room in zip(slots, rooms, strict=True)
            )
            first = admitted if tokens > 1 else ()
            return MicroBatch(slots, starts, slots * 0 + tokens, slots * longest, admitted=first)

        self.batch = batch
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, config["vocab_size"], (most * PROMPT,), generator=draw)
        admitting = replace(batch(most, 1), admitted=batch(most, PROMPT).admitted)
        self.stage.step(admitting, self.tokens[:most])

    def passed(self, case: int) -> tuple[int, float]:
        """Steps of a pass of this case, and their seconds."""
        requests = abs(case)
        if case < 0:
            batch, tokens = self.batch(case, PROMPT), self.tokens[: requests * PROMPT]
            began = perf_counter()
            self.stage.step(batch, tokens)
            return 1, perf_counter() - began
        batch, tokens = self.batch(case, 1), self.tokens[:requests]
        batches = [replace(batch, starts=batch.starts + step) for step in range(STEPS)]
        began = perf_counter()
        for each in batches:
            self.stage.step(each, tokens)
        return STEPS, perf_counter() - began

    def parts(self, case: int) -> dict[str, float]:
        """Seconds of a step by `PARTS`."""
        from torch.profiler import ProfilerActivity, profile

        whole = min(s / n for n, s in (self.passed(case) for _ in range(2)))
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            steps, profiled = self.passed(case)
        whole = min(whole, profiled / steps)  # on a busy machine
        seconds: Counter[str] = Counter()
        for event in profiler.events() or ():
            part = _part_of(event)
            if part is not None:
                seconds[part] += event.self_cpu_time_total / 1e6 / steps
        seconds["Python"] = max(0.0, whole - sum(seconds.values()))
        return {part: seconds[part] for part in PARTS}


def work(folder: Path) -> None:
    """Serve passes of cases, each told as so many rows of their number."""
    _mark_parts()
    stage = _Stage(folder)
    for case in CASES.values():
        for _ in range(WARM_UPS):
            stage.passed(case)
    found = {name: stage.parts(case) for name, case in CASES.items()}

    def run(rows: Prompts) -> int:
        (case,) = rows[0]
        steps, seconds = stage.passed(case)
        print(f"\n{_TOOK}{seconds / steps}", flush=True)
        return len(rows)

    serve(run, json.dumps(found))


_TOOK = "step took "


def main() -> None:
    """Print the shares of a step, and with `--before` the ratio of both checkouts' seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--before", type=Path, help="another checkout, to take turns with")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    import torch

    from actors.processes.device import stage_environment
    from benchmarks.speed.throughput_contestants import Case

    trees = {"here": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{processor_name()}, {capability}, torch {torch.__version__}, {options.threads} threads")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name) / "model"
        Case("llama", "equal").write_model(folder)
        command = [sys.executable, "-P", __file__, "--work", str(folder)]
        stages = {
            tree: stack.enter_context(
                Contestant(
                    tree,
                    command,
                    stage_environment(options.threads) | {"PYTHONPATH": str(root)},
                    Path(name) / f"{tree}.log",
                )
            )
            for tree, root in trees.items()
        }
        print(header(("step", "checkout", "ms", *PARTS)))
        for case in CASES:
            for tree, stage in stages.items():
                parts = json.loads(stage.what)[case]
                whole = sum(parts.values())
                shares = (f"{seconds / whole:.0%}" for seconds in parts.values())
                print(table_row((case, tree, f"{whole * 1e3:.1f}", *shares)))
        _race(stages, options.turns)


def _race(stages: dict[str, Contestant], turns: int) -> None:
    print("\n" + header(("step", *(f"{tree}, ms" for tree in stages), "before / here")))
    for case, number in CASES.items():
        took: dict[str, list[float]] = {tree: [] for tree in stages}
        for _ in range(turns):
            for tree, stage in stages.items():
                steps = 1 if number < 0 else STEPS
                took[tree].append(stage.run([[number]], 1).seconds / steps)
        ratios = [a / b for a, b in zip(took.get("before", ()), took["here"], strict=False)]
        cells = (spread([each * 1e3 for each in seconds], 1) for seconds in took.values())
        print(table_row((case, *cells, spread(ratios, 2) if ratios else "")), flush=True)


if __name__ == "__main__":
    main()
