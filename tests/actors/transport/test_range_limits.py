"""Ranges, moves and parked tokens that a message tells of are held against the plan."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from actors.messages import (
    EVERY_KEY,
    Move,
    Park,
    Sampled,
    TokenRange,
)
from actors.transport import message_format
from actors.transport.message_format import decode
from quant.common.errors import StageLostError
from tests.actors.transport.made_messages import LIMITS, ROOM, a_batch, a_message


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (TokenRange(80, 2), "2 token slots from 80 on"),
        (TokenRange(79, 9), "9 token slots from 79 on"),
        (TokenRange(80, 49), "up to 83 of 128"),
    ],
)
def test_rooms_that_do_not_hold_their_request(room: TokenRange, said: str) -> None:
    admitted = (replace(a_batch().admitted[0], room=room),)
    with pytest.raises(StageLostError, match=said):
        decode(a_message(replace(a_batch(), admitted=admitted)), LIMITS)


@pytest.mark.parametrize(
    "move",
    [
        Move(-1, 0, 4),
        Move(0, -1, 4),
        Move(125, 0, 4),
        Move(0, 125, 4),
        Move(9, 0, 0),
        Move(0, 9, -1),
    ],
)
def test_moves_of_what_is_not_there(move: Move) -> None:
    with pytest.raises(StageLostError, match=rf"moves {move.tokens} tokens from {move.begin} to"):
        decode(a_message(replace(a_batch(), moves=(move,))), LIMITS)


PARKING = replace(LIMITS, parked_tokens=40)


def test_what_is_parked_restored_and_dropped_comes_out_as_it_went_in() -> None:
    batch = replace(
        a_batch(),
        sizes=np.array([ROOM, 12]),
        parks=(Park(7, 0, 16), Park(2**40, 96, 5)),
        restores=(Park(3, 80, 2),),
        keeps=(Park(4, 32, 7),),
        drops=(EVERY_KEY, 12),
    )
    found = decode(a_message(batch), PARKING)
    assert not isinstance(found, Sampled)
    for name in ("moves", "parks", "restores", "drops", "keeps"):
        assert getattr(found[0], name) == getattr(batch, name)
    assert found[0].sizes is not None
    assert found[0].sizes.tolist() == [ROOM, 12]
    plain = decode(a_message(), PARKING)
    assert not isinstance(plain, Sampled)
    assert plain[0].sizes is None


@pytest.mark.parametrize("park", [(-1, 0, 4), (0, -1, 4), (0, 125, 4), (0, 9, 0), (0, 9, 41)])
@pytest.mark.parametrize("field", ["parks", "restores", "keeps"])
def test_parked_tokens_that_there_cannot_be(field: str, park: tuple[int, int, int]) -> None:
    batch = replace(a_batch(), **{field: (Park(*park),)})  # type: ignore[arg-type]
    with pytest.raises(StageLostError, match=rf"parks {park[2]} tokens from {park[1]} on as"):
        decode(a_message(batch), PARKING)


def test_nothing_is_parked_where_no_host_memory_was_planned() -> None:
    with pytest.raises(StageLostError, match="and 0 may be parked"):
        decode(a_message(replace(a_batch(), parks=(Park(0, 0, 1),))), LIMITS)


def test_changes_that_there_are_not() -> None:
    message, arrays = a_message(), message_format._BATCH_ARRAYS
    first = message_format._PREFIX.size + 8 * 2 * arrays
    struct.pack_into("<q", message.numpy().data, first, 5)
    with pytest.raises(StageLostError, match="makes a change of kind 5"):
        decode(message, PARKING)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([16, 6], "do not hold their tokens"),
        ([16, 97], "do not hold their tokens, or are not in 128"),
        ([16, -7], "do not hold their tokens"),
        ([16, 2**62], "or are not in 128"),
        ([16, 49], "share token slots"),
        ([17, 12], "admits a request to 16 token slots from 80 on"),
    ],
)
def test_ranges_that_do_not_hold_their_request(sizes: list[int], said: str) -> None:
    with pytest.raises(StageLostError, match=said):
        decode(a_message(replace(a_batch(), sizes=np.array(sizes))), LIMITS)
