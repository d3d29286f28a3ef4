"""A large model planned on GPUs, and played by a tiny one in local processes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.handover.group import DividedGroup
from actors.messages import Request, Sampling
from actors.stage_group import GroupOptions, StageGroup
from llmpq import Cluster, Plan, Workload
from planner.model.finding import model_shape
from quant.common.errors import SpecError
from tests.llmpq.conftest import BATCH, PROMPT_LENGTH
from tests.llmpq.divided_plans import divided_plan

pytestmark = pytest.mark.usefixtures("local_ray")

CLUSTER = """
name: two
nodes:
  - {{name: a, accelerators: {{T4: 2}}}}
emulate: {{time_scale: {}, stand_in: {}}}
"""
NEW_TOKENS = 3
TIME_SCALE = 2


@pytest.fixture(scope="module")
def played(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """OPT-13B in 16 bit on two GPUs: some 60 ms of a T4's time in every step of each, twice as
    long here.
    """
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
    assert simulated_s <= seconds


def test_the_stand_ins_folder_and_tokens_are_those_of_the_run(played: Plan) -> None:
    rows = [[3 + i] * PROMPT_LENGTH for i in range(2)]
    results = list(played.run(rows, Sampling(ignore_eos=True), transport="ray"))
    assert [len(result.token_ids) for result in results] == [NEW_TOKENS] * 2
    first, *rest = played.stages
    tight = replace(first, memory_limit_bytes=first.memory_bytes - 1)
    plan = Plan(replace(played.spec, stages=(tight, *rest)))
    with pytest.raises(SpecError, match=r"stages\.0\.memory_bytes.* offers \d+; plan again"):
        tuple(plan.run(rows))


@pytest.mark.rare
def test_keys_and_values_take_the_time_of_the_emulated_network(tiny: tuple[Path, Any]) -> None:
    """OPT-13B has 0.8 MB of them a token: 16 tokens take a tenth of a second at 1 Gbit/s, and as
    many times that as all else here.
    """
    emulate = {"time_scale": TIME_SCALE, "stand_in": str(tiny[0])}
    plan = divided_plan(
        "opt-13b", (14.0, 14.0), (30.0,), network=1.0, emulate=emulate, bits=[16], dtype="auto"
    )
    shape = model_shape("opt-13b")
    token_bytes = 2 * 2 * shape.layers * shape.hidden_size
    network_s = TIME_SCALE * PROMPT_LENGTH * token_bytes / (1e9 / 8)
    (decode,) = plan.stages
    sampling = Sampling(ignore_eos=True)
    at_s: list[float] = []
    with DividedGroup(plan, str(tiny[0]), GroupOptions(transport="gloo")) as group:
        for _ in range(2):  # once to warm up
            at_s = []
            live = group.live()
            live.submit(Request("0", (3,) * PROMPT_LENGTH, NEW_TOKENS, sampling))
            live.close()
            for told in live.events():
                at_s += [time.monotonic() for each in told for _ in each.token_ids]
        assert group.observer.figures()[2].prefill_tokens == 0
    assert len(at_s) == NEW_TOKENS
    # Both prefill stages send at the same time, each half of the layers or so.
    share = max(len(stage.layers) for stage in group.prefill.plan.stages) / shape.layers
    step_s = TIME_SCALE * decode.decode_s
    assert share * network_s + step_s <= at_s[1] - at_s[0]
    assert step_s * 0.9 <= at_s[2] - at_s[1]
