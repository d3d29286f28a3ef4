"""Running plans on Ray: tokens as transformers gives them, errors as rows, actors given back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.processes.placement import place
from actors.recovery.policy import Recovery
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Sampling, Workload
from llmpq.detect import detect_cluster
from llmpq.run.rows_in_flight import BAD_ROWS_AT_ONCE
from quant.common.errors import (
    CheckpointError,
    DeviceError,
    PlanMismatchError,
    SpecError,
    StageLostError,
)
from tests.actors.configs import CONFIGS
from tests.actors.models import random_prompts, reference, references, save_tiny
from tests.llmpq.conftest import NEW_TOKENS, PROMPT_LENGTH, tiny_plan
from tests.llmpq.processes import NewActors

LENGTHS = (5, 11, 1, 8, 16, 2, 11, 3, 7, 4)
ONE_DEVICE = """
name: one
nodes: [{name: a, accelerators: {V100-SXM2-16GB: 1}, usable_memory_gib: 0.002}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""

pytestmark = pytest.mark.usefixtures("local_ray")


def rows_for(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [list(prompt) for prompt in prompts]


def test_three_actors_give_the_tokens_of_generate(tiny: tuple[Path, Any], plan: Plan) -> None:
    prompts = random_prompts(LENGTHS)
    assert len(plan.stages) == 3
    results = {r.custom_id: r for r in plan.run(rows_for(prompts))}
    for i, expected in enumerate(references(tiny[1], prompts, NEW_TOKENS)):
        assert list(results[f"row-{i}"].token_ids) == expected
        assert results[f"row-{i}"].error is None


@pytest.mark.rare  # rows of `test_recovery.py` are sampled in two pipelines too
def test_random_sampling_does_not_depend_on_the_plan(
    tiny: tuple[Path, Any], cluster_file: Path, plan: Plan
) -> None:
    prompts = rows_for(random_prompts(LENGTHS))
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    other = tiny_plan(tiny[0], cluster_file, prefill_micro_batch=1, decode_micro_batch=2)
    assert plan.micro_batches != other.micro_batches
    first, second = (
        {r.custom_id: list(r.token_ids) for r in p.run(prompts, sampling)} for p in (plan, other)
    )
    assert first == second
    greedy = references(tiny[1], list(map(tuple, prompts)), NEW_TOKENS)
    assert first != {f"row-{i}": tokens for i, tokens in enumerate(greedy)}


def test_answers_of_a_row_are_those_of_rows_drawn_alike(one_stage: Plan) -> None:
    """By its seed and their numbers, as over HTTP, or else by its id too."""
    drawn = {"prompt": [5, 6, 7], "temperature": 1.0, "seed": 7}
    free = {name: value for name, value in drawn.items() if name != "seed"}
    greedy = {"prompt": [5, 6, 7], "n": 2}
    rows: list[Any] = [
        {**drawn, "custom_id": "seeded", "n": 3},
        {**free, "custom_id": "free", "num_return_sequences": 2},
        {**greedy, "custom_id": "greedy"},
        *({**drawn, "custom_id": str(number)} for number in range(3)),
        *({**free, "custom_id": f"free-{number}"} for number in range(2)),
        {"prompt": [5, 6, 7], "custom_id": "greedy-1"},
    ]
    found = {result.custom_id: result for result in one_stage.run(rows)}
    assert len(found) == len(rows)

    def made(name: str) -> list[tuple[int, ...]]:
        return [tuple(each["token_ids"]) for each in found[name].columns["generations"]]

    assert made("seeded") == [found[str(number)].token_ids for number in range(3)]
    assert len(set(made("seeded"))) == 3
    assert made("free") == [found[f"free-{number}"].token_ids for number in range(2)]
    assert made("greedy") == [found["greedy-1"].token_ids] * 2
    assert found["seeded"].token_ids == made("seeded")[0]


def test_bad_rows_become_error_results_and_the_others_run(one_stage: Plan) -> None:
    rows: list[Any] = [
        [5, 6],
        list(range(3, 4 + PROMPT_LENGTH)),
        [],
        [10_000],
        {"custom_id": "much", "prompt": [4], "max_new_tokens": NEW_TOKENS + 1},
        "text, but the model has no tokenizer",
        {"custom_id": "none"},
    ]
    results = {r.custom_id: r for r in one_stage.run(rows)}
    assert len(results) == len(rows)
    errors = {row: r.error for row, r in results.items() if r.error}
    assert set(errors) == {"row-1", "row-2", "row-3", "much", "row-5", "none"}
    assert f"{PROMPT_LENGTH + 1} tokens" in str(errors["row-1"])
    assert "no tokens" in str(errors["row-2"])
    assert "vocabulary" in str(errors["row-3"])
    assert "room for 8" in str(errors["much"])
    assert "no tokenizer" in str(errors["row-5"])
    assert len(results["row-0"].token_ids) <= NEW_TOKENS


def test_a_long_run_of_bad_rows_is_not_gathered(one_stage: Plan) -> None:
    """Rows that were read and are not given out: of bad ones no more than are good for one call."""
    read = most = given = 0

    def rows() -> Iterator[Any]:
        nonlocal read
        for i in range(4 * BAD_ROWS_AT_ONCE):
            read += 1
            yield [5, 6] if i in (0, 2 * BAD_ROWS_AT_ONCE) else []

    good = 0
    for result in one_stage.run(rows()):
        most = max(most, read - given)
        given += 1
        good += result.error is None
    assert (given, good) == (4 * BAD_ROWS_AT_ONCE, 2)
    assert most <= BAD_ROWS_AT_ONCE + 2


def test_actors_are_given_back_when_the_iteration_is_left(plan: Plan) -> None:
    actors = NewActors()
    results = plan.run(rows_for(random_prompts(LENGTHS)))
    next(results)
    assert actors.become(3)
    results.close()
    with pytest.raises(StopIteration):
        next(results)
    assert actors.become(0)


@pytest.mark.rare  # `test_stage_group.py` kills one too, and looks at the time
def test_death_of_a_stage_is_an_error_not_a_hang(tiny: tuple[Path, Any], plan: Plan) -> None:
    from actors.messages import Request

    requests = [Request(str(i), (3, 4), NEW_TOKENS, Sampling()) for i in range(4)]
    off = Recovery(retries=0)
    with StageGroup(plan.spec, str(tiny[0]), GroupOptions(recovery=off)) as group:
        group.stages[1].kill()
        with pytest.raises(StageLostError, match="died"):
            list(group.generate(requests))


def test_errors_while_loading_reach_the_caller_bare(plan: Plan, tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    actors = NewActors()
    group = StageGroup(plan.spec, str(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        group.__enter__()
    assert actors.become(0)


def test_a_relative_folder_is_found_by_actors_that_start_elsewhere(
    tiny: tuple[Path, Any], one_stage: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny[0].parent)
    (result,) = one_stage.run([[5, 6, 7]], model=tiny[0].name)
    assert list(result.token_ids) == reference(tiny[1], (5, 6, 7), NEW_TOKENS)


def test_actors_keep_their_layers_where_they_are_told_to(
    tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder is one of where the user is, not of where actors start."""
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(ONE_DEVICE)
    workload = Workload(global_batch=2, prompt_length=8, new_tokens=4)
    plan = Cluster.from_yaml(cluster_file).plan(tiny[0], workload, dtype="float32", bits=[3])
    monkeypatch.chdir(tmp_path)
    (result,) = plan.run([[5, 6, 7]], cache_dir="kept", cache_limit_gib=1)
    assert result.error is None
    layers = sum(len(stage.layers) for stage in plan.stages)
    assert len(list((tmp_path / "kept").glob("*-3bit-*.safetensors"))) == layers


def test_logits_that_are_not_finite_end_their_row_with_an_error(
    one_stage: Plan, tmp_path: Path
) -> None:
    """The final norm's weight makes every logit overflow float32."""
    model = save_tiny(tmp_path, CONFIGS["llama"])
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    (result,) = one_stage.run([[5, 6, 7]], model=str(tmp_path))
    assert result.text is None
    assert "not finite" in str(result.error)


def test_plan_for_another_model_is_refused_before_anything_starts(
    plan: Plan, tmp_path: Path
) -> None:
    save_tiny(tmp_path, CONFIGS["qwen3"])
    with pytest.raises(PlanMismatchError, match="the plan is for"):
        plan.run([[3]], model=str(tmp_path))


def test_more_tokens_than_planned_are_refused(plan: Plan) -> None:
    with pytest.raises(SpecError, match="room for 8"):
        plan.run([[3]], Sampling(max_new_tokens=9))


def test_missing_gpu_is_named(plan: Plan) -> None:
    real = replace(plan.stages[0], emulated=False)
    with pytest.raises(DeviceError, match=rf"stage 0 needs a {real.accelerator}"):
        place([real], ray.cluster_resources())


def test_detecting_a_ray_cluster_without_gpus_says_so() -> None:
    with pytest.raises(DeviceError, match="no GPU"):
        detect_cluster()
