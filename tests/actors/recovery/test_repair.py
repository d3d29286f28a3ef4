"""Repair and replay of pretend stages that die, hang and fail, by a pretend clock."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest

from actors.recovery.policy import Recovery
from quant.common.errors import (
    CheckpointError,
    DeviceError,
    DeviceLostError,
    StageLostError,
)
from tests.actors.recovery.pretend import (
    DAY_S,
    HANG_S,
    LOAD_S,
    START_S,
    Cluster,
    requests,
    started,
)
from tests.actors.recovery.pretend_leader import STEP_S
from tests.seeds import seeds

COUNT = 300
SOON_S = 5.0  # in the middle of the run


def test_nothing_happens_where_nothing_fails() -> None:
    cluster = started()
    cluster.check_all(requests(COUNT))
    cluster.check_all(requests(COUNT))
    assert cluster.events == []
    assert [stage.starts for stage in cluster.stages] == [1, 1, 1]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("transport", ["gloo", "ray"])
def test_a_stage_that_dies_is_started_again_and_the_others_stay(stage: int, transport: str) -> None:
    cluster = started(transport=transport)
    cluster.plan_in(SOON_S, cluster.stages[stage].die)
    cluster.check_all(requests(COUNT))
    assert cluster.kinds() == [("died", stage)]
    assert [each.starts for each in cluster.stages] == [1 + (i == stage) for i in range(3)]
    (event,) = cluster.events
    assert START_S + LOAD_S <= event.lost_s <= START_S + LOAD_S + 5.0
    assert event.text.startswith(f"stage {stage} (node/gpu:{stage}) died; going on after ")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_gives_no_sign_of_life_is_killed_and_started_again(stage: int) -> None:
    cluster = started()
    began_s = cluster.now_s
    cluster.plan_in(SOON_S, cluster.stages[stage].freeze)
    cluster.check_all(requests(COUNT))
    assert cluster.kinds() == [("hung", stage)]
    text = cluster.events[0].text
    assert f"stage {stage} (node/gpu:{stage}) hung: " in text
    undisturbed_s = COUNT * 3 / 8 * STEP_S  # three tokens for each on average, eight at once
    assert cluster.now_s - began_s < undisturbed_s + 2 * HANG_S + START_S + LOAD_S


def test_a_stage_that_computes_for_ever_is_named() -> None:
    cluster = started()

    def compute_for_ever() -> None:
        cluster.stages[2].process.stuck_s = cluster.now_s

    cluster.plan_in(SOON_S, compute_for_ever)
    cluster.check_all(requests(COUNT))
    assert cluster.kinds() == [("hung", 2)]
    assert "stage 2 computes since" in cluster.events[0].text


def test_two_stages_may_die_together() -> None:
    cluster = started()
    for stage in (0, 2):
        cluster.plan_in(SOON_S, cluster.stages[stage].die)
    cluster.check_all(requests(COUNT))
    assert [each.starts for each in cluster.stages] == [2, 1, 2]
    assert len(cluster.events) == 1


LOADING_S = START_S + LOAD_S / 2  # from a death on
LINKING_S = START_S + LOAD_S + 1.0


@pytest.mark.parametrize(
    ("fault", "later_s"),
    [("die", START_S / 2), ("die", LOADING_S), ("die", LINKING_S), ("freeze", LOADING_S)],
)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_lost_again_while_it_is_repaired_is_started_once_more(
    stage: int, fault: str, later_s: float
) -> None:
    cluster = started()
    cluster.plan_in(SOON_S, cluster.stages[stage].die)
    cluster.plan_in(SOON_S + later_s, lambda: getattr(cluster.stages[stage], fault)())
    cluster.check_all(requests(COUNT))
    assert [each.starts for each in cluster.stages] == [1 + 2 * (i == stage) for i in range(3)]
    assert cluster.kinds() == [("died", stage)]
    assert cluster.events[0].lost_s < 2 * (START_S + LOAD_S) + 2 * HANG_S


@pytest.mark.parametrize("later_s", [LOADING_S, LINKING_S])
@pytest.mark.parametrize("fault", ["die", "freeze"])
def test_another_stage_is_lost_while_one_is_repaired(fault: str, later_s: float) -> None:
    """The first one is not started again, but loaded if it was not."""
    cluster = started()
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    cluster.plan_in(SOON_S + later_s, lambda: getattr(cluster.stages[2], fault)())
    cluster.check_all(requests(COUNT))
    assert cluster.stages[0].starts == 1
    assert cluster.stages[1].starts <= (2 if later_s == LINKING_S else 3)
    assert cluster.stages[2].starts == 2
    assert sum(event.lost_s for event in cluster.events) < 4 * HANG_S


def test_a_stage_that_does_not_leave_the_run_is_killed_and_not_the_one_that_waits_for_it() -> None:
    """It computes for ever, but its control thread gives signs of life."""
    cluster = started()

    def compute_for_ever() -> None:
        cluster.stages[2].process.stuck_s = cluster.now_s

    cluster.plan_in(SOON_S, compute_for_ever)
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    cluster.check_all(requests(COUNT))
    assert [each.starts for each in cluster.stages] == [1, 2, 2]


def test_restarts_are_used_up() -> None:
    """A stage that dies whenever it loads."""
    cluster = started(Recovery(restarts=3, hang_s=HANG_S))

    def die_from_now_on() -> None:
        cluster.stages[1].die()
        cluster.stages[1].loading = die_loading

    def die_loading() -> None:
        cluster.stages[1].die()
        raise StageLostError("stage 1's process died")

    cluster.plan_in(SOON_S, die_from_now_on)
    with pytest.raises(StageLostError, match="stage 1's process died"):
        cluster.check_all(requests(COUNT))
    assert cluster.stages[1].starts == 1 + 1 + 3
    left = {request.custom_id for request in cluster.answers.unfinished}
    assert left, "another group can go on with them"


def test_runs_that_finish_nothing_end_after_as_many_restarts() -> None:
    cluster = started(Recovery(retries=9, restarts=3, hang_s=HANG_S))
    cluster.on_compute = lambda ids: cluster.stages[2].die()
    with pytest.raises(StageLostError, match="4 restarts in a row, and no request finished"):
        cluster.check_all(requests(COUNT))


@pytest.mark.parametrize("policy", ["replan", "wait", "fail"])
def test_a_device_that_comes_back_is_used(policy: str) -> None:
    recovery = Recovery(hang_s=HANG_S, replace_s=100.0, on_device_loss=policy)  # type: ignore[arg-type]
    cluster = started(recovery)
    away_s = 0.5 if policy == "fail" else 80.0
    cluster.plan_in(SOON_S, lambda: cluster.stages[1].lose_device(away_s))
    cluster.check_all(requests(COUNT))
    reports = [event.text for event in cluster.events if event.kind == "waiting"]
    assert len(reports) == (policy != "fail")
    assert all("stage 1 (node/gpu:1) has waited 6" in text for text in reports)
    assert cluster.kinds()[-1] == ("died", 1)


def test_a_device_that_stays_away_is_waited_for_as_long_as_it_takes() -> None:
    recovery = Recovery(hang_s=HANG_S, replace_s=100.0, on_device_loss="wait")
    cluster = started(recovery)
    cluster.plan_in(SOON_S, lambda: cluster.stages[1].lose_device(1000.0))
    cluster.check_all(requests(COUNT))
    waiting = [event for event in cluster.events if event.kind == "waiting"]
    assert 1000 / 60 - 2 < len(waiting) < 1000 / 60 + 2, "told every minute"


@pytest.mark.parametrize(("policy", "after_s"), [("replan", 100.0), ("fail", 0.0)])
def test_a_device_that_is_gone_for_good_ends_the_run(policy: str, after_s: float) -> None:
    recovery = Recovery(hang_s=HANG_S, replace_s=100.0, on_device_loss=policy)  # type: ignore[arg-type]
    cluster = started(recovery)
    cluster.plan_in(SOON_S, lambda: cluster.stages[2].lose_device(DAY_S))
    began_s = cluster.now_s
    with pytest.raises(DeviceLostError, match=r"stage 2 .*no node has had a free one") as error:
        cluster.check_all(requests(COUNT))
    assert (error.value.stages, error.value.devices) == ((2,), ("node/gpu:2",))
    assert after_s <= cluster.now_s - began_s <= after_s + SOON_S + 5.0
    tokens = {request.custom_id: request.generated for request in cluster.answers.unfinished}
    assert any(tokens.values()), "with the tokens they had"


def test_a_process_that_does_not_come_up_is_started_twice() -> None:
    """Its device is there, as far as Ray knows."""
    cluster = started(Recovery(hang_s=HANG_S, replace_s=50.0))
    cluster.stages[1].start_s = DAY_S
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    with pytest.raises(DeviceLostError, match=r"stage 1 .*for 100 s"):
        cluster.check_all(requests(COUNT))
    assert cluster.stages[1].starts == 1 + 2


def test_a_device_that_cannot_be_used_again_counts_as_gone() -> None:
    def no_device() -> None:
        raise DeviceError("the GPU has 3 bytes")

    cluster = started()
    cluster.stages[1].loading = no_device
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    with pytest.raises(
        DeviceLostError, match=r"stage 1 .*cannot be used any more: the GPU"
    ) as lost:
        cluster.check_all(requests(COUNT))
    assert lost.value.stages == (1,)


@pytest.mark.parametrize("fault", ["die", "freeze"])
@pytest.mark.parametrize("at_s", [START_S + LOAD_S / 2, START_S + 0.25])
def test_a_stage_that_is_lost_while_the_plan_is_loaded_is_started_again(
    fault: str, at_s: float
) -> None:
    cluster = Cluster(Recovery(hang_s=HANG_S))
    cluster.plan_in(at_s, lambda: getattr(cluster.stages[1], fault)())
    cluster.start()
    assert cluster.kinds() == [("died", 1)]
    assert "while the plan was loaded: stage 1 (node/gpu:1)" in cluster.events[0].text
    cluster.check_all(requests(COUNT))
    assert [stage.starts for stage in cluster.stages] == [1, 2, 1]


def test_a_process_that_is_slow_to_start_does_not_hang() -> None:
    cluster = Cluster(Recovery(hang_s=HANG_S))
    cluster.stages[2].start_s = 5 * HANG_S
    cluster.start()
    assert cluster.events == []


def test_what_loading_says_of_the_users_mistake_ends_the_start() -> None:
    def cut_off() -> None:
        raise CheckpointError("model.safetensors is cut off")

    cluster = Cluster(Recovery(hang_s=HANG_S))
    cluster.stages[1].loading = cut_off
    with pytest.raises(CheckpointError, match="cut off"):
        cluster.start()


def test_a_plan_that_does_not_load_in_time_names_the_stages() -> None:
    cluster = Cluster(Recovery(hang_s=HANG_S))
    cluster.stages[2].load_s = DAY_S
    with pytest.raises(DeviceError, match=r"^stage 2 \(node/gpu:2\) did not load within 600 s"):
        cluster.start()


@pytest.mark.parametrize("at_s", [START_S + 1.0, START_S + LOAD_S + SOON_S])
def test_without_recovery_the_first_fault_names_its_stage(at_s: float) -> None:
    cluster = Cluster(Recovery(retries=0))
    cluster.plan_in(at_s, lambda: cluster.stages[1].die())

    def run() -> None:
        cluster.start()
        cluster.check_all(requests(COUNT))

    with pytest.raises(StageLostError, match="stage 1's process died"):
        run()
    assert cluster.events == []
    assert cluster.stages[1].starts == 1


def cannot_meet() -> None:
    raise DeviceError("no port")


def test_stages_that_cannot_meet_are_left_to_ray_unless_gloo_was_asked_for() -> None:
    cluster = Cluster(Recovery(), transport="auto")
    cluster.stages[1].connecting = cannot_meet
    with pytest.warns(UserWarning, match=r"no port.*by Ray") as warned:
        cluster.start()
    assert len(warned) == 1
    assert cluster.pipeline.serving == []
    cluster = Cluster(Recovery(), transport="ray")
    cluster.stages[1].connecting = cannot_meet
    cluster.start()
    cluster = Cluster(Recovery(), transport="gloo")
    cluster.stages[1].connecting = cannot_meet
    with pytest.raises(DeviceError, match="no port"):
        cluster.start()


def test_stages_that_cannot_be_linked_again_end_the_run() -> None:
    cluster = started(Recovery(restarts=2, hang_s=HANG_S))
    cluster.stages[2].connecting = cannot_meet
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    with pytest.raises(StageLostError, match=r"could not be linked again: no port"):
        cluster.check_all(requests(COUNT))


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_faults_at_random_lose_nothing_and_double_nothing(seed: int) -> None:
    chance = random.Random(seed)
    cluster = started(
        Recovery(retries=9, restarts=40, hang_s=HANG_S),
        transport=chance.choice(["gloo", "ray"]),
        count=chance.randrange(1, 5),
    )
    at_s = 0.0
    for _ in range(6):
        at_s += chance.expovariate(1 / 20.0)
        stage = chance.choice(cluster.stages)
        harm = chance.choice([stage.die, stage.freeze, partial(stage.lose_device, 30.0)])
        cluster.plan_in(at_s, harm)
    cluster.check_all(requests(COUNT))
    assert all(a.time_s <= b.time_s for a, b in pairwise(cluster.events))
