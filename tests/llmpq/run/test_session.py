"""Sessions: stages that stay loaded from one call to the next, whatever ended the one before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

# isort: split
import psutil  # Ray has just put it on the path

from actors.recovery.policy import RecoveryEvent
from llmpq import Plan, Sampling
from llmpq.run.session import Session
from quant.common.errors import DeviceLostError, InputError, SpecError, StageLostError
from tests.actors.models import random_prompts, references
from tests.llmpq.conftest import NEW_TOKENS
from tests.llmpq.processes import NewActors

LENGTHS = (5, 11, 1, 8, 16, 2, 11, 3, 7, 4)
PROMPTS = random_prompts(LENGTHS)
ROWS = [list(prompt) for prompt in PROMPTS]
MANY = ROWS * 12
RUNS = 20

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def faults() -> list[RecoveryEvent]:
    """What the session of these tests was told of."""
    return []


@pytest.fixture(scope="module")
def session(local_ray: None, plan: Plan, faults: list[RecoveryEvent]) -> Iterator[Session]:
    """Three stages, for all tests that do not end them."""
    with plan.session(on_event=faults.append) as opened:
        yield opened


@pytest.fixture(scope="module")
def greedy(tiny: tuple[Path, Any]) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt."""
    return references(tiny[1], PROMPTS, NEW_TOKENS)


def tokens_of(results: Any) -> list[list[int]]:
    found = {result.custom_id: list(result.token_ids) for result in results}
    return [found[f"row-{i}"] for i in range(len(found))]


def test_calls_give_the_tokens_of_generate_and_of_runs_of_their_own(
    session: Session, plan: Plan, greedy: list[list[int]]
) -> None:
    """With other sampling from call to call; the stages are the same all along."""
    stages = [stage.actor for stage in session._shared.stages.of(plan.spec).stages]
    sampled = Sampling(temperature=1.0, top_p=0.9, seed=5)
    assert tokens_of(session.run(ROWS)) == greedy
    found = tokens_of(session.run(ROWS, temperature=1.0, top_p=0.9, seed=5))
    assert found == tokens_of(plan.run(ROWS, sampled)) != greedy
    assert tokens_of(session.run(ROWS, sampled)) == found
    assert tokens_of(session.run(ROWS, {"max_new_tokens": 2})) == [each[:2] for each in greedy]
    assert tokens_of(session.run(ROWS)) == greedy
    assert [stage.actor for stage in session._shared.stages.of(plan.spec).stages] == stages


def test_figures_are_those_of_each_call(session: Session, plan: Plan) -> None:
    """A stage counts on from call to call, and a call that is half as long has half the work."""
    sampling = Sampling(ignore_eos=True)
    whole, half = session.run(ROWS, sampling), session.run(ROWS[:5], sampling)
    assert (len(list(whole)), len(list(half))) == (10, 5)
    for results, lengths in ((whole, LENGTHS), (half, LENGTHS[:5])):
        assert results.summary is not None
        assert results.summary.generated_tokens == NEW_TOKENS * len(lengths)
        assert len(results.summary.stages) == len(plan.stages)
        for stage in results.summary.stages:
            assert stage.prefill_tokens == sum(lengths)
            assert stage.decode_tokens == (NEW_TOKENS - 1) * len(lengths)
            assert stage.busy_s > 0


def test_a_call_that_is_left_gives_up_what_is_in_flight(
    session: Session, greedy: list[list[int]]
) -> None:
    results = session.run(MANY)
    next(results)
    results.close()
    assert list(results) == []
    assert tokens_of(session.run(ROWS)) == greedy
    for result in session.run(MANY):
        assert result.error is None
        break
    assert tokens_of(session.run(ROWS)) == greedy


def test_the_next_call_ends_the_one_before_which_says_so(
    session: Session, greedy: list[list[int]]
) -> None:
    """As in a notebook, where a traceback keeps the results of a loop that was left."""
    waiting, left = session.run(ROWS), session.run(MANY)
    next(left)
    assert tokens_of(waiting) == greedy
    with pytest.raises(SpecError, match="ended after 1 of them, as another run of the session"):
        next(left)


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("the file has gone")])
def test_a_call_that_fails_leaves_the_stages_to_the_next(
    session: Session, greedy: list[list[int]], error: Any
) -> None:
    def rows() -> Iterator[list[int]]:
        yield from MANY
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        list(session.run(rows()))
    assert tokens_of(session.run(ROWS)) == greedy


def test_what_cannot_be_run_is_refused_and_harms_nothing(
    session: Session, greedy: list[list[int]]
) -> None:
    with pytest.raises(SpecError, match="room for 8"):
        session.run(ROWS, max_new_tokens=9)
    with pytest.raises(SpecError, match=r"'temprature'; nearest: temperature"):
        session.run(ROWS, temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="vocabulary ends"):
        session.run(ROWS, logit_bias={10**6: 1.0})
    with pytest.raises(SpecError, match="temperature has no effect beside sampling"):
        session.run(ROWS, Sampling(), temperature=0.5)
    assert [result.error is not None for result in session.run([[]])] == [True]
    assert tokens_of(session.run(ROWS)) == greedy


