"""A stage of two ranks beside one of a single device: the tokens of `generate`, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors.handover.group import DividedGroup
from actors.importance import measure_layers
from actors.messages import Finished, Request, Sampling
from actors.recovery.policy import Recovery, RecoveryEvent
from actors.stage.layer_stream import compute_on
from actors.stage_group import GroupOptions, StageGroup
from planner.plan.spec import PlanSpec
from planner.scheduling import PolicyOptions
from quant.devices import local_processor
from quant.loading.emulated_kernels import LayerScheme
from tests.actors.configs import LAYERS
from tests.actors.models import generate, random_prompts, references, stages_of
from tests.llmpq.conftest import (
    NEW_TOKENS,
    PROMPT_LENGTH,
    no_metrics,
    ray_cluster,
    tiny_plan,
)
from tests.llmpq.divided_plans import divided
from tests.llmpq.faulty import LARGEST, FaultyRank

pytestmark = pytest.mark.usefixtures("three_cpus")

COUNT = 80
PROMPTS = random_prompts([1 + i % PROMPT_LENGTH for i in range(COUNT)])
TWO = "{name: two, nodes: [{name: a, accelerators: {CPU: 2}, threads: 1, memory_gib: 1}]}"
GROUP, SINGLE = 0, 1


@pytest.fixture(scope="module")
def three_cpus(worker_environment: dict[str, str]) -> Iterator[None]:
    with no_metrics(), ray_cluster(num_cpus=3) as cluster:
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=worker_environment)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "cluster.yaml"
    path.write_text(TWO)
    return path


def grouped(folder: Path, cluster: Path, bits: int = 16) -> PlanSpec:
    """Two stages on CPUs, the first of which has two of them."""
    spec = tiny_plan(folder, cluster, bits=[bits]).spec
    first, second = spec.stages
    divided = replace(first, devices=(first.device, "a/CPU:2"))
    return replace(spec, stages=(divided, second))


class Run:
    """Takes what a group generates, each request once, and its events."""

    def __init__(self) -> None:
        self.ended: dict[str, Finished] = {}
        self.events: list[RecoveryEvent] = []

    def of(self, group: StageGroup | DividedGroup, prefix: str = "") -> Iterator[int]:
        """Yield how many have ended, after some more have."""
        requests = [
            Request(f"{prefix}{i}", prompt, 1 + i % NEW_TOKENS, Sampling())
            for i, prompt in enumerate(PROMPTS)
        ]
        for batch in group.generate(requests):
            for each in batch:
                assert each.custom_id not in self.ended
                self.ended[each.custom_id] = each
            yield len(self.ended)

    def check(self, model: Any, prefix: str = "") -> None:
        assert len(self.ended) == COUNT
        some = range(0, COUNT, 5)
        limits = [1 + i % NEW_TOKENS for i in some]
        found = [list(self.ended[f"{prefix}{i}"].token_ids) for i in some]
        assert found == references(model, [PROMPTS[i] for i in some], limits)

    @property
    def faults(self) -> list[tuple[str, int | None]]:
        return [(event.kind, event.stage) for event in self.events]


def signal_rank(
    group: StageGroup | DividedGroup, stage: int, rank: int, what: int = signal.SIGKILL
) -> None:
    """Send a signal to the process of a rank, which gets no chance to say good-bye."""
    actors = ray._private.state.actors()
    os.kill(actors[group.stages[stage].actor_ids[rank]]["Pid"], what)


def test_tokens_are_those_of_generate_also_when_ranks_die(
    tiny: tuple[Path, Any], cluster: Path
) -> None:
    """First the one that follows, then the neighbour of the group, then its rank 0."""
    run = Run()
    options = GroupOptions(transport="gloo", on_event=run.events.append)
    deaths = {COUNT // 5: (GROUP, 1), 2 * COUNT // 5: (SINGLE, 0), 3 * COUNT // 5: (GROUP, 0)}
    with StageGroup(grouped(tiny[0], cluster), str(tiny[0]), options) as group:
        assert [len(stage.actor_ids) for stage in group.stages] == [2, 1]
        for ended in run.of(group):
            for at in [at for at in deaths if at <= ended]:
                before = [stage.actor_ids for stage in group.stages]
                signal_rank(group, *deaths.pop(at))
        after = [stage.actor_ids for stage in group.stages]
    assert not deaths
    run.check(tiny[1])
    assert run.faults == [("died", GROUP), ("died", SINGLE), ("died", GROUP)]
    assert after[SINGLE] == before[SINGLE], "it keeps its shard"
    assert not set(after[GROUP]) & set(before[GROUP]), "all ranks are started again"


class FaultyGroup(StageGroup):
    rank_class = FaultyRank


@pytest.mark.rare  # another load, of ten seconds
def test_a_rank_that_is_short_of_memory_keeps_its_weights(
    tiny: tuple[Path, Any], cluster: Path
) -> None:
    run = Run()
    options = GroupOptions(transport="gloo", on_event=run.events.append)
    with FaultyGroup(grouped(tiny[0], cluster), str(tiny[0]), options) as group:
        before = [stage.actor_ids for stage in group.stages]
        with pytest.warns(UserWarning, match=r"stage 0 \(a/CPU:0\+2\) ran out of memory.*halved"):
            assert list(run.of(group, "large"))[-1] == COUNT
        assert [stage.actor_ids for stage in group.stages] == before
        assert 1 <= group.sizes.decode_micro_batch <= LARGEST
    run.check(tiny[1], "large")
    assert {event.kind for event in run.events} == {"memory"}


@pytest.mark.rare  # `test_pipeline.py` has pretend stages whose ranks hang
def test_a_rank_that_hangs_is_its_stages_loss(tiny: tuple[Path, Any], cluster: Path) -> None:
    run = Run()
    options = GroupOptions(recovery=Recovery(hang_s=5.0), on_event=run.events.append)
    with StageGroup(grouped(tiny[0], cluster), str(tiny[0]), options) as group:
        hangs = False
        for ended in run.of(group):
            if ended > COUNT // 2 and not hangs:
                signal_rank(group, GROUP, 1, signal.SIGSTOP)
                hangs = True
    run.check(tiny[1])
    assert run.faults == [("hung", GROUP)]


@pytest.mark.rare  # another load; without Ray in tests/actors/stage/
def test_importance_and_parking_with_a_group(tiny: tuple[Path, Any], cluster: Path) -> None:
    """Weights of 3 bit are those of a stage that is not divided; requests are preempted."""
    spec = grouped(tiny[0], cluster, bits=3)
    cpu = compute_on(torch.device("cpu"), torch.float32)
    found = measure_layers(tiny[0], cpu, range(LAYERS), [LayerScheme()] * LAYERS)[1]
    processor = local_processor(torch.device("cpu"))
    tokens = PROMPT_LENGTH + NEW_TOKENS
    stages = stages_of(tiny[0], (0, LAYERS), 6, tokens, 3, processor=processor, importance=found)
    sampling = Sampling(ignore_eos=True)
    prompts = PROMPTS[:24]
    expected = generate(stages, prompts, NEW_TOKENS, 3, 6, sampling)
    options = GroupOptions(policy=PolicyOptions("s3", max_batch_size=6, prefill_chunk_tokens=4))
    requests = [
        Request(str(i), prompt, NEW_TOKENS, sampling, expected_tokens=1)
        for i, prompt in enumerate(prompts)
    ]
    with StageGroup(spec, str(tiny[0]), options) as group:
        group._pipeline.sizes = replace(
            group.sizes, n_slots=2 * tokens, park_tokens_from=1, parked_tokens=10 * tokens
        )
        group.abandon()  # links with these sizes
        ended = {each.custom_id: each for some in group.generate(requests) for each in some}
        queue = group.observer.figures()[0].queue
    assert queue is not None
    assert queue.supervision.parked > 0
    assert [list(ended[str(i)].token_ids) for i in range(len(prompts))] == expected


@pytest.mark.rare
@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.rare)])
def test_ranks_hand_over_the_heads_that_they_hold(
    tiny: tuple[Path, Any], tmp_path: Path, ranks: tuple[int, int]
) -> None:
    """One stage prefills and one decodes, either of which may have two ranks; one of them dies."""
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO.replace("CPU: 2", "CPU: 1"))
    one = tiny_plan(tiny[0], path).spec

    def of_ranks(node: str, count: int) -> PlanSpec:
        devices = tuple(f"{node}/CPU:{rank}" for rank in range(count))
        stage = replace(one.stages[0], node=node, device=devices[0], devices=devices)
        return replace(one, stages=(stage,))

    plan = divided(of_ranks("p", ranks[0]), of_ranks("d", ranks[1]))
    plan.check()
    run = Run()
    is_hit = False
    options = GroupOptions(transport="gloo", on_event=run.events.append)
    with DividedGroup(plan, str(tiny[0]), options) as group:
        for ended in run.of(group):
            if ended > COUNT // 2 and not is_hit:
                is_hit = True
                assert group.observer.figures()[1].prefill_tokens == 0, "all was handed over"
                signal_rank(group, ranks.index(2), 1)
        assert tuple(len(stage.actor_ids) for stage in group.stages) == ranks
    run.check(tiny[1])
    assert [fault for fault in run.faults if fault[0] == "died"] == [("died", ranks.index(2))]
