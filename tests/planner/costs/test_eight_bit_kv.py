"""Keys and values in 8 bits as a choice of the plan: memory, times, `auto`, and the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import EightBitCacheLatency
from planner.costs.latency_model import LayerSeconds
from planner.costs.memory import StageEnds, StageWork, temporary_bytes
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.scheduling import Phase
from planner.search.find import trace_front
from planner.workload import MicroBatches, Workload
from quant.common.errors import InfeasibleError, SpecError
from tests.planner.plan_alone import find_plan

T4 = ClusterSpec.from_counts(["T4"], [1])
SHAPE = model_shape("opt-6.7b")
FEW, MANY = Workload(8, 512, 100), Workload(40, 512, 100)


def plan_for(workload: Workload, kv_bits: int | str) -> PlanSpec:
    return find_plan(T4, SHAPE, "opt-6.7b", workload, PlanOptions(kv_bits=kv_bits)).plan


def test_what_does_not_fit_at_16_bits_fits_at_8() -> None:
    with pytest.raises(InfeasibleError, match=r"keys and values in 8 bit \(--kv_bits 8\)"):
        plan_for(MANY, 16)
    plan = plan_for(MANY, 8)
    assert plan.kv_bits == 8
    (stage,) = plan.stages
    head_bytes = 128 + 2  # codes, and a scale of two bytes
    assert stage.memory.kv_cache == SHAPE.layers * 2 * 40 * 612 * SHAPE.kv_heads * head_bytes
    assert stage.memory_bytes <= stage.memory_limit_bytes
    with pytest.raises(InfeasibleError) as refusal:
        plan_for(Workload(200, 512, 100), 8)
    assert "kv_bits" not in str(refusal.value)


@pytest.mark.parametrize(("workload", "bits"), [(FEW, 16), (MANY, 8)])
def test_auto_is_16_bits_where_they_fit(workload: Workload, bits: int) -> None:
    found = plan_for(workload, "auto")
    assert found.kv_bits == bits
    assert found.stages == plan_for(workload, bits).stages


def test_a_front_has_one_width_of_keys_and_values() -> None:
    points = trace_front(T4, SHAPE, MANY, PlanOptions(kv_bits="auto"), 2)
    assert points == trace_front(T4, SHAPE, MANY, PlanOptions(kv_bits=8), 2)


@pytest.mark.parametrize("kv_bits", [4, 0, "8", "half"])
def test_other_widths_are_refused(kv_bits: int | str) -> None:
    with pytest.raises(SpecError, match="kv_bits is"):
        PlanOptions(kv_bits=kv_bits)


def test_the_file_keeps_it_and_files_without_it_are_of_16_bits(tmp_path: Path) -> None:
    plan = plan_for(MANY, 8)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert PlanSpec.load(path) == plan
    content = json.loads(path.read_text())
    del content["kv_bits"], content["digest"]
    path.write_text(json.dumps(content))
    assert PlanSpec.load(path).kv_bits == 16


def device(name: str) -> Device:
    node = {"accelerators": {name: 1}, **({"memory_gib": 8} if name == "CPU" else {})}
    return ClusterSpec.from_dict({"name": "one", "nodes": [node]}).devices[0]


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3-8b"])
def test_codes_are_read_as_they_are(name: str) -> None:
    """Long contexts, so that keys and values are most of what is read. A CPU's loop takes nine
    tenths of the time for codes, and on a GPU the arithmetic of grouped heads may be longer.
    """
    shape = model_shape(name)
    full, coded = RooflineLatency(shape), RooflineLatency(shape, 8)
    cpu, gpu = device("CPU"), device("A100")
    for batch, context in ((8, 4000), (2, 16000)):
        work = (batch, context, "bfloat16")
        saved = full.layer_decode_s(cpu, 16, *work) - coded.layer_decode_s(cpu, 16, *work)
        in_16_bit_s = 2 * batch * (context + 1) * shape.kv_width * 2 / 8e9
        assert saved == pytest.approx(0.1 * in_16_bit_s, rel=0.05)
        parts = [m.layer_seconds(gpu, 16, "decode", *work) for m in (full, coded)]
        ratio = (shape.head_dim + 2) / (2 * shape.head_dim)
        assert parts[1].attention_s == pytest.approx(ratio * parts[0].attention_s, rel=0.12)
    for each in (cpu, gpu):
        prefill = [m.layer_prefill_s(each, 16, 4, 512, "bfloat16") for m in (full, coded)]
        assert prefill[0] < prefill[1] < 1.5 * prefill[0]


def test_measured_times_change_in_the_proportion_of_the_estimates() -> None:
    class Measured(RooflineLatency):
        """Of half the estimated speed."""

        def layer_seconds(
            self, device: Device, bits: int, phase: Phase, micro_batch: int, length: int, dtype: str
        ) -> LayerSeconds:
            parts = super().layer_seconds(device, bits, phase, micro_batch, length, dtype)
            factor = 2 if phase == "decode" else 1
            return LayerSeconds(factor * parts.attention_s, factor * parts.rest_s)

    model = EightBitCacheLatency(Measured(SHAPE), 8)
    coded, work = RooflineLatency(SHAPE, 8), (device("CPU"), 4, 8, 1000, "bfloat16")
    assert model.layer_decode_s(*work) == pytest.approx(2 * coded.layer_decode_s(*work))
    assert model.layer_prefill_s(*work) == pytest.approx(coded.layer_prefill_s(*work))
    assert model.final_s(work[0], 8, "bfloat16") == coded.final_s(work[0], 8, "bfloat16")
    assert "8-bit keys and values estimated" in model.provenance(work[0], "float16", (4,))


def test_restored_keys_are_in_the_peak() -> None:
    """They are made of a copy of codes and scales, one tensor after the other."""
    shape, workload = model_shape("llama-3-8b"), Workload(8, 512, 8000)
    full, coded = (
        temporary_bytes(
            StageWork(shape, workload, MicroBatches(1, 8), "float16", kv_bits=bits), StageEnds()
        )
        for bits in (16, 8)
    )
    codes = torch.empty(8 * 8512, shape.kv_heads, shape.head_dim, dtype=torch.int8, device="meta")
    scales = codes[..., 0].to(torch.bfloat16)
    assert coded - full == codes.nbytes + scales.nbytes + scales.half().nbytes
