"""Embedding and LM head at 6 and 8 bit beside 16: bytes by planning, divergence, times of steps and
starts.

    python -m benchmarks.quantization.head [--tokens 8192] [--passes 12]

Bytes are those of one A100 or of one CPU with AVX-512, which hold all layers at 4 bit. Divergence
is that from the 16-bit model, of SmolLM2 and the demo model (`benchmarks.quantization.models`), in
float32, with the kernels of CPUs with VNNI, weighed by what a stage measures by itself. Steps are
decode steps of SmolLM2 in bfloat16 on one thread, with one stage of each kind in this process; they
take turns, pass by pass. Starts are of stages of SmolLM2, with an empty cache of packed layers and
with what the first start left there; each pass has a folder of its own.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from actors.messages import Admission, MicroBatch, Sampling, TokenRange
from actors.stage.spec import StageSpec
from actors.stage.stage import Stage
from benchmarks.lab import header, processor_name, table_row
from benchmarks.quantization.models import DEMO, smollm2, texts_for
from benchmarks.quantization.quality import CPU, FLOAT32, VNNI, importance_of
from llmpq.quality.scoring import Subject, evaluate
from planner.cluster.accelerators import find_accelerator
from planner.costs.stored_bytes import embedding_bytes, head_bytes, layer_weight_bytes, norm_bytes
from planner.model.finding import model_shape
from planner.model.shape import ModelShape
from quant.checkpoint.reader import Checkpoint
from quant.devices import local_processor
from quant.loading.cache_settings import NO_CACHE, CacheSettings
from quant.loading.emulated_kernels import LayerScheme
from quant.scheme import FULL_BITS, HEAD_BITWIDTHS, Processor

PLANNED = ("llama-3-8b", "qwen2.5-7b", "qwen2.5-0.5b", "google/gemma-2-2b")
LAYER_BITS, MIB = 4, 2**20
REQUESTS, PROMPT, STEPS = (1, 8, 32), 64, 8


def whole_bytes(shape: ModelShape, bits: int, processor: Processor, dtype: str) -> tuple[int, int]:
    """Bytes of all layers at `LAYER_BITS`, and of both ends at `bits` on the same stage."""

    device: Any = SimpleNamespace(processor=processor)
    layers = shape.over_layers(lambda kind: layer_weight_bytes(kind, LAYER_BITS, device, dtype))
    own = shape.with_all(head_bits=bits), dtype, processor
    ends = embedding_bytes(*own, with_head=True) + head_bytes(*own, on_first=True)
    return layers, ends + norm_bytes(own[0], dtype)


def byte_rows(model: Path) -> Iterator[str]:
    gpu = find_accelerator("A100-SXM4-80GB").processor
    for name in (str(model), *PLANNED):
        shape, on_cpu = model_shape(name), name == str(model)
        processor = Processor() if on_cpu else gpu
        found = [whole_bytes(shape, bits, processor, "bfloat16") for bits in HEAD_BITWIDTHS]
        layers, ends = found[0][0], [own for _, own in reversed(found)]
        less = [f"{1 - (layers + own) / (layers + ends[0]):.0%}" for own in ends[1:]]
        figures = [f"{each / MIB:,.0f}" for each in (layers, *ends)]
        yield table_row(["SmolLM2" if on_cpu else name, *figures, *less])


def divergence_rows(options: argparse.Namespace) -> Iterator[str]:
    for model in (smollm2(), DEMO):
        shape, windows = model_shape(str(model)), texts_for(model, options).held_out
        layers = shape.layers
        weighed, full = importance_of(model, shape), (FLOAT32,) * layers
        rows = LayerScheme(8, dtype=torch.float32, planned_for=Processor(instruction_sets=NONE))
        subjects = [
            Subject("16 bit", full, FLOAT32, FLOAT32),
            Subject("8 bit, both, a scale a row and no more", full, rows, rows),
        ]
        for bits in HEAD_BITWIDTHS[:-1]:
            ends = LayerScheme(bits, dtype=torch.float32, planned_for=VNNI)
            own = (LayerScheme(bits, dtype=torch.float32),) * layers
            subjects += [
                Subject(f"{bits} bit, embedding", full, ends, FLOAT32, weighed),
                Subject(f"{bits} bit, LM head", full, FLOAT32, ends, weighed),
                Subject(f"{bits} bit, both", full, ends, ends, weighed),
                Subject(f"{bits} bit, both, all columns alike", full, ends, ends),
                Subject(f"{bits} bit, all layers", own, FLOAT32, FLOAT32, weighed),
            ]
        name = "demo model" if model == DEMO else "SmolLM2"
        for result in evaluate(Checkpoint(model), windows, subjects, CPU)[1:]:
            nats = f"{result.divergence:.5f} ± {result.divergence_error:.5f}"
            yield table_row([name, result.name, nats])


NONE: frozenset[str] = frozenset()


def started(
    folder: Path, layers: int, bits: int, head_bits: int, cache: CacheSettings = NO_CACHE
) -> tuple[Stage, float]:
    """A stage of the first `layers` and both ends, and the seconds it took."""
    longest, most = PROMPT + STEPS + 1, max(REQUESTS)
    spec = StageSpec(
        0, 1, range(layers), (bits,) * layers, "bfloat16", most, longest, most * longest,
        head_bits=head_bits,
    )  # fmt: skip
    began = perf_counter()
    stage = Stage(spec, folder, CPU, local_processor(CPU), cache)
    return stage, perf_counter() - began


class TimedStage:
    """A stage of all layers, and decode steps of requests whose prompts are not computed."""

    def __init__(self, folder: Path, bits: int, head_bits: int) -> None:
        layers, longest = model_shape(str(folder)).layers, PROMPT + STEPS + 1
        most = max(REQUESTS)
        self.stage, self.loading_s = started(folder, layers, bits, head_bits)
        admitted = tuple(
            Admission(slot, str(slot), 10**9, Sampling(ignore_eos=True), room=room)
            for slot, room in enumerate(TokenRange(s * longest, longest) for s in range(most))
        )
        self._longest = longest
        self.stage.step(self._batch(most, PROMPT, admitted), torch.full((most,), 5))

    def _batch(self, requests: int, start: int, admitted: tuple[Admission, ...]) -> MicroBatch:
        slots = np.arange(requests)
        begins = slots * self._longest
        return MicroBatch(slots, slots * 0 + start, slots * 0 + 1, begins, admitted=admitted)

    def step_s(self, requests: int) -> float:
        batches = [self._batch(requests, PROMPT + step, ()) for step in range(STEPS)]
        tokens = torch.arange(5, 5 + requests)
        began = perf_counter()
        for each in batches:
            self.stage.step(each, tokens)
        return (perf_counter() - began) / STEPS


def step_rows(model: Path, passes: int) -> Iterator[str]:
    for bits in (16, 4):
        stages = {each: TimedStage(model, bits, each) for each in reversed(HEAD_BITWIDTHS)}
        held = [f"{each.stage.stats().weight_bytes / MIB:.0f}" for each in stages.values()]
        loading = [f"{each.loading_s:.1f}" for each in stages.values()]
        yield table_row([bits, "MiB held", *held, "", ""])
        yield table_row([bits, "s to load", *loading, "", ""])
        for requests in REQUESTS:
            found: dict[int, list[float]] = {each: [] for each in stages}
            for _ in range(passes):
                for each, stage in stages.items():
                    found[each].append(stage.step_s(requests))
            plain, *coded = (median(each) for each in found.values())
            times = [f"{1e3 * each:.2f}" for each in (plain, *coded)]
            faster = [f"{plain / each:.2f} times" for each in coded]
            yield table_row([bits, f"ms a step of {requests}", *times, *faster])


def start_rows(model: Path, passes: int) -> Iterator[str]:
    """Seconds of starts with all layers at `LAYER_BITS`, and with one of 16, which has no codes."""
    for layers, bits in ((model_shape(str(model)).layers, LAYER_BITS), (1, FULL_BITS)):
        started(model, layers, bits, FULL_BITS)  # compiles and imports
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(passes):
            for head_bits in reversed(HEAD_BITWIDTHS):
                with TemporaryDirectory() as folder:
                    for start in ("first", "second"):
                        _, seconds = started(model, layers, bits, head_bits, CacheSettings(folder))
                        found[start, head_bits].append(seconds)
        for start in ("first", "second"):
            times = [f"{median(found[start, each]):.2f}" for each in reversed(HEAD_BITWIDTHS)]
            yield table_row([f"{layers} of {bits} bit", start, *times])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["bytes", "divergence", "steps", "starts"])
    parser.add_argument("--tokens", type=int, default=8192, help="most of the held-out text")
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--text", type=Path, nargs="+", help="held-out text")
    parser.add_argument("--calibration", type=Path, nargs="+", help="any text: nothing uses it")
    parser.set_defaults(quick=False, calibration_tokens=512)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = smollm2()
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
    tables = {
        "bytes": (
            "model | layers at 4 bit, MiB | ends at 16 | at 8 | at 6 | less in all at 8 | at 6",
            byte_rows(model),
        ),
        "divergence": ("model | what is rounded | divergence, nats", divergence_rows(options)),
        "steps": (
            "layers' bits | what | head 16 | head 8 | head 6 | 8 is faster | 6 is faster",
            step_rows(model, options.passes),
        ),
        "starts": (
            "layers | start | s with head 16 | head 8 | head 6",
            start_rows(model, options.passes),
        ),
    }
    for part in options.parts:
        names, rows = tables[part]
        print(f"\n{header(names)}")
        for row in rows:
            print(row, flush=True)


if __name__ == "__main__":
    main()
