"""What a stage notes of each request, by hand-made micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from actors.messages import Admission, HeadId, MicroBatch, Request, Sampling
from actors.processes.request_log import PhaseTimes, RequestLog
from tests.actors.batches import batch_in_ranges


def admitting(batch: MicroBatch, **names: str) -> MicroBatch:
    """The batch with requests of these names by slot, `s0` the first one."""
    made = [
        Admission.of(int(slot[1:]), Request(name, (1, 2), 5, Sampling()))
        for slot, name in names.items()
    ]
    return replace(batch, admitted=tuple(made))


def test_a_requests_micro_batches_are_added_up_by_phase() -> None:
    log = RequestLog()
    log.add(admitting(batch_in_ranges([0, 1], [0, 0], [4, 6]), s0="a", s1="b"), 10.0, 11.0)
    log.add(batch_in_ranges([0, 1], [4, 6], [1, 3]), 12.0, 12.5)  # the rest of b's prompt
    log.add(batch_in_ranges([0], [5], [1]), 14.0, 14.25)
    assert log.take(["b", "a", "none"]) == {
        "b": {"prefill": PhaseTimes(10.0, 12.5, 1.5, 2, 9)},
        "a": {
            "prefill": PhaseTimes(10.0, 11.0, 1.0, 1, 4),
            "decode": PhaseTimes(12.0, 14.25, 0.75, 2, 2),
        },
    }
    assert log.take(["a", "b"]) == {}
    log.add(batch_in_ranges([0], [6], [1]), 15.0, 16.0)  # a late one of what was given out
    assert log.take(["a"]) == {}


def test_the_last_token_of_a_prompt_that_comes_alone_is_not_decoded() -> None:
    log = RequestLog()
    part = admitting(batch_in_ranges([0], [0], [3]), s0="a")
    log.add(replace(part, samples=np.array([False])), 1.0, 2.0)
    log.add(batch_in_ranges([0], [3], [1]), 2.0, 3.0)
    log.add(batch_in_ranges([0], [4], [1]), 3.0, 4.0)
    times = log.take(["a"])["a"]
    assert {phase: each.tokens for phase, each in times.items()} == {"prefill": 4, "decode": 1}


def test_a_slot_is_its_next_requests() -> None:
    log = RequestLog()
    log.add(admitting(batch_in_ranges([0], [0], [2]), s0="a"), 1.0, 2.0)
    log.add(admitting(batch_in_ranges([0], [0], [3]), s0="b"), 3.0, 4.0)
    head = replace(batch_in_ranges([0], [0], [9]))
    admitted = Admission.of(0, Request(HeadId("a"), (1, 2), 1, Sampling()))
    log.add(replace(head, admitted=(admitted,)), 5.0, 6.0)  # of prompts that begin alike
    found = log.take(["a", "b"])
    assert {name: times["prefill"].tokens for name, times in found.items()} == {"a": 2, "b": 3}


def test_a_request_that_goes_on_is_one_with_its_beginning_and_one_of_its_name_is_not() -> None:
    log = RequestLog()
    first = admitting(batch_in_ranges([0], [0], [2]), s0="a")
    log.add(first, 1.0, 2.0)
    again = replace(first.admitted[0], generated=(5,))
    log.add(replace(batch_in_ranges([1], [0], [3]), admitted=(replace(again, slot=1),)), 5.0, 6.0)
    assert log.take(["a"]) == {"a": {"prefill": PhaseTimes(1.0, 6.0, 2.0, 2, 5)}}
    log.add(first, 7.0, 8.0)
    log.add(first, 9.0, 10.0)  # of a later run
    assert log.take(["a"]) == {"a": {"prefill": PhaseTimes(9.0, 10.0, 1.0, 1, 2)}}


def test_what_nobody_asks_for_is_forgotten() -> None:
    log = RequestLog(most=3)
    for number in range(10):
        log.add(admitting(batch_in_ranges([0], [0], [2]), s0=str(number)), number, number + 0.5)
    assert list(log.take([str(number) for number in range(10)])) == ["7", "8", "9"]


def test_times_are_shifted_to_another_clock() -> None:
    assert PhaseTimes(10.0, 12.0, 1.0, 3, 4).shifted(2.5) == PhaseTimes(7.5, 9.5, 1.0, 3, 4)
