"""Tokens of stages whose experts have bits of their own, or lie in the host's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.stage.spec import stage_spec
from actors.stage.stage import Stage
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.plan.spec import PlanSpec
from planner.workload import Workload
from quant.common.units import GIB
from quant.hosted_experts import HostedExperts
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, reference, save_tiny, specs_of
from tests.planner.plan_alone import find_plan

LENGTHS, NEW_TOKENS = (5, 11, 1, 8, 17), 9
EXPERT_BITS = (4, 16, 3, 8, 4)


@pytest.mark.parametrize("hosted", [(), (0, 3, 4)])
def test_tokens_equal_generate_with_the_experts_that_the_bits_stand_for(
    hosted: tuple[int, ...], tmp_path: Path
) -> None:
    """Prompts stream, decode steps are computed on the host."""
    model = save_tiny(tmp_path, EVERY_CONFIG["qwen3_moe"])
    for layer, bits in zip(model.model.layers, EXPERT_BITS, strict=True):
        experts = getattr(layer.mlp, "experts", None)
        for part in ("gate_up_proj", "down_proj") if experts is not None and bits < 16 else ():
            weights = getattr(experts, part).data
            for index, weight in enumerate(weights):
                weights[index] = dequantize(quantize(weight, bits))
    prompts = random_prompts(LENGTHS)
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    specs = [
        replace(
            spec,
            expert_bitwidths=EXPERT_BITS[spec.layers.start : spec.layers.stop],
            hosted_experts=tuple(layer for layer in hosted if layer in spec.layers),
            streams_from=8,
        )
        for spec in specs_of((0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS)
    ]
    weight_only = Processor(instruction_sets=frozenset())
    stages = [Stage(spec, tmp_path, torch.device("cpu"), weight_only) for spec in specs]
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
    found = [each for stage in stages for each in stage._model.modules()]
    assert sum(isinstance(each, HostedExperts) for each in found) == len(hosted)


def test_a_plan_for_a_small_device_hosts_experts_and_its_tokens_are_those_of_generate(
    tmp_path: Path,
) -> None:
    model = save_tiny(tmp_path, EVERY_CONFIG["qwen3_moe"])
    prompts = random_prompts(LENGTHS)
    workload = Workload(len(prompts), max(LENGTHS), NEW_TOKENS)
    options = PlanOptions(bits=(16,), dtype="float32", memory_margin=0.0)

    def planned(memory_gib: float) -> PlanSpec:
        node = {"accelerators": {"T4": 1}, "usable_memory_gib": memory_gib, "host_memory_gib": 1}
        values = {"name": "small", "nodes": [node], "emulate": {"time_scale": 0.0}}
        cluster, name = ClusterSpec.from_dict(values), str(tmp_path)
        return find_plan(cluster, model_shape(name), name, workload, options).plan

    roomy = planned(1.0).stages[0]
    plan = planned((roomy.memory_bytes - roomy.memory.weights // 4) / GIB)
    (stage,) = plan.stages
    assert stage.hosted_experts
    assert not roomy.hosted_experts
    check_plan(plan, model_shape(str(tmp_path)))
    held = Stage(stage_spec(plan, stage), tmp_path, torch.device("cpu"), Processor())
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert generate([held], prompts, NEW_TOKENS, prefill=2, decode=3) == expected
    experts = [each for each in held._model.modules() if isinstance(each, HostedExperts)]
    assert sum(each.nbytes for each in experts) == stage.host_bytes
    assert held.stats().weight_bytes <= stage.memory_limit_bytes
