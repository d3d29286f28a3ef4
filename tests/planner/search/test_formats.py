"""Plans for checkpoints that others read: the bits that a format lacks are left out, and named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmpq.quality.vllm import VllmPlan
from llmpq.report.plan_facts import facts_of
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.search.find import find_plan
from planner.search.request import PlanningRequest
from planner.workload import Workload
from quant.checkpoint.formats.readers import FORMATS, VLLM
from quant.checkpoint.formats.writing import METHODS, check_bits
from quant.checkpoint.stored_config import GGUF, StoredConfig, StoredLinear
from quant.common.errors import DoesNotFitError, SpecError

WORKLOAD = Workload(1, 64, 16)
PLACES = {"T4": "opt-13b", "V100-32GB": "opt-30b", "CPU": "smollm2-1.7b"}
VLLM_LACKS = {"T4": "3, 5 and 6", "V100-32GB": "5 and 6", "CPU": "3, 5, 6 and 8"}
LACKS = {"gptq": "5 and 6", "compressed-tensors": "5 and 6", "awq": "3, 5, 6 and 8"}


def cluster_of(kind: str) -> ClusterSpec:
    if kind != "CPU":
        return ClusterSpec.from_counts([kind], [1])
    node = {"accelerators": {kind: 1}, "memory_gib": 1.3, "threads": 1}
    return ClusterSpec.from_dict({"name": "small", "nodes": [node]})


def planned(kind: str, **options: Any) -> PlanSpec:
    """A plan of the best quality that fits, for which 16 bit is too much and 3 bit too little."""
    model = PLACES[kind]
    chosen = PlanOptions(**{"memory_margin": 0.3, "theta": 1e6} | options)
    return find_plan(cluster_of(kind), model_shape(model), model, WORKLOAD, chosen).plan


def bits_of(plan: PlanSpec) -> set[int]:
    return {bits for stage in plan.stages for bits in stage.bitwidths}


@pytest.mark.parametrize("kind", PLACES)
def test_bits_that_a_format_lacks_are_left_out_and_named(kind: str) -> None:
    free = planned(kind)
    assert bits_of(free) & {5, 6}
    assert not any("format" in remark for remark in facts_of(free).remarks)
    for name in FORMATS:
        plan = planned(kind, format=name)
        lacks = (LACKS | {VLLM: VLLM_LACKS[kind]})[name]
        assert f"without {lacks} bit, which format {name} does not hold here" in (
            facts_of(plan).remarks
        )
        if name == VLLM:
            assert VllmPlan(plan, "plan.json").method is not None
            assert plan.head_bits == 16
            with pytest.raises(SpecError, match="plan with --format vllm"):
                VllmPlan(free, "plan.json")
        else:
            check_bits(name, bits_of(plan))
            with pytest.raises(SpecError, match=f"plan with --format {name}"):
                check_bits(name, bits_of(free))


def test_named_bits_that_a_format_lacks_are_refused() -> None:
    with pytest.raises(SpecError, match="bits has 5 and 6, and format awq holds 4 and 16 here"):
        planned("T4", format="awq", bits=(4, 5, 6))
    with pytest.raises(SpecError, match="bits has 3, and format vllm holds 4 and 8 and 16 here"):
        planned("T4", format=VLLM, bits=(3, 4))
    plan = planned("V100-32GB", format=VLLM, bits=(3, 16))
    assert bits_of(plan) <= {3, 16}
    assert not any("format" in remark for remark in facts_of(plan).remarks)
    with pytest.raises(SpecError, match="format is 'gguf'; it must be one of"):
        PlanOptions(format="gguf")


def test_remedies_keep_to_the_format() -> None:
    """3 bit would fit, of which AWQ has none, as vLLM has none of the head in fewer than 16."""
    for name in ("awq", VLLM):
        with pytest.raises(DoesNotFitError) as refused:
            planned("T4", format=name, memory_margin=0.55)
        assert "3 bit" not in str(refused.value)
        assert name != VLLM or "head_bits" not in str(refused.value)


def test_quantized_weights_are_no_source_of_a_format() -> None:
    shape = model_shape("opt-125m")
    cluster = cluster_of("T4")
    stored = StoredLinear(4, 128)
    linears = (stored,) * len(shape.layer_linears)
    coded = replace(shape, stored=StoredConfig(4, 128, linears=linears))
    for name in METHODS:
        with pytest.raises(SpecError, match=f"format {name} is calibrated on .*original 16-bit"):
            find_plan(cluster, coded, "opt-125m", WORKLOAD, PlanOptions(format=name))
    kept = PlanningRequest.of(cluster, coded, WORKLOAD, PlanOptions(format=VLLM))
    assert kept.options.bits == (4, 8, 16)
    decoded = replace(coded, stored=replace(coded.stored, method=f"{GGUF} Q4_0"))
    plan = find_plan(cluster, decoded, "opt-125m", WORKLOAD, PlanOptions(format="awq")).plan
    assert plan.weights is None
