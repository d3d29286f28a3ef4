"""The importance that a plan's stages round by: measured once, kept, and handed to everyone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.importance import measure_layers
from actors.messages import Request, Sampling
from actors.processes.stage_actor import StageActor
from actors.recovery.policy import Recovery, RecoveryEvent
from actors.stage.layer_stream import compute_on
from actors.stage_figures import StageStats
from actors.stage_group import GroupOptions, StageGroup
from actors.transport.rendezvous import CONTROL
from llmpq import Cluster, Plan, Workload
from llmpq.cli.measure.quality import indicator_main
from llmpq.run.checkpoint import importance_store
from planner.model.finding import model_shape
from planner.plan.parts import PlannedImportance
from quant.common.errors import CheckpointError, LlmpqError, PlanMismatchError, SpecError
from quant.loading.cache_settings import CacheSettings
from quant.loading.emulated_kernels import LayerScheme
from quant.rounding.importance import (
    Importance,
    LayerImportance,
    digest_of_inputs,
    keep_file,
    load_importance,
)
from quant.rounding.importance_header import FOLDER, SUFFIX, by_fingerprint
from quant.rounding.importance_store import ImportanceStore
from tests.actors.configs import CONFIGS, LAYERS, VOCABULARY
from tests.actors.models import random_prompts, save_tiny
from tests.llmpq.conftest import ONE_DEVICE


class Recording(StageActor):
    """Tells by which importance it was loaded; one that has a file is not asked to measure."""

    def load(self, importance: Sequence[LayerImportance] | None = None) -> StageStats:
        self._digests = [digest_of_inputs(layer.inputs) for layer in importance or ()]
        return super().load(importance)

    @ray.method(concurrency_group=CONTROL)  # the other one is busy serving
    def digests(self) -> list[str]:
        return self._digests


class NeverMeasuring(Recording):
    def measure_importance(self, hidden: Any) -> Any:
        raise AssertionError("it was kept")


class RecordingGroup(StageGroup):
    actor_class = Recording

    def digests(self, stage: int) -> list[str]:
        found: list[str] = ray.get(self.stages[stage].actor.digests.remote())
        return found


class KnowingGroup(RecordingGroup):
    actor_class = NeverMeasuring


@pytest.fixture(scope="module")
def three_bit(tiny: tuple[Path, Any], cluster_file: Path) -> Plan:
    """Three stages of the tiny model."""
    workload = Workload(global_batch=2, prompt_length=8, new_tokens=4)
    cluster = Cluster.from_yaml(cluster_file)
    options: dict[str, Any] = {"dtype": "float32", "keep_all_devices": True, "theta": 0}
    plan = cluster.plan(tiny[0], workload, bits=[3], **options)
    assert len(plan.stages) == 3
    return plan


def expected(tiny: tuple[Path, Any]) -> list[LayerImportance]:
    compute = compute_on(torch.device("cpu"), torch.float32)
    schemes = [LayerScheme()] * LAYERS
    return measure_layers(tiny[0], compute, range(LAYERS), schemes)[1]


def test_stages_measure_once_and_whoever_comes_later_gets_the_same(
    local_ray: None,
    tiny: tuple[Path, Any],
    three_bit: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage that takes another's place, a group of another partition, and one on the driver's
    machine.
    """
    folder, events = tmp_path / FOLDER, list[RecoveryEvent]()
    store = ImportanceStore(folder, "tiny")
    options = GroupOptions(
        transport="gloo", recovery=Recovery(hang_s=20), importance=store, on_event=events.append
    )
    with RecordingGroup(three_bit.spec, str(tiny[0]), options) as group:
        assert store.known is not None
        own = [digest_of_inputs(layer.inputs) for layer in store.known.layers]
        first = [group.digests(index) for index in range(3)]
        assert [digest for stage in first for digest in stage] == own
        pid = ray._private.state.actors()[group.stages[1].actor_ids[0]]["Pid"]
        os.kill(pid, signal.SIGKILL)
        prompts = random_prompts([5] * 4)
        requests = [Request(str(i), prompt, 4, Sampling()) for i, prompt in enumerate(prompts)]
        assert len([each for part in group.generate(requests) for each in part]) == 4
        assert [event.kind for event in events] == ["died"]
        assert group.digests(1) == first[1]
    for one, other in zip(store.known.layers, expected(tiny), strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        for name, statistics in one.inputs.items():
            torch.testing.assert_close(statistics.mean_square, other.inputs[name].mean_square)
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(ONE_DEVICE)
    workload = Workload(global_batch=2, prompt_length=8, new_tokens=4)
    alone = Cluster.from_yaml(cluster_file).plan(tiny[0], workload, dtype="float32", bits=[4])
    options = replace(options, importance=ImportanceStore(folder, "tiny"))
    with KnowingGroup(alone.spec, str(tiny[0]), options) as group:
        assert group.digests(0) == own
    monkeypatch.setattr("actors.stage_group.has_stage_environment", lambda: True)
    unread = ImportanceStore(folder, "tiny")
    options = replace(options, importance=unread)
    with KnowingGroup(alone.spec, str(tiny[0]), options) as group:
        assert group.digests(0) == own
        assert unread.known is None, "a stage has read the file"


def planned(plan: Plan, found: Importance, path: Path) -> Plan:
    named = PlannedImportance(found.fingerprint, str(path))
    return Plan(replace(plan.spec, importance=named))


def keep(tiny: tuple[Path, Any], path: Path, scale: float = 1.0) -> Importance:
    shape = model_shape(str(tiny[0])).fingerprint()
    layers = tuple(LayerImportance(own.inputs, own.keys * scale) for own in expected(tiny))
    found = Importance(layers, "random ids", shape)
    keep_file(path.parent, path, found)
    return found


def known(plan: Plan, file: Path | None, cache: Path, tiny: tuple[Path, Any]) -> str:
    shape = model_shape(str(tiny[0]))
    settings = CacheSettings(str(cache))
    store = importance_store(plan.spec, file, settings, (tiny[0], str(tiny[0]), None), shape)
    assert store.known is not None
    return store.known.fingerprint


def test_a_file_is_looked_for_where_it_was_then_in_the_cache(
    tiny: tuple[Path, Any], three_bit: Plan, tmp_path: Path
) -> None:
    path, cache = tmp_path / "one", tmp_path / "cache"
    found = keep(tiny, path)
    plan = planned(three_bit, found, path)
    assert known(three_bit, path, cache, tiny) == found.fingerprint
    assert known(plan, None, cache, tiny) == found.fingerprint
    keep_file(cache / FOLDER, by_fingerprint(cache / FOLDER, found.fingerprint), found)
    path.rename(tmp_path / "elsewhere")
    assert known(plan, None, cache, tiny) == found.fingerprint
    assert known(plan, tmp_path / "elsewhere", tmp_path, tiny) == found.fingerprint


def test_what_a_run_cannot_round_by_is_refused_before_ray_starts(
    tiny: tuple[Path, Any], three_bit: Plan, plan: Plan, tmp_path: Path
) -> None:
    path, other = tmp_path / "one", tmp_path / "other"
    found = keep(tiny, path)
    keep(tiny, other, scale=2)
    save_tiny(tmp_path / "qwen", CONFIGS["qwen3"])
    wrong = tmp_path / "wrong"
    keep((tmp_path / "qwen", None), wrong)
    cases: list[tuple[Plan, Path | None, type[LlmpqError], str]] = [
        (planned(three_bit, found, path), other, PlanMismatchError, "plan was made with"),
        (planned(three_bit, found, other), None, PlanMismatchError, "has other numbers"),
        (planned(three_bit, found, tmp_path / "gone"), None, PlanMismatchError, "is not there"),
        (three_bit, tmp_path / "gone", CheckpointError, "cannot be read"),
        (three_bit, wrong, CheckpointError, "belongs to a model of shape"),
        (plan, path, SpecError, "importance has no effect"),
    ]
    for made, file, kind, told in cases:
        with pytest.raises(kind, match=told):
            made.run([[3]], importance=file, cache_dir=tmp_path / "cache")


def test_a_plan_names_what_the_indicator_saw_of_a_jobs_prompts(
    tiny: tuple[Path, Any], tmp_path: Path
) -> None:
    rows, omega = tmp_path / "rows.jsonl", tmp_path / "omega.json"
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, VOCABULARY, (20, 9), generator=generator).tolist()
    lines = [json.dumps({"custom_id": str(i), "prompt": ids}) for i, ids in enumerate(prompts)]
    rows.write_text("\n".join(lines))
    arguments = ["--model", tiny[0], "--input", rows, "-o", omega, "--sequence_length", 12]
    assert indicator_main([*map(str, arguments)]) == 0
    found = load_importance(tmp_path / f"omega{SUFFIX}")
    assert found.seen.startswith("180 tokens")
    told = json.loads(omega.read_text())["provenance"]
    assert told["importance"] == found.fingerprint
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text(ONE_DEVICE)
    cluster, workload = Cluster.from_yaml(cluster_file), Workload(2, 8, 4)
    plan = cluster.plan(tiny[0], workload, dtype="float32", bits=[3], omega_file=omega)
    assert plan.spec.importance is not None
    assert plan.spec.importance.fingerprint == found.fingerprint
    assert known(plan, None, tmp_path, tiny) == found.fingerprint
    full = cluster.plan(tiny[0], workload, dtype="float32", bits=[16], omega_file=omega)
    assert full.spec.importance is None
    (tmp_path / f"omega{SUFFIX}").unlink()
    with pytest.raises(SpecError, match="which is not there"):
        cluster.plan(tiny[0], workload, dtype="float32", bits=[3], omega_file=omega)
    with pytest.raises(SpecError, match="importance has no effect with rounding nearest"):
        cluster.plan(tiny[0], workload, bits=[3], rounding="nearest", importance=omega)
    with pytest.raises(SpecError, match="holds no importance"):
        cluster.plan(tiny[0], workload, bits=[3], importance=omega)
