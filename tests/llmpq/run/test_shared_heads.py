"""A run whose prompts share a head, and of whose stages one dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.messages import Request, Sampling
from actors.recovery.policy import RecoveryEvent
from actors.stage_figures import SharedPrompts
from actors.stage_group import GroupOptions, StageGroup
from llmpq.cluster import Cluster
from planner.workload import Workload
from tests.actors.models import named, random_prompts, references

pytestmark = pytest.mark.usefixtures("local_ray")

CLUSTER = """
name: two-emulated
nodes: [{name: a, accelerators: {T4: 1}}, {name: b, accelerators: {V100-SXM2-16GB: 1}}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""
NEW_TOKENS = 8
(HEAD,) = random_prompts((80,))
PROMPTS = [HEAD + tail for tail in random_prompts(tuple(1 + i % 9 for i in range(24)), seed=3)]


@pytest.mark.rare
def test_a_head_is_computed_again_where_its_copies_are_lost(
    tiny: tuple[Path, Any], tmp_path: Path
) -> None:
    """A run after it finds the head that stages have kept."""
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    workload = Workload(6, 90, NEW_TOKENS)
    plan = Cluster.from_yaml(file).plan(
        tiny[0], workload, dtype="float32", bits=[16], keep_all_devices=True
    )
    events: list[RecoveryEvent] = []
    requests = [
        Request(str(i), prompt, NEW_TOKENS, Sampling(ignore_eos=True))
        for i, prompt in enumerate(PROMPTS)
    ]
    found: dict[str, list[int]] = {}
    counts: list[SharedPrompts] = []

    def shared() -> SharedPrompts:
        queue = group.observer.figures()[0].queue
        assert queue is not None
        return queue.shared

    with StageGroup(plan.spec, str(tiny[0]), GroupOptions(on_event=events.append)) as group:
        for some in group.generate(requests):
            found |= {each.custom_id: list(each.token_ids) for each in some}
            if len(found) >= 6 and not counts:
                counts.append(shared())
                ray.kill(group.stages[1].actor)
        counts.append(shared())
        again = {f.custom_id: list(f.token_ids) for some in group.generate(requests) for f in some}
        counts.append(shared())
    assert events
    assert found == again == named(references(tiny[1], PROMPTS, NEW_TOKENS, ignore_eos=True))
    assert [each.heads for each in counts] == [1, 2, 2]
    assert counts[2].since(counts[1]) == SharedPrompts(0, 0, 24, 24 * 80, sum(map(len, PROMPTS)))
