"""Live generation through faults, with pretend stages: no token is lost, and none comes twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from actors.messages import HostKey, Request, Sampling
from actors.recovery.faults import RunInterruptedError
from actors.recovery.generation import LiveGeneration
from actors.recovery.policy import Recovery
from quant.common.errors import SpecError, StageLostError
from tests.actors.recovery.pretend import (
    HANG_S,
    Cluster,
    Reference,
    requests,
    started,
    tokens_of,
)

MANY = requests(20, new_tokens=9)


def run_all(
    cluster: Cluster, coming: list[Request], at: dict[int, Callable[[LiveGeneration], None]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str | None]]:
    """Submit a request before the first event and after each; returns the tokens of all, and the
    errors of those that ended. `at` says what else is done after which event.
    """
    live = LiveGeneration(cluster.repair)
    left = list(coming)
    tokens: dict[str, tuple[int, ...]] = defaultdict(tuple)
    ended: dict[str, str | None] = {}
    live.submit(left.pop(0))
    for number, told in enumerate(live.events()):
        for each in told:
            assert each.custom_id not in ended
            tokens[each.custom_id] += each.token_ids
            if each.finish_reason is not None:
                ended[each.custom_id] = each.error
        at.get(number, lambda _: None)(live)
        if left:
            live.submit(left.pop(0))
        else:
            live.close()
    assert live.under_way == 0
    return tokens, ended


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_die_cost_and_double_no_token(stage: int) -> None:
    cluster = started()
    deaths = {n: lambda _: cluster.stages[stage].die() for n in (4, 11)}
    tokens, ended = run_all(cluster, MANY, deaths)
    assert cluster.kinds() == [("died", stage)] * 2
    assert tokens == {each.custom_id: tokens_of(each) for each in MANY}
    assert set(ended) == set(tokens)


def test_every_token_has_its_log_probabilities_once_though_stages_die() -> None:
    cluster = started()
    live = LiveGeneration(cluster.repair)
    asking = [replace(each, top_logprobs=0) if int(each.custom_id) % 2 else each for each in MANY]
    for each in asking:
        live.submit(each)
    live.close()
    found: dict[str, list[float]] = defaultdict(list)
    for number, told in enumerate(live.events()):
        for progress in told:
            found[progress.custom_id] += [each.logprob for each in progress.logprobs]
        if number in (2, 7):
            cluster.stages[number % 3].die()
    assert len(cluster.events) == 2
    assert found == {
        each.custom_id: [-n for n in tokens_of(each)] if each.top_logprobs == 0 else []
        for each in asking
    }


def test_a_cancelled_request_is_not_replayed() -> None:
    cluster = started()

    def cancel_and_die(live: LiveGeneration) -> None:
        live.cancel("8")
        cluster.stages[1].die()

    tokens, ended = run_all(cluster, MANY, {10: cancel_and_die})
    assert 0 < len(tokens["8"]) < MANY[8].max_new_tokens
    assert set(ended) == {each.custom_id for each in MANY} - {"8"}


def test_a_request_that_kills_stages_ends_with_an_error_and_the_others_with_all_tokens() -> None:
    cluster = started()

    def compute(custom_ids: tuple[str, ...]) -> None:
        if "7" in custom_ids:
            cluster.stages[1].die()

    cluster.on_compute = compute
    tokens, ended = run_all(cluster, MANY, {})
    assert "ran alone" in str(ended.pop("7"))
    assert set(ended.values()) == {None}
    for each in MANY:
        assert each.custom_id == "7" or tokens[each.custom_id] == tokens_of(each)
    assert len(ended) == len(MANY) - 1


def test_an_idle_run_does_not_hang() -> None:
    """Nothing is under way for longer than a stage may take for a micro-batch."""
    cluster = started()
    live = LiveGeneration(cluster.repair)
    cluster.plan_in(3 * HANG_S, lambda: live.submit(MANY[3]))
    cluster.plan_in(9 * HANG_S, live.close)
    told = [each for some in live.events() for each in some]
    assert [each.token_ids for each in told] == [(token,) for token in tokens_of(MANY[3])]
    assert cluster.events == []


def test_without_recovery_the_first_fault_is_raised() -> None:
    cluster = started(Recovery(retries=0, hang_s=HANG_S))
    with pytest.raises(StageLostError):
        run_all(cluster, MANY, {2: lambda _: cluster.stages[2].die()})


def test_what_cannot_be_submitted_is_refused() -> None:
    live = LiveGeneration(started().repair)
    live.submit(MANY[0])
    with pytest.raises(SpecError, match="'0' is in the run twice"):
        live.submit(Request("0", (1,), 1, Sampling()))
    live.cancel("0")
    live.submit(MANY[0])
    live.close()
    with pytest.raises(RuntimeError, match="after close"):
        live.submit(MANY[1])
    assert [each.token_ids for some in live.events() for each in some] == [(0,)]


def test_an_interrupted_run_ends_soon_though_nothing_comes() -> None:
    cluster = started()
    live = LiveGeneration(cluster.repair)
    cluster.plan_in(5 * HANG_S, live.interrupt)
    with pytest.raises(RunInterruptedError):
        list(live.events())
    assert cluster.now_s < 1000.0 + 6 * HANG_S


def test_a_request_has_its_key_only_while_the_pipeline_is_linked_as_it_was() -> None:
    """What lies in host memory goes with the links; a prompt that is to be kept always is."""
    cluster = started()
    first, seen, ages = cluster.stages[0], list[tuple[str, bool]](), list[float | None]()
    submit = first.submit

    def noting(run: int, given: Sequence[Request]) -> Reference:
        seen.extend((each.custom_id, each.host_key is not None) for each in given)
        ages.extend(each.age_s for each in given)
        return submit(run, given)

    first.submit = noting  # type: ignore[method-assign]
    present = cluster.pipeline.epoch
    requests = {
        "1": replace(MANY[1], generated=(100,), max_new_tokens=9, host_key=HostKey(5, present)),
        "2": replace(MANY[2], generated=(200,), max_new_tokens=9, host_key=HostKey(6, present - 1)),
        "3": replace(MANY[3], max_new_tokens=9, host_key=HostKey(7), age_s=2.0),
    }
    live = LiveGeneration(cluster.repair)
    for each in requests.values():
        live.submit(each)
    live.close()
    tokens: dict[str, tuple[int, ...]] = {name: r.generated for name, r in requests.items()}
    for number, told in enumerate(live.events()):
        for progress in told:
            tokens[progress.custom_id] += progress.token_ids
        if number == 2:
            cluster.stages[1].die()
    assert cluster.pipeline.epoch == present + 1
    assert seen[:3] == [("1", True), ("2", False), ("3", True)]
    assert seen[3:] == [("1", False), ("2", False), ("3", False)], "the last one has tokens by now"
    assert ages == [None, None, 2.0, None, None, None], "it is older when it comes again"
    assert tokens == {name: tokens_of(each) for name, each in requests.items()}
