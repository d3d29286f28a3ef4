"""Roofline times against measured ones, and against what must hold for any device."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.cluster.accelerators import Accelerator, registry
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.model.layer_parts import Experts
from quant.backends.table import rule_for
from quant.scheme import BITWIDTHS, LinearShape, Processor

OPT_30B = RooflineLatency(model_shape("opt-30b"))
LLAMA_30B = RooflineLatency(model_shape("llama-30b"))


def device(name: str, emulated: bool = False, threads: int = 1) -> Device:
    node = {"accelerators": {name: 1}}
    if name == "CPU":
        node |= {"memory_gib": 8, "threads": threads}
    values = {"name": "one", "nodes": [node], **({"emulate": {}} if emulated else {})}
    return ClusterSpec.from_dict(values).devices[0]


# Milliseconds of one fp16 layer: OPT-30B at 512 tokens (the LLM-PQ authors' published profiles) ...
@pytest.mark.parametrize(
    ("name", "batch", "prefill_ms", "decode_ms"),
    [
        ("T4", 2, 67.0, 5.85),
        ("T4", 8, 262.6, 7.77),
        ("V100-32G", 2, 16.06, 2.44),
        ("V100-32G", 8, 75.6, 3.18),
        ("P100-12G", 8, 1130.7, None),
    ],
)
def test_opt_30b_within_a_factor_of_two(
    name: str, batch: int, prefill_ms: float, decode_ms: float | None
) -> None:
    prefill = OPT_30B.layer_prefill_s(device(name), 16, batch, 512, "float16")
    assert prefill * 1e3 == pytest.approx(prefill_ms, rel=0.3)
    if decode_ms is not None:
        decode = OPT_30B.layer_decode_s(device(name), 16, batch, 512, "float16")
        assert decode * 1e3 == pytest.approx(decode_ms, rel=0.3)


# ... and LLaMA-30B prompts (Helix, ASPLOS'25).
@pytest.mark.parametrize(
    ("name", "tokens", "ms"), [("T4", 1000, 41), ("T4", 4000, 163), ("A100", 2000, 9)]
)
def test_llama_30b_prompts(name: str, tokens: int, ms: float) -> None:
    prefill = LLAMA_30B.layer_prefill_s(device(name), 16, 1, tokens, "float16")
    assert prefill * 1e3 == pytest.approx(ms, rel=0.3)


@pytest.mark.parametrize("accelerator", registry(), ids=lambda entry: entry.name)
def test_times_rise_with_work(accelerator: Accelerator) -> None:
    gpu = device(accelerator.name)
    dtype = gpu.default_dtype
    for bits in BITWIDTHS:
        for time in (OPT_30B.layer_prefill_s, OPT_30B.layer_decode_s):
            assert 0 < time(gpu, bits, 1, 128, dtype) <= time(gpu, bits, 8, 128, dtype)
            assert time(gpu, bits, 8, 128, dtype) < time(gpu, bits, 8, 2048, dtype)
    assert 0 < OPT_30B.final_s(gpu, 1, dtype) < OPT_30B.final_s(gpu, 64, dtype)
    assert 0 < OPT_30B.embedding_s(gpu, 1, dtype) < OPT_30B.embedding_s(gpu, 4096, dtype)


def fused_rows_of_the_library() -> Callable[[int, tuple[int, int], LinearShape], int]:
    """The rows that bitsandbytes multiplies with a packed weight, by multiprocessors, capability
    and shape: its own decision, read from its source, as the module itself needs a GPU's torch.
    """
    package = importlib.util.find_spec("bitsandbytes")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "backends/cuda/ops.py").read_text()
    name = "_gemm_4bit_use_custom_cuda"
    (decision,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == name)
    decision.decorator_list = []  # type: ignore[attr-defined]

    def rows(multiprocessors: int, capability: tuple[int, int], linear: LinearShape) -> int:
        known = {
            "torch": torch,
            "_GEMM_4BIT_CUSTOM_FLOOR_M": 4,
            "_gpu_dispatch_props": lambda _: (multiprocessors, *capability),
        }
        exec(compile(ast.Module([decision], []), name, "exec"), known)
        decide: Any = known[name]
        sizes = linear.out_features, linear.in_features
        return next(m for m in range(2000) if not decide(0, torch.float16, m + 1, *sizes))

    return rows


@pytest.mark.parametrize(
    ("multiprocessors", "capability"),
    [(56, (6, 0)), (80, (7, 0)), (40, (7, 5)), (108, (8, 0)), (84, (8, 6)), (132, (9, 0))],
)
def test_nf4_restores_weights_where_the_library_does(
    multiprocessors: int, capability: tuple[int, int]
) -> None:
    """For more than nine tenths of the parameters of models of many widths."""
    library, processor = fused_rows_of_the_library(), Processor(compute_capability=capability)
    names = ("llama-7b", "llama-13b", "llama-3-8b", "opt-30b", "qwen2.5-14b", "llama-2-70b")
    linears = [linear for name in names for linear in model_shape(name).layer_linears]
    same = 0
    for linear in linears:
        rule = rule_for(processor, 4, linear, "float16", "bnb_nf4")
        ours = rule.cost_of(processor, linear, "float16").restores_from - 1
        same += linear.parameters * (ours == library(multiprocessors, capability, linear))
    assert same > 0.9 * sum(linear.parameters for linear in linears)


def test_4_bit_restores_no_weights_for_up_to_128_rows_where_there_are_tensor_cores() -> None:
    """Restoring moves 4 bytes a weight beyond the half byte that is read of packed ones."""
    for name, dtype in (("V100", "float16"), ("A100", "bfloat16")):
        few, some, most, many = (
            LLAMA_30B.layer_decode_s(device(name), 4, rows, 64, dtype) for rows in (3, 24, 128, 129)
        )
        assert few < some < 1.3 * few
        assert 2.5 * some < many
        assert 1.3 * most < many
    few, many = (LLAMA_30B.layer_decode_s(device("P100"), 4, n, 64, "float16") for n in (24, 25))
    assert few < many


def test_decode_of_weight_only_kernels_is_bound_by_packed_bytes() -> None:
    cpu = device("CPU", threads=2)
    packed = OPT_30B.layer_decode_s(cpu, 4, 1, 16, "bfloat16")
    assert packed < 0.4 * OPT_30B.layer_decode_s(cpu, 16, 1, 16, "bfloat16")


def test_int8_helps_prefill_only_where_the_device_has_it() -> None:
    t4, v100 = device("T4"), device("V100")
    assert OPT_30B.layer_prefill_s(t4, 8, 8, 512, "float16") < OPT_30B.layer_prefill_s(
        t4, 16, 8, 512, "float16"
    )
    assert OPT_30B.layer_prefill_s(v100, 8, 8, 512, "float16") > OPT_30B.layer_prefill_s(
        v100, 16, 8, 512, "float16"
    )


def test_small_experts_of_8_bit_take_a_cpu_as_long_as_each_product_does() -> None:
    """64 experts of 256 x 512, 8 a token: CPU time of a core for those of 16 requests was 22.0 ms
    at 8 bit, 7.5 at 16, and 4.7 at 3 and 4, and of one request 4.0, 1.4 and 0.62.
    """
    shape = replace(model_shape("qwen3-30b-a3b"), hidden_size=512, experts=Experts(64, 8, 256))
    node = {"name": "a", "accelerators": {"CPU": 1}, "memory_gib": 8, "threads": 1}
    (cpu,) = ClusterSpec.from_dict({"name": "c", "nodes": [node]}).devices
    model = RooflineLatency(shape)
    for requests, measured_ms in ((16, (22.0, 7.5, 4.7, 4.7)), (1, (4.0, 1.4, 0.62, 0.62))):
        for bits, ms in zip((8, 16, 3, 4), measured_ms, strict=True):
            planned_s = model.experts_s(cpu, bits, requests, "bfloat16")
            assert planned_s == pytest.approx(ms / 1e3, rel=0.45), bits


def test_emulated_device_keeps_its_times() -> None:
    real, played = device("T4"), device("T4", emulated=True)
    for bits in BITWIDTHS:
        assert OPT_30B.layer_decode_s(
            played, bits, 8, 512, played.compute_dtype()
        ) == OPT_30B.layer_decode_s(real, bits, 8, 512, real.compute_dtype())


def test_threads_and_windows_and_grouped_heads() -> None:
    one, four = device("CPU"), device("CPU", threads=4)
    assert OPT_30B.layer_prefill_s(one, 16, 1, 512, "bfloat16") > 3 * OPT_30B.layer_prefill_s(
        four, 16, 1, 512, "bfloat16"
    )
    windowed = RooflineLatency(model_shape("mistral-7b-v0.1"))
    full = RooflineLatency(model_shape("mistral-7b-v0.3"))
    a100 = device("A100")
    assert windowed.layer_decode_s(a100, 16, 8, 4000, "float16") == full.layer_decode_s(
        a100, 16, 8, 4000, "float16"
    )
    assert windowed.layer_decode_s(a100, 16, 8, 30000, "float16") < full.layer_decode_s(
        a100, 16, 8, 30000, "float16"
    )
    assert full.provenance(a100, "float16", (16,)).startswith("estimated")
