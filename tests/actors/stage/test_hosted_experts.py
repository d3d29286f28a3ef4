"""Tokens of stages whose experts have bits of their own, or lie in the host's memory."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.stage.spec import stage_spec, stand_in_spec
from actors.stage.stage import Stage
from planner.cluster.spec import ClusterSpec
from planner.model.finding import model_shape
from planner.options import PlanOptions
from planner.plan.check import check_plan
from planner.workload import Workload
from quant.hosted_experts import HostedExperts
from quant.rounding.canonical import dequantize, quantize
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, specs_of
from tests.paths import EXAMPLES, SPECS
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
    expected = references(model, prompts, NEW_TOKENS)
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


def test_what_plays_a_stage_hosts_its_experts_too(tmp_path: Path) -> None:
    """Each stage of a model of 50 layers is played by one of 5, of which the second has none."""
    model = save_tiny(tmp_path, EVERY_CONFIG["qwen3_moe"])
    shape = model_shape(str(tmp_path))
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    specs = []
    for spec in specs_of(tuple(range(LAYERS + 1)), len(prompts), max(LENGTHS) + NEW_TOKENS):
        layers = range(10 * spec.index, 10 * (spec.index + 1))
        hosted = (layers[3], layers[7]) if spec.index != 2 else ()
        planned = replace(spec, layers=layers, hosted_experts=hosted, streams_from=8)
        specs.append(stand_in_spec(planned, shape))
    stages = [Stage(spec, tmp_path, torch.device("cpu"), Processor()) for spec in specs]
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
    found = [[*map(type, stage._model.modules())].count(HostedExperts) for stage in stages]
    assert found == [1, 0, 0, 1, 1]


def test_a_plan_for_small_devices_hosts_experts_and_its_tokens_are_those_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `examples/tiny_experts.py` shows, without Ray and without the sizes of micro-batches."""
    monkeypatch.syspath_prepend(EXAMPLES)
    model = importlib.import_module("tiny_experts").write(tmp_path)
    shape, workload = model_shape(str(tmp_path)), Workload(12, 16, 8)
    options = PlanOptions(
        bits=(16,), dtype="float32", prefill_micro_batch=1, decode_micro_batch=4, head="last"
    )
    cluster = ClusterSpec.from_yaml(SPECS / "emulated_hosts.yaml")
    plan = find_plan(cluster, shape, str(tmp_path), workload, options).plan
    assert len(plan.stages) == 3
    assert any(stage.hosted_experts for stage in plan.stages)
    check_plan(plan, shape)
    cpu = torch.device("cpu")
    stages = [Stage(stage_spec(plan, each), tmp_path, cpu, Processor()) for each in plan.stages]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    prompts = [tuple(row["prompt"]) for row in rows[:5]]
    expected = references(model, prompts, workload.new_tokens)
    assert generate(stages, prompts, workload.new_tokens, prefill=1, decode=4) == expected
    for stage, planned in zip(stages, plan.stages, strict=True):
        experts = [each for each in stage._model.modules() if isinstance(each, HostedExperts)]
        assert sum(each.nbytes for each in experts) == planned.host_bytes
        assert stage.stats().weight_bytes <= planned.memory_limit_bytes
