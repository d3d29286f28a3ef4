"""What a decode step launches, moves and should take on GPUs, counted without one.

    python -m benchmarks.gpu.counts [--models llama-13b] [--gpus V100-32G] [--bits 4]

The decoder that stages run passes over tensors without memory (`benchmarks.gpu.counting`): with
llmpq's kernels, and with what takes their place where self-tests fail, in the figures before `→`.
Bytes are those of each kernel's tensors, once each; *by bytes* is their time at the bandwidth that
plans count on (`planner.costs.roofline`), *planned* what plans count for the whole step, with
embedding, LM head and sampling. Registers are the assembler's,
for each of `--capabilities`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from actors.attention import cuda as attention
from actors.messages import Admission, MicroBatch, Sampling
from actors.stage.layers import cuda_layer
from actors.stage.model_config import config_of_values
from benchmarks.gpu.counting import Started, Step
from benchmarks.gpu.machine_code import (
    FLOAT,
    KNOWN_CAPABILITIES,
    MATRIX,
    OTHER,
    compiled,
    longest_loops,
)
from benchmarks.lab import header, show, table_row
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.machine import REPLAYED_S, roofline_efficiency
from planner.costs.roofline import RooflineLatency
from planner.costs.stored_bytes import kv_token_bytes
from planner.model.finding import model_config, model_shape
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.search.find import find_plan
from planner.workload import Workload
from quant.backends.cuda import products as cuda_products
from quant.backends.cuda import w8a8 as cuda_w8a8
from quant.backends.cuda.driver import CudaError, assembler_log, compile_cuda, text_of
from quant.scheme import BITWIDTHS
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import save_tiny
from tests.actors.stage.test_launches import Waits, on_meta

DTYPE = "float16"
MULTIPROCESSORS = {
    "P100": 56, "P40": 30, "V100": 80, "V100-32G": 80, "T4": 40, "A100": 108, "A100-40G": 108,
    "A10": 72, "L4": 58, "H100": 132,
}  # fmt: skip
"""Of the data sheets; they decide how far attention splits ranges."""

HOST_S = 10e-6
"""What Python and torch take to start a kernel: of 1,600 to 2,000 in a step they take 15 to 30 ms
(the count before this one, of July 2026, as the other figures of before here)."""

BEFORE_SHARE = 0.78
"""Of a V100's bandwidth, by which the figures of before were made."""

KERNEL_SOURCES = (
    ("attention", attention.SOURCE, {"HEAD_DIM": 128, "CODED": 0}),
    ("attention, 8-bit keys", attention.SOURCE, {"HEAD_DIM": 128, "CODED": 1}),
    *((f"products, {bits} bit", cuda_products.SOURCE, {"BITS": bits}) for bits in BITWIDTHS[:-1]),
    ("products of codes, 8 bit", cuda_w8a8.SOURCE, {}),
    ("layers", cuda_layer.SOURCE, {"HEAD_DIM": 128, "CODED": 0, "HIDDEN_SIZE": 4096}),
)


@dataclass(frozen=True)
class Case:
    """A decode step of `requests`, each with `tokens` before its new one, in the mean."""

    model: str
    gpu: str
    bits: int
    kv_bits: int
    requests: int
    tokens: int

    def layer(self, own_kernels: bool) -> Started:
        """What a layer starts; lengths are unlike, and ranges follow one another."""
        capability = self.device.accelerator.compute_capability
        assert capability is not None
        step = Step(
            lengths=unlike(self.requests, self.tokens + 1),
            bits=self.bits,
            kv_bits=self.kv_bits,
            capability=capability,
            multiprocessors=MULTIPROCESSORS[self.gpu],
            own_kernels=own_kernels,
        )
        config = config_of_values(model_config(self.model))
        first = step.count(config, 1)
        return step.count(config, 2) - first

    @cached_property
    def own(self) -> Started:
        return self.layer(own_kernels=True)

    @cached_property
    def other(self) -> Started:
        return self.layer(own_kernels=False)

    @cached_property
    def device(self) -> Device:
        return ClusterSpec.from_counts([self.gpu], [1]).devices[0]

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.model)

    @property
    def kv_layer_bytes(self) -> int:
        """Of the keys and values that a layer attends to."""
        each = kv_token_bytes(self.shape, self.kv_bits, DTYPE)
        return self.requests * (self.tokens + 1) * each

    def moved_s(self, layer: Started, share: float | None = None) -> float:
        """Seconds of the bytes of all layers, at a `share` of the bandwidth."""
        kind = self.device.accelerator
        rate = kind.memory_bytes_per_s * (share or roofline_efficiency(kind).bandwidth)
        return self.shape.layers * layer.moved_bytes.total() / rate

    @property
    def planned_layers_s(self) -> float:
        work = self.device, self.bits, self.requests, self.tokens, DTYPE
        return self.shape.layers * self._latency.layer_decode_s(*work)

    @property
    def planned_s(self) -> float:
        work = self.device, self.requests, DTYPE
        ends_s = self._latency.embedding_s(*work) + self._latency.final_s(*work)
        return self.planned_layers_s + ends_s

    @property
    def _latency(self) -> RooflineLatency:
        return RooflineLatency(self.shape, self.kv_bits)


