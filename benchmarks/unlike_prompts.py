"""Prefills of unlike prompts on this CPU, measured, and predicted with and without parts of layers.

    python -m benchmarks.unlike_prompts [--bits 16] [--hidden 512] [--micro_batches 12]

A LLaMA layer of one thread is profiled as `llmpq profile` does, in turns with random micro-batches
of unlike prompts: lengths of ExeGPT's task S, lognormal ones, and a long prompt among short ones.
What these take is predicted from the profile

- *apart*: by attention that was measured apart, at each length, and the rest by all tokens,
- *by terms*: the same, from the terms of a fit to whole layers (a profile without attention),
- *whole*: by the mean of prefills whose prompts all have one of the lengths, from whole layers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from actors.profiling.on_cluster import measure_on_cluster
from actors.profiling.task import MeasuredLayer, ProfileState, ProfileTask
from benchmarks.latency_model import layer_values, row, this_cpu
from benchmarks.machine import native_dtype, processor_name
from llmpq.remote.session import ray_session
from planner.costs.roofline import RooflineLatency
from planner.costs.unlike_prompts import unlike_prompts_s
from planner.length_distribution import FloatArray
from planner.model.finding import ModelShape, shape_from_config
from planner.profiles.design import DesignSpace, LayerWorkload, design
from planner.profiles.fit import FittedLatency
from quant.scheme import BITWIDTHS

MOST_TOKENS = 2048
LONGEST = 1024
SIZES = (2, 3, 4, 6, 8, 12)


def random_prompts(count: int, seed: int) -> Iterator[LayerWorkload]:
    """Yield micro-batches of 2 to 12 prompts, of three kinds of lengths in turn."""
    generator = np.random.default_rng(seed)
    kinds = (
        lambda size: generator.normal(256, 252, size),
        lambda size: np.exp(generator.normal(4.5, 1.0, size)),
        lambda size: np.append(generator.uniform(8, 40, size - 1), generator.uniform(600, LONGEST)),
    )
    for number in range(count):
        size, drawn = SIZES[number // len(kinds) % len(SIZES)], kinds[number % len(kinds)]
        lengths = [MOST_TOKENS + 1]
        while sum(lengths) > MOST_TOKENS:
            lengths = np.clip(np.round(drawn(size)), 1, LONGEST).astype(int).tolist()
        yield LayerWorkload.of_prompts(lengths)


def measured(options: argparse.Namespace, dtype: str) -> ProfileState:
    """The profile of one bitwidth, and micro-batches of unlike prompts, in turns."""
    space = DesignSpace(max_length=LONGEST, prefill_tokens=MOST_TOKENS)
    unlike = random_prompts(options.micro_batches, options.seed)
    task = ProfileTask(
        layer_values(options.hidden),
        dtype,
        {options.bits: (*design(space, "prefill", options.points), *unlike)},
        threads=1,
        rounds=options.rounds,
        seed=options.seed,
    )
    with ray_session("local"):
        return list(measure_on_cluster(task, this_cpu(1)))[-1]


@dataclass(frozen=True)
class Predictions:
    """What fits to the prefills `alike` say of one layer of `shape`."""

    shape: ModelShape
    alike: tuple[MeasuredLayer, ...]
    dtype: str

    def of(self, prompts: Sequence[int]) -> dict[str, float]:
        """Seconds of a micro-batch by each way."""
        whole = self._fit(apart=False)
        return {
            "apart": self._by_parts(self._fit(apart=True), prompts),
            "by terms": self._by_parts(whole, prompts),
            "whole": sum(
                count
                / len(prompts)
                * whole.layer_prefill_s(this_cpu(1), self._bits, len(prompts), length, self.dtype)
                for length, count in Counter(prompts).items()
            ),
        }

    def attention_errors(self, apart: bool) -> list[float]:
        """Relative errors of attention's seconds in the fitted prefills themselves."""
        fit = self._fit(apart)
        return [
            self._parts(fit, each.workload.batch_size, each.workload.length)[0][0]
            / (each.attention_s or np.nan)
            - 1
            for each in self.alike
        ]

    @property
    def _bits(self) -> int:
        return self.alike[0].bits

    def _fit(self, apart: bool) -> FittedLatency:
        rows = tuple(
            replace(
                row("CPU", self.shape, each.workload, each.bits, each.seconds),
                dtype=self.dtype,
                attention_s=each.attention_s if apart else None,
            )
            for each in self.alike
        )
        return FittedLatency(rows, RooflineLatency(self.shape))

    def _parts(
        self, fit: FittedLatency, requests: int, length: int
    ) -> tuple[FloatArray, FloatArray]:
        workload = "prefill", requests, length, self.dtype
        found = fit.layer_seconds(this_cpu(1), self._bits, *workload)
        return np.array([found.attention_s]), np.array([found.rest_s])

    def _by_parts(self, fit: FittedLatency, prompts: Sequence[int]) -> float:
        return float(unlike_prompts_s(prompts, lambda *work: self._parts(fit, *work))[0])


def table(options: argparse.Namespace) -> Iterator[str]:
    """Markdown: measured micro-batches and errors of predictions, and their means."""
    dtype = options.dtype or native_dtype()
    name = f"LLaMA layer of width {options.hidden}"
    shape = shape_from_config(name, layer_values(options.hidden))
    state = measured(options, dtype)
    alike = tuple(each for each in state.measured if not each.workload.prompts)
    unlike = [each for each in state.measured if each.workload.prompts]
    predictions = Predictions(shape, alike, dtype)
    yield (
        f"{name} at {options.bits} bit on {processor_name()}, 1 thread, {dtype}; fitted to "
        f"{len(alike)} prefills of prompts alike; the machine's pace varied by "
        f"{state.speed_spread:.0%}"
    )
    yield ""
    yield "| prompts | tokens | shortest, longest | ms | attention | apart | by terms | whole |"
    yield "|---|---|---|---|---|---|---|---|"
    errors: dict[str, list[float]] = {}
    for each in sorted(unlike, key=lambda each: each.workload.tokens):
        prompts = each.workload.prompts
        found = {
            way: seconds / each.seconds - 1 for way, seconds in predictions.of(prompts).items()
        }
        for way, error in found.items():
            errors.setdefault(way, []).append(error)
        yield (
            f"| {len(prompts)} | {sum(prompts)} | {min(prompts)}, {max(prompts)} | "
            f"{each.seconds * 1e3:.1f} | {(each.attention_s or 0) * 1e3:.1f} | "
            + " | ".join(f"{error:+.1%}" for error in found.values())
            + " |"
        )
    means = " | ".join(f"{np.mean(np.abs(found)):.1%}" for found in errors.values())
    most = " | ".join(f"{np.max(np.abs(found)):.1%}" for found in errors.values())
    yield f"| mean | | | | | {means} |"
    yield f"| most | | | | | {most} |"
    yield ""
    apart, by_terms = (
        np.mean(np.abs(predictions.attention_errors(measured))) for measured in (True, False)
    )
    yield (
        f"Attention of the fitted prefills is off by {apart:.0%} in the mean where it was measured "
        f"apart, and by {by_terms:.0%} by the terms of whole layers."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=16, choices=BITWIDTHS)
    parser.add_argument("--hidden", type=int, default=512, help="width of the layer")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="else what is fast here")
    parser.add_argument("--micro_batches", type=int, default=18, help="of unlike prompts")
    parser.add_argument("--points", type=int, default=16, help="profiled")
    parser.add_argument("--rounds", type=int, default=12, help="most passes of each")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    for line in table(parser.parse_args(arguments)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
