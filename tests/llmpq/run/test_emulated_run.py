"""A large model planned on GPUs, and played by a tiny one in local processes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Request, Sampling
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from quant.common.errors import SpecError
from tests.llmpq.conftest import BATCH, PROMPT_LENGTH

pytestmark = pytest.mark.usefixtures("local_ray")

CLUSTER = """
name: two
nodes:
  - {{name: a, accelerators: {{T4: 2}}}}
emulate: {{time_scale: {}, stand_in: {}}}
"""
NEW_TOKENS = 3
TIME_SCALE = 4
"""Leaves a busy machine time for what the emulated devices compute."""


@pytest.fixture(scope="module")
def played(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """OPT-13B in 16 bit on two GPUs: some 60 ms of a T4's time in every step of each, four times
    as long here, so that no stall of a busy machine outlasts them."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER.format(TIME_SCALE, tiny[0]))
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    return Cluster.from_yaml(path).plan("opt-13b", workload, bits=[16])


def test_a_played_batch_takes_no_less_than_the_simulation(
    played: Plan, tiny: tuple[Path, Any]
) -> None:
    sampling = Sampling(ignore_eos=True)
    requests = [
        Request(str(i), (3 + i,) * PROMPT_LENGTH, NEW_TOKENS, sampling) for i in range(BATCH)
    ]
    with StageGroup(played.spec, str(tiny[0]), GroupOptions(transport="gloo")) as group:
        began = time.monotonic()
        finished = [each for batch in group.generate(requests) for each in batch]
        seconds = time.monotonic() - began
    assert {len(each.token_ids) for each in finished} == {NEW_TOKENS}
    assert len(finished) == BATCH
    simulated_s = TIME_SCALE * played.predicted.latency_s
    assert simulated_s <= seconds < 3 * simulated_s


def test_the_stand_ins_folder_and_tokens_are_those_of_the_run(played: Plan) -> None:
    rows = [[3 + i] * PROMPT_LENGTH for i in range(2)]
    results = list(played.run(rows, Sampling(ignore_eos=True), transport="ray"))
    assert [len(result.token_ids) for result in results] == [NEW_TOKENS] * 2
    first, *rest = played.stages
    tight = replace(first, memory_limit_bytes=first.memory_bytes - 1)
    plan = Plan(replace(played.spec, stages=(tight, *rest)))
    with pytest.raises(SpecError, match=r"stages\.0\.memory_limit_bytes"):
        tuple(plan.run(rows))