def unlike(requests: int, mean: int) -> tuple[int, ...]:
    """Lengths of this mean, an eighth below and above it."""
    off = [(-1) ** request * (mean // 8) for request in range(requests)]
    if requests % 2:
        off[-1] = 0
    return tuple(mean + each for each in off)


def step_rows(cases: Iterable[Case]) -> Iterator[str]:
    yield header(
        "model | GPU | bits | of keys | requests × tokens | launches a layer | launches a step | "
        "attention's bytes / keys' and values' | GB | ms by bytes | ms of Python | planned ms"
    )
    for case in cases:
        both = (case.other, case.own)
        launches = [case.shape.layers * each.kernels.total() for each in both]
        yield table_row((
            case.model, case.gpu, case.bits, case.kv_bits, f"{case.requests} × {case.tokens:,}",
            _arrow(f"{each.kernels.total()}" for each in both),
            _arrow(f"{each:,}" for each in launches),
            _arrow(f"{each.attention_bytes / case.kv_layer_bytes:.2f}" for each in both),
            _arrow(f"{case.shape.layers * each.moved_bytes.total() / 1e9:.1f}" for each in both),
            _arrow(f"{case.moved_s(each) * 1e3:.1f}" for each in both),
            _arrow(f"{each * HOST_S * 1e3:.1f}" for each in launches),
            f"{case.planned_s * 1e3:.1f}",
        ))  # fmt: skip


def _arrow(texts: Iterable[str]) -> str:
    return " → ".join(texts)


def goal_rows() -> Iterator[str]:
    """The goals of the work on this path, with what was counted before it, and now."""
    yield header("goal | before | now | reached")
    large = Case("llama-13b", "V100-32G", 4, 16, 32, 1024)
    for case in (large, replace(large, kv_bits=8)):
        found_ms, least_ms = _whole_ms(case), case.moved_s(case.own, 1.0) * 1e3
        yield table_row((
            f"LLaMA-13B, 4 bit, V100, 32 × 1,024, keys and values of {case.kv_bits} bit: at most "
            "35 ms by bytes and launches",
            "121 to 198", f"{found_ms:.1f} (by the data sheet's bandwidth {least_ms:.1f})",
            _reached(found_ms <= 35),
        ))  # fmt: skip
    grouped = Case("llama-3-8b", "V100-32G", 4, 16, 32, 1024)
    ratio = grouped.own.attention_bytes / grouped.kv_layer_bytes
    yield table_row((
        "LLaMA-3-8B, attention's bytes over those of keys and values: a ninth, at most 1.1",
        "9 to 11", f"{ratio:.2f}", _reached(ratio <= 1.1),
    ))  # fmt: skip
    launches, waits = large.own.kernels.total(), host_waits()
    text = "kernels of a layer of LLaMA: at most 12"
    yield table_row((text, "39 to 48", launches, _reached(launches <= 12)))
    text = "waits of the host a step: 1"
    yield table_row((text, "4 to 7, of LLM.int8() 280", waits, _reached(waits <= 1)))
    newer = replace(large, gpu="A100", requests=8)
    host_ms = newer.shape.layers * newer.own.kernels.total() * HOST_S * 1e3
    moved_ms = newer.moved_s(newer.own) * 1e3
    yield table_row((
        "LLaMA-13B, 4 bit, A100, 8 × 1,024: not bound by the host", "15 to 30 ms of Python",
        f"{host_ms:.1f} ms of Python without graphs, {moved_ms:.1f} ms by bytes",
        _reached(host_ms <= moved_ms),
    ))  # fmt: skip


def host_waits() -> int:
    """How often the host waits in a step of a stage that samples, a tiny LLaMA's without memory."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        save_tiny(Path(folder), CONFIGS["llama"])
        stage = on_meta(patch, Path(folder), (0, LAYERS))
        slots = np.arange(4)
        admitted = tuple(Admission(slot, str(slot), 9, Sampling()) for slot in slots.tolist())
        prompts = MicroBatch(slots, 0 * slots, 0 * slots + 3, 20 * slots, admitted)
        step = MicroBatch(slots, 0 * slots + 3, 0 * slots + 1, 20 * slots)
        for batch in (prompts, step):
            with Waits(patch) as waits:
                stage.step(batch, torch.ones(int(batch.counts.sum()), dtype=torch.int64))
    return waits.found.total()


def _whole_ms(case: Case) -> float:
    """Milliseconds of a step by its counted bytes and launches, at the bandwidth of before."""
    kind, shape = case.device.accelerator, case.shape
    rate = kind.memory_bytes_per_s * BEFORE_SHARE
    head_s = 2 * shape.head_parameters / rate
    launches_s = shape.layers * case.own.kernels.total() * REPLAYED_S
    return (case.moved_s(case.own, BEFORE_SHARE) + head_s + launches_s) * 1e3


def _reached(holds: bool) -> str:
    return "yes" if holds else "no"


def forecast_rows() -> Iterator[str]:
    """The plan's forecast beside a figure that others have published."""
    yield header("published | tokens/s | planned")
    name, workload = "llama-3.1-8b", Workload(8, 512, 256)
    options = PlanOptions(bits=(16,), dtype=DTYPE)
    cluster = ClusterSpec.from_counts(["V100-32G"], [1])
    plan = find_plan(cluster, model_shape(name), name, workload, options).plan
    yield table_row((
        "Llama-3.1-8B, float16, one V100-32GB, 512 tokens in and 256 out, 8 at once (a fork of "
        "vLLM)", 237, f"{plan.predicted.tokens_per_s:.0f}",
    ))  # fmt: skip


def kernel_rows(capabilities: Sequence[tuple[int, int]]) -> Iterator[str]:
    """What the compiler made of each kernel."""
    yield header(
        "capability | source | kernel | registers | spilled bytes | shared bytes | longest loop: "
        "matrix instructions, multiply-adds, others"
    )
    for capability, (label, source, definitions) in product(capabilities, KERNEL_SOURCES):
        name = f"{capability[0]}.{capability[1]}"
        given = {"BFLOAT16": 0, "CAPABILITY": 10 * capability[0] + capability[1], **definitions}
        try:
            log = assembler_log(text_of(source), capability, given)
            image = compile_cuda(text_of(source), capability, given)
        except CudaError as error:
            yield table_row((name, label, str(error).partition("\n")[0], "", "", "", ""))
            continue
        is_known = 10 * capability[0] + capability[1] in KNOWN_CAPABILITIES
        loops = longest_loops(image) if is_known else {}
        for kernel in compiled(log):
            counts = loops.get(kernel.name)
            mix = [counts[kind] for kind in (MATRIX, FLOAT, OTHER)] if counts else ["–"]
            yield table_row((name, label, *kernel, ", ".join(map(str, mix))))


def chosen(options: argparse.Namespace) -> list[Case]:
    """Every model on every GPU with the first of each number, and the first model on the first GPU
    with each other number.
    """
    numbers = options.bits, options.kv_bits, options.requests
    firsts = [each[0] for each in numbers]
    cases = [
        Case(model, gpu, *firsts, options.tokens)
        for gpu, model in product(options.gpus, options.models)
    ]
    for place, others in enumerate(numbers):
        for other in others[1:]:
            changed = [*firsts[:place], other, *firsts[place + 1 :]]
            cases.append(Case(options.models[0], options.gpus[0], *changed, options.tokens))
    return cases


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.counts", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llama-13b", "llama-3-8b", "opt-30b"])
    names = tuple(MULTIPROCESSORS)
    gpus = ["V100-32G", "P100", "T4", "A100"]
    parser.add_argument("--gpus", nargs="+", choices=names, default=gpus)
    parser.add_argument(
        "--bits", nargs="+", type=int, choices=BITWIDTHS, default=[4, 3, 5, 6, 8, 16]
    )
    parser.add_argument("--kv_bits", nargs="+", type=int, choices=(8, 16), default=[16, 8])
    parser.add_argument("--requests", nargs="+", type=int, default=[32, 8, 128])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument(
        "--capabilities", nargs="*", default=["7.0"], help="to compile every kernel for"
    )
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    capabilities = [tuple(map(int, each.split("."))) for each in options.capabilities]
    for title, lines in (
        ("Steps", step_rows(chosen(options))),
        ("Goals", goal_rows()),
        ("A published figure", forecast_rows()),
        ("Kernels", kernel_rows(capabilities)),
    ):
        show(("", f"## {title}", ""))
        show(lines)


if __name__ == "__main__":
    main()