def test_a_stage_that_dies_between_two_calls_is_started_again(
    session: Session, plan: Plan, greedy: list[list[int]], faults: list[RecoveryEvent]
) -> None:
    group = session._shared.stages.of(plan.spec)
    before = len(faults)
    ray.kill(group.stages[1].actor)
    assert tokens_of(session.run(ROWS)) == greedy
    assert [fault.stage for fault in faults[before:]] == [1]
    assert session._shared.stages.of(plan.spec) is group


def test_it_can_be_iterated_beside_other_tasks(session: Session, greedy: list[list[int]]) -> None:
    async def both() -> tuple[list[Any], int]:
        turns = 0
        found = []
        async for result in session.run(ROWS):
            found.append(result)
            await asyncio.sleep(0)
            turns += 1
        async with session.run(MANY) as left:
            async for _ in left:
                break
        return found, turns

    found, turns = asyncio.run(both())
    assert turns == len(ROWS)
    assert tokens_of(found) == greedy
    assert tokens_of(session.run(ROWS)) == greedy


@pytest.mark.rare
def test_twenty_calls_leave_nothing_behind(session: Session) -> None:
    """Threads, open files, processes and actors; one in two calls is left half-way."""
    me = psutil.Process()

    actors = NewActors()

    def held() -> tuple[int, int, int]:
        return me.num_threads(), me.num_fds(), len(me.children(recursive=True))

    def call(number: int) -> None:
        results = session.run(ROWS, seed=number)
        next(results)
        if number % 2:
            assert len(list(results)) == len(ROWS) - 1
        else:
            results.close()

    for number in range(4):  # Ray starts helpers of its own when they are first needed
        call(number)
    before = held()
    for number in range(RUNS):
        call(number)
    assert all(now <= then for now, then in zip(held(), before, strict=True)), (before, held())
    assert actors.become(0)


def test_stages_that_are_lost_for_good_are_made_anew(
    one_stage: Plan, greedy: list[list[int]]
) -> None:
    """Also those of a session that is not a context manager, which starts with its first run."""
    actors = NewActors()
    session = one_stage.session(retries=0)
    assert actors.become(0)
    results = session.run(MANY)
    next(results)
    ray.kill(session._shared.stages.of(one_stage.spec).stages[0].actor)
    with pytest.raises(StageLostError):
        list(results)
    assert tokens_of(session.run(ROWS)) == greedy
    assert actors.become(1)
    session.close()
    session.close()
    assert actors.become(0)
    with pytest.raises(SpecError, match="session is closed"):
        session.run(ROWS)


def test_it_is_freed_however_its_body_ends(one_stage: Plan) -> None:
    actors = NewActors()
    begun: list[Any] = []

    def fail() -> None:
        with one_stage.session() as session:
            begun.append(session.run(MANY))
            next(begun[0])
            assert actors.become(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert actors.become(0)
    with pytest.raises(SpecError, match="or it was closed"):
        next(begun[0])


@pytest.mark.parametrize("policy", ["orca", "s3"])
def test_under_other_policies_calls_are_the_same(
    one_stage: Plan, greedy: list[list[int]], policy: Any
) -> None:
    async def calls() -> list[list[int]]:
        async with one_stage.session(policy=policy) as session:
            left = session.run(MANY)
            await anext(left)
            await left.aclose()
            return tokens_of([result async for result in session.run(ROWS)])

    assert asyncio.run(calls()) == greedy


class LostGroup:
    """Stages whose devices are gone for good, in the place of a `StageGroup`."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> LostGroup:
        raise DeviceLostError(f"{self._device} is gone", (1,), (self._device,))

    def unfinished(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_plan_for_what_is_left_stays_that_of_the_session(
    plan: Plan, one_stage: Plan, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """The next call begins with it; where there is none, it tries the whole plan again."""
    made: list[Any] = []
    again = replace(one_stage.spec, origin=None)
    session = plan.session()
    real = session._shared.stages._make

    def make(spec: Any) -> Any:
        made.append(spec)
        return LostGroup("b") if spec is plan.spec else real(spec)

    def replanned(spec: Any, lost: DeviceLostError, folder: str | None) -> Any:
        if not has_room:
            raise lost
        return again

    monkeypatch.setattr(session._shared.stages, "_make", make)
    monkeypatch.setattr("llmpq.run.run.replan_after_loss", replanned)
    if has_room:
        assert len(list(session.run(ROWS))) == len(list(session.run(ROWS))) == len(ROWS)
        assert made == [plan.spec, again]
        assert session.spec is again
    else:
        for _ in range(2):
            with pytest.raises(DeviceLostError):
                list(session.run(ROWS))
        assert made == [plan.spec, plan.spec]
    session.close()
