"""Where the requests of a run are, and what is told of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from actors.handover.ledger import DividedLedger, Load, PrefillPace
from actors.messages import FinishReason, HostKey, Progress, Request, Sampling
from actors.schedule.scheduler import QueueSizes
from planner.scheduling import RequestSchedule
from quant.common.errors import SpecError

PROMPT, NEW_TOKENS = (3, 4, 5), 7
SCHEDULE = RequestSchedule("waa-c", 3, 12, 1, 2, 2, float(len(PROMPT)))
PREFILL = QueueSizes(9, 2, 2, 6, parked_tokens=100)
DECODE = QueueSizes(13, 2, 7, 12, "exegpt", kv_tokens=200, parked_tokens=100)


def request(name: str, new_tokens: int = NEW_TOKENS, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(name, prompt, new_tokens, Sampling(), expected_tokens=4)


def first(name: str, token: int = 9, reason: FinishReason = "length") -> Progress:
    return Progress(name, (token,), reason)


def begun(*requests: Request) -> DividedLedger:
    """A ledger whose requests were all begun."""
    ledger = DividedLedger(PrefillPace(SCHEDULE, 2, PREFILL, DECODE), count(100))
    for each in requests:
        ledger.add(each)
    while any(ledger.begin()):
        pass
    assert not ledger.has_any("waiting")
    return ledger


def test_a_request_is_prefilled_for_one_token_and_goes_on_with_it() -> None:
    ledger = DividedLedger(PrefillPace(SCHEDULE, 2, PREFILL, DECODE), count(100))
    ledger.add(request("a"))
    (sent,), _ = ledger.begin()
    expected = replace(request("a"), max_new_tokens=1, expected_tokens=None, host_key=HostKey(100))
    assert sent == expected
    assert ledger.load() == Load(1, 0, 0, len(PROMPT), len(PROMPT) + NEW_TOKENS)
    assert ledger.prefilled([first("a")]) == ([Progress("a", (9,))], ("a",), [])
    assert ledger.load() == Load(0, 1, 0, len(PROMPT), len(PROMPT) + NEW_TOKENS)
    (going_on,) = ledger.moved(["a"], {100}, epoch=3)
    assert going_on == replace(request("a"), generated=(9,), host_key=HostKey(100, 3))
    assert ledger.decoded([Progress("a", (8, 7))]) == (Progress("a", (8, 7)),)
    assert ledger.load().host_tokens == 0, "it is restored"
    assert ledger.tokens == {"a": 3}
    assert ledger.unfinished == (replace(request("a"), generated=(9, 8, 7)),)
    ledger.decoded([Progress("a", (6,), "stop")])
    assert (len(ledger), ledger.unfinished, ledger.tokens) == (0, (), {})


def test_what_did_not_arrive_goes_on_without_a_key() -> None:
    ledger = begun(request("a"), request("b"))
    ledger.prefilled([first("a"), first("b")])
    a, b = ledger.moved(["a", "b"], {101}, epoch=1)
    assert (a.host_key, b.host_key) == (None, HostKey(101, 1))
    assert ledger.load().host_tokens == len(PROMPT)


def test_a_request_may_end_with_its_first_token() -> None:
    """By its own limit, by the end of the text, or by an error; what was kept of it goes."""
    ledger = begun(request("limit", 1), request("text"), request("error"))
    assert ledger.load().host_tokens == 2 * len(PROMPT), "one needs none"
    broken = Progress("error", (), "error", "it killed stages")
    came = [first("limit"), first("text", reason="stop"), broken]
    assert ledger.prefilled(came) == (came, (), [101, 102])
    assert len(ledger) == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(request("a"), generated=(1, 2)),
        request("a", 2, (3,) * 6),  # too long for the stages that prefill
        request("a", 10),  # too long for those that decode
        request("a", 0),
    ],
)
def test_what_the_stages_that_prefill_cannot_do_goes_to_the_others_as_it_is(
    other: Request,
) -> None:
    ledger = DividedLedger(PrefillPace(SCHEDULE, 2, PREFILL, DECODE), count())
    ledger.add(other)
    assert ledger.begin() == ([], [other])
    assert ledger.load().decoding == 1


def test_requests_that_are_given_up_are_forgotten_wherever_they_are() -> None:
    """What may be kept of one that is being prefilled is unwanted once a later one comes back."""
    names = ("prefilling", "later", "moving", "decoding")
    ledger = begun(*map(request, names))
    ledger.add(request("waiting"))
    _, moving, _ = ledger.prefilled([first("decoding"), first("moving")])
    assert moving == ("decoding", "moving")
    ledger.moved(["decoding"], {103}, epoch=1)
    for name in ("waiting", "prefilling", "moving", "decoding"):
        assert ledger.cancel(name) == name
    assert ledger.cancel("decoding") is None
    assert ledger.moved(["moving"], {102}, epoch=1) == ()
    assert ledger.decoded([Progress("decoding", (1,))]) == ()
    assert ledger.begin() == ([], [])
    told, _, unwanted = ledger.prefilled([first("prefilling"), first("later")])
    assert (told, unwanted) == ([Progress("later", (9,))], [100])
    assert [each.custom_id for each in ledger.unfinished] == ["later"]
    with pytest.raises(SpecError, match="custom_id 'later' is in the run twice"):
        ledger.add(request("later"))


def test_those_who_left_while_one_was_prefilled_are_expected_to_leave_again() -> None:
    ledger = begun(*(request(str(i)) for i in range(5)))
    ledger.prefilled([first(str(i)) for i in range(4)])
    ledger.moved([str(i) for i in range(4)], (), 1)
    ledger.decoded([Progress("0", (1,), "length"), Progress("1", (1,), "stop")])
    assert ledger.load().leaving == 0
    ledger.prefilled([first("4")])
    assert ledger.load().leaving == 2


def test_the_stages_that_decode_are_told_how_long_ago_a_prefill_began() -> None:
    now_s = [100.0]
    pace = PrefillPace(SCHEDULE, 2, PREFILL, DECODE)
    ledger = DividedLedger(pace, count(), clock=lambda: now_s[0])
    for name in ("known", "not"):
        ledger.add(request(name))
    ledger.begin()
    told, _, _ = ledger.prefilled([replace(first("known"), age_s=4.0), first("not")])
    assert told == [Progress("known", (9,)), Progress("not", (9,))]
    now_s[0] = 101.5
    assert [each.age_s for each in ledger.moved(["known", "not"], (), 1)] == [5.5, None]
