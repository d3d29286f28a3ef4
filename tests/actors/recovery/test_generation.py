"""Generation through faults, with pretend stages: replays, halved batches, suspects, lost rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from actors.messages import BatchKind, Finished, HeadId, Request
from actors.processes.health import BatchFailure
from actors.recovery.faults import RunInterruptedError
from actors.recovery.generation import LEAST_TOGETHER, MOST_AHEAD, halved
from actors.schedule.scheduler import QueueSizes
from quant.common.errors import StageLostError
from tests.actors.recovery.pretend import Cluster, requests, started, tokens_of

COUNT = 300
SOON_S = 5.0  # in the middle of the run


@pytest.mark.parametrize(("stage", "again"), [(0, 3 + 1), (1, 0 + 1)])
def test_requests_in_flight_keep_their_tokens(stage: int, again: int) -> None:
    """All of them where the first stage can tell; else those of the last second or so are lost."""
    source = [replace(request, max_new_tokens=60) for request in requests(8)]
    undisturbed = started()
    undisturbed.check_all(source)
    cluster = started()
    cluster.plan_in(SOON_S, cluster.stages[stage].die)
    cluster.check_all(source)
    assert undisturbed.steps <= cluster.steps <= undisturbed.steps + again


def test_what_had_finished_before_the_fault_is_not_computed_again() -> None:
    """Nobody has taken it by then."""
    source = requests(64, new_tokens=2)
    undisturbed = started()
    undisturbed.check_all(source)
    cluster = started()
    cluster.plan_in(SOON_S, cluster.stages[1].die)
    cluster.check_all(source, pause_s=3.0)
    assert undisturbed.steps <= cluster.steps <= undisturbed.steps + 1


def test_short_memory_halves_micro_batches_until_they_fit() -> None:
    cluster = started(sizes=QueueSizes(16, 8, 12, 64))

    def compute(custom_ids: tuple[str, ...]) -> None:
        if len(custom_ids) > 3:
            cluster.fail(1, "memory", cluster.computing)

    cluster.on_compute = compute
    with pytest.warns(UserWarning, match=r"stage 1 .* out of memory .* 4096 bytes .* 64; .*halved"):
        cluster.check_all(requests(COUNT))
    assert cluster.kinds() == [("memory", 1)] * 2
    assert cluster.pipeline.sizes == QueueSizes(16, 8, 3, 64), "twelve, six, three"
    assert [stage.starts for stage in cluster.stages] == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "prefill", "decode"), [("prefill", 2, 12), ("decode", 8, 2), ("mixed", 4, 6)]
)
def test_what_is_halved_is_what_the_micro_batch_had(
    kind: BatchKind, prefill: int, decode: int
) -> None:
    failure = BatchFailure("memory", kind, (1, 5, 6, 7), "")
    sizes = halved(QueueSizes(16, 8, 12, 64), failure)
    assert sizes == QueueSizes(16, prefill, decode, 64)


def test_a_request_for_which_there_is_no_memory_alone_is_an_error() -> None:
    cluster = started(sizes=QueueSizes(8, 2, 2, 64))

    def compute(custom_ids: tuple[str, ...]) -> None:
        if "7" in custom_ids:
            cluster.fail(2, "memory", cluster.computing)

    cluster.on_compute = compute
    with pytest.warns(UserWarning, match="halved to 1"):
        cluster.check_all(requests(COUNT), but=("7",))
    assert cluster.kinds()[-1][0] == "memory"
    assert ("given up", 2) in cluster.kinds()


def failing(cluster: Cluster) -> None:
    cluster.fail(1, "failed", cluster.computing)


def breaking(cluster: Cluster) -> None:
    cluster.fail(1, "device", cluster.computing)


def killing(cluster: Cluster) -> None:
    cluster.stages[1].die()


def freezing(cluster: Cluster) -> None:
    cluster.stages[1].freeze()


@pytest.mark.parametrize(
    ("harm", "kind"),
    [(failing, "failed"), (breaking, "died"), (killing, "died"), (freezing, "hung")],
)
def test_a_request_that_does_harm_is_found_and_the_others_finish(
    harm: Callable[[Cluster], None], kind: str
) -> None:
    cluster = started()
    cluster.on_compute = lambda ids: harm(cluster) if "41" in ids else None
    cluster.check_all(requests(COUNT), but=("41",))
    assert set(cluster.kinds()) == {(kind, 1), ("given up", 1)}
    assert (cluster.stages[1].starts > 1) is (harm is not failing)
    faults = [event for event in cluster.events if event.kind == kind]
    assert len(faults) <= 2 + 3 + 2, "twice, halves of eight requests, twice alone"


def test_a_head_that_does_harm_is_computed_no_more() -> None:
    cluster = started()
    pipeline = cluster.pipeline
    pipeline.sizes = replace(pipeline.sizes, head_tokens=100)

    def harm(ids: tuple[str, ...]) -> None:
        if pipeline.sizes.head_tokens and any(isinstance(each, HeadId) for each in ids):
            killing(cluster)

    cluster.on_compute = harm
    first, *others = requests(COUNT)
    cluster.check_all([replace(first, custom_id=HeadId(first.custom_id)), *others])
    assert cluster.kinds() == [("died", 1)]
    assert pipeline.sizes.head_tokens == 0


def test_a_link_that_breaks_is_nobodys_fault() -> None:
    cluster = started()

    def break_link() -> None:
        cluster.stages[1].process.links_broken = True

    cluster.plan_in(SOON_S, break_link)
    cluster.check_all(requests(COUNT))
    assert cluster.kinds() == [("broken", None)]
    assert [stage.starts for stage in cluster.stages] == [1, 1, 1]


@pytest.mark.parametrize("slow", [0, 900])
def test_a_source_is_read_ahead_of_the_slots_but_no_further(slow: int) -> None:
    """Also where it was slower than the stages at first, and they waited for it."""
    cluster, taken, ended = started(), 0, 0
    most = cluster.pipeline.sizes.slots + (1 + (MOST_AHEAD if slow else 1)) * LEAST_TOGETHER

    def source() -> Iterator[Request]:
        nonlocal taken
        for request in requests(slow + 3 * COUNT):
            taken += 1
            if taken < slow:
                cluster.tick(2.0)
            yield request

    for finished in cluster.whole_answers(source()).results():
        ended += len(finished)
        assert taken - ended < most
    assert ended == slow + 3 * COUNT


def test_an_error_of_the_source_is_nobody_elses() -> None:
    cluster = started()

    def source() -> Iterator[Request]:
        yield from requests(5)
        raise StageLostError("of another group")

    with pytest.raises(StageLostError, match="of another group"):
        cluster.generate(source())  # type: ignore[arg-type]
    assert cluster.events == []


@pytest.mark.parametrize("after", [1, 40, 150])
def test_what_is_halted_goes_on_elsewhere_with_its_tokens(after: int) -> None:
    """Each request ends once, in the first group or in the second."""
    source = requests(COUNT, new_tokens=9)
    first = started()
    answers = first.whole_answers(source)
    ended: list[Finished] = []
    for finished in answers.results():
        ended += finished
        if len(ended) >= after:
            in_slots = answers.live.tokens_in_flight
            ended += answers.halt()
            break
    left = answers.unfinished
    assert set(in_slots) <= {str(i) for i in range(COUNT)}
    assert any(request.generated for request in left), "or tokens are computed again"
    for request in left:
        assert request.generated == tokens_of(request)[: len(request.generated)]
    not_taken = [r for r in source if r.custom_id not in {e.custom_id for e in (*ended, *left)}]
    second = started()
    for finished in second.whole_answers([*left, *not_taken]).results():
        ended += finished
    assert sorted(int(each.custom_id) for each in ended) == list(range(COUNT))
    assert {each.custom_id: each.token_ids for each in ended} == {
        request.custom_id: tokens_of(request) for request in source
    }


def test_whole_answers_have_all_log_probabilities_though_stages_die_and_others_go_on() -> None:
    """Of requests that ask, what was computed is computed again: nobody knows it any more."""
    made = requests(COUNT, new_tokens=9)
    source = [replace(r, top_logprobs=0 if i % 2 else None) for i, r in enumerate(made)]
    first = started()
    answers = first.whole_answers(source)
    ended: list[Finished] = []
    for finished in answers.results():
        ended += finished
        if len(first.events) < 2 and len(ended) > 40 * len(first.events):
            first.stages[1].die()
        if len(ended) >= 120:
            ended += answers.halt()
            break
    assert len(first.events) == 2
    left = answers.unfinished
    assert {bool(r.generated) for r in left if r.top_logprobs is None} == {True, False}
    assert not any(r.generated for r in left if r.top_logprobs == 0)
    not_taken = source[len(ended) + len(left) :]
    for finished in started().whole_answers([*left, *not_taken]).results():
        ended += finished
    assert len(ended) == len(source)
    for request, each in zip(source, sorted(ended, key=lambda e: int(e.custom_id)), strict=True):
        assert each.token_ids == tokens_of(request)
        told = tuple(-one.logprob for one in each.logprobs)
        assert told == (each.token_ids if request.top_logprobs == 0 else ())


def test_a_run_that_is_interrupted_can_be_given_up_and_another_follows() -> None:
    cluster = started()
    answers = cluster.whole_answers(requests(COUNT))
    cluster.plan_in(SOON_S, answers.live.interrupt)
    with pytest.raises(RunInterruptedError):
        list(answers.results())
    assert answers.unfinished
    cluster.repair.restore(cluster.repair.stop_run({}))
    cluster.check_all(requests(COUNT))
    assert [stage.starts for stage in cluster.stages] == [1, 1, 1]
    assert cluster.events == []
