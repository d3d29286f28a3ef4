"""Messages as bytes, and links between two processes' ends, which here are threads of one.

They meet without anything that listens for it, and only with those who know the secret.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import ray  # noqa: F401  (brings psutil)
import torch

# isort: split
import psutil

from actors.logprobs import NO_TOKEN, LogprobRows
from actors.messages import (
    Admission,
    MicroBatch,
    Move,
    Sampled,
    Sampling,
    TokenRange,
)
from actors.transport.gloo_links import FRAME_BYTES, Links, LocalBoard
from actors.transport.message_format import decode, encode, message_bytes
from actors.transport.pipelines import BoardKeeper
from actors.transport.rendezvous import Rendezvous
from quant.common.errors import DeviceError, StageLostError
from tests.actors.linking import HOST, meet


def a_batch(requests: int, tokens: int, custom_id: str = "täg\n") -> MicroBatch:
    sampling = Sampling(
        0.7,
        5,
        0.9,
        -3,
        None,
        ("ende", "\0"),
        True,
        0.1,
        1.1,
        0.5,
        -0.5,
        {7: -100.0, 12: 0.25},
        (3, 2**40),
        6,
    )
    return MicroBatch(
        slots=np.arange(requests) * 2,
        starts=np.arange(requests) % 3,
        counts=np.full(requests, tokens),
        begins=np.arange(requests)[::-1] * 99 + 2**40,
        admitted=tuple(
            Admission(
                2 * i, f"{custom_id}{i}", 9, sampling, (4, 4), (1, 2**40),
                TokenRange((requests - 1 - i) * 99 + 2**40, 99),
            )
            for i in range(requests // 2)
        ),
        moves=tuple(Move(i, 3 * i, 2**40) for i in range(requests // 3)),
        samples=np.arange(requests) % 2 == 1,
        scored=np.arange(requests) % (tokens + 1),
    )  # fmt: skip


def assert_equal(found: MicroBatch, wanted: MicroBatch) -> None:
    assert found.slots.tolist() == wanted.slots.tolist()
    assert found.starts.tolist() == wanted.starts.tolist()
    assert found.counts.tolist() == wanted.counts.tolist()
    assert found.begins.tolist() == wanted.begins.tolist()
    assert found.sampled_rows.tolist() == wanted.sampled_rows.tolist()
    assert found.admitted == wanted.admitted
    assert found.moves == wanted.moves
    assert found.head_rows.tolist() == wanted.head_rows.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("requests", "tokens", "width"), [(1, 1, 1), (3, 5, 7), (16, 1, 48)])
def test_a_batch_comes_out_as_it_went_in(
    dtype: torch.dtype, requests: int, tokens: int, width: int
) -> None:
    batch = a_batch(requests, tokens)
    hidden = torch.randn(requests * tokens, width).to(dtype)
    message = encode(batch, hidden)
    assert message.dtype == torch.uint8
    assert message_bytes(message) == len(message)
    found = decode(torch.cat([message, torch.full((99,), 7, dtype=torch.uint8)]))
    assert not isinstance(found, Sampled)
    assert_equal(found[0], batch)
    assert found[1].dtype == dtype
    assert torch.equal(found[1], hidden)


def test_strided_hidden_states_and_sampled_tokens() -> None:
    batch = a_batch(4, 2)
    hidden = torch.randn(16, 6)[::2].T.contiguous().T
    found = decode(encode(batch, hidden))
    assert not isinstance(found, Sampled)
    assert torch.equal(found[1], hidden)
    sampled = Sampled(np.array([5, 2**40, 0, 1]), (None, "stop", "length", "error"))
    answer = decode(encode(batch, sampled))
    assert isinstance(answer, Sampled)
    assert answer.token_ids.tolist() == sampled.token_ids.tolist()
    assert answer.finish_reasons == sampled.finish_reasons


def test_log_probabilities_come_out_as_they_went_in() -> None:
    """Of the rows that ask; where none does, the message is that of a batch that cannot ask."""
    batch = a_batch(4, 2)
    rows = LogprobRows(
        np.array([0, 2, 3]),
        np.array([-0.1, -np.inf, -30.5], dtype=np.float32),
        np.array([1, 2**40, 7]),
        np.array([[5, 2**40], [1, NO_TOKEN], [NO_TOKEN] * 2]),
        np.array([[-0.1, -7], [0, -3], [-1, -2]], dtype=np.float32),
    )
    plain = Sampled(np.array([5, 2**40, 0, 1]), (None, "stop", "length", "error"))
    message = encode(batch, replace(plain, logprobs=rows))
    assert message_bytes(message) == len(message)
    frame = torch.cat([message, torch.full((99,), 7, dtype=torch.uint8)])
    found = decode(frame)
    frame.zero_()  # it is used for the next message
    assert isinstance(found, Sampled)
    assert found.token_ids.tolist() == plain.token_ids.tolist()
    assert found.finish_reasons == plain.finish_reasons
    assert found.logprobs is not None
    assert found.logprobs.by_row() == rows.by_row()
    assert len(encode(batch, plain)) == 64 + 4 * 16
    asking = replace(batch, admitted=tuple(replace(a, top_logprobs=3) for a in batch.admitted))
    hidden = torch.zeros(8, 1)
    sent = decode(encode(asking, hidden))
    assert not isinstance(sent, Sampled)
    assert_equal(sent[0], asking)
    assert b"logprobs" in encode(asking, hidden).numpy().tobytes()
    assert b"logprobs" not in encode(batch, hidden).numpy().tobytes()


@pytest.fixture
def linked() -> tuple[Links, Links]:
    first, second = meet(2)
    return first, second


def test_messages_arrive_in_order_whatever_their_size(linked: tuple[Links, Links]) -> None:
    """The sender is ahead of the receiver, and waits when it is too far; some need many frames."""
    sender, receiver = linked[0].sender(1), linked[1].receiver(0, 120.0)
    sizes = [1, 1000, 3 * 10**6, 5, 1, 2 * 10**6, 1, 10]
    tensors = [torch.randn(2, size) for size in sizes]
    batches = [a_batch(2, 1, f"{i}-") for i in range(len(sizes))]
    assert max(t.nbytes for t in tensors) > 3 * FRAME_BYTES
    with ThreadPoolExecutor(1) as pool:
        sent = [
            pool.submit(sender.send, encode(*pair)) for pair in zip(batches, tensors, strict=True)
        ]
        for batch, tensor in zip(batches, tensors, strict=True):
            found = decode(receiver.receive())
            assert not isinstance(found, Sampled)
            assert_equal(found[0], batch)
            assert torch.equal(found[1], tensor)
        assert [each.result() for each in sent] == [None] * len(sizes)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_messages_of_about_a_frame(linked: tuple[Links, Links], extra: int) -> None:
    batch = a_batch(1, 1)
    room = FRAME_BYTES - len(encode(batch, torch.empty(1, 0, dtype=torch.float16)))
    hidden = torch.randn(1, room // 2 + extra).half()
    receiver, sender = linked[0].receiver(1, 120.0), linked[1].sender(0)
    sender.send(encode(batch, hidden))
    found = decode(receiver.receive())
    assert not isinstance(found, Sampled)
    assert torch.equal(found[1], hidden)


def test_a_silent_peer_is_lost_when_the_time_is_up(linked: tuple[Links, Links]) -> None:
    with pytest.raises(StageLostError, match="stage 1 cannot be reached"):
        linked[0].receiver(1, 0.05).receive()


# isort: split


def listening() -> set[tuple[str, int]]:
    """Addresses and ports of this process."""
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


GREETING = bytes.fromhex("00 CEF7853C 0D 01020304")
"""What a client of torch's TCPStore says first: validate, a magic number, ping, a number that comes
back (torch/csrc/distributed/c10d/TCPStoreBackend.hpp).
"""


def answer_of_a_store(address: str, port: int, limit_s: float = 0.2) -> bytes:
    with socket.create_connection((address, port)) as client:
        client.settimeout(limit_s)
        client.sendall(GREETING)
        try:
            return client.recv(4)
        except TimeoutError:
            return b""


@pytest.mark.parametrize("ends", [2, 3])
def test_ends_on_one_node_listen_on_loopback_alone_and_have_no_store_for_strangers(
    ends: int,
) -> None:
    before = listening()
    links = meet(ends)
    found = listening() - before
    assert len(found) == len(links), "a socket of gloo's for each end, and no other"
    assert {address for address, _ in found} == {"127.0.0.1"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answer = answer_of_a_store("127.0.0.1", store.port, limit_s=60.0)
    assert answer == GREETING[-4:], "as they did before"
    assert [answer_of_a_store(*each) for each in found] == [b""] * ends


def test_ends_on_several_nodes_listen_on_the_addresses_of_their_nodes() -> None:
    rendezvous = Rendezvous(("127.0.0.1", "127.0.0.2"), 120.0)
    before = listening()
    links = meet(2, rendezvous=rendezvous)
    assert len(links) == 2
    assert {address for address, _ in listening() - before} == set(rendezvous.hosts)


def test_who_does_not_know_the_secret_is_not_linked() -> None:
    """A stranger may have come first under a neighbour's number."""
    board = LocalBoard(2)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(Links, Rendezvous((HOST,) * 2, 120.0), i, board) for i in range(2)]
    for index, end in enumerate(ends):
        with pytest.raises(DeviceError, match=f"stage {1 - index} is not the one that was invited"):
            end.result()


def test_strangers_at_the_door_do_not_keep_the_others_from_meeting() -> None:
    before = listening()
    links = meet(2)
    door = (listening() - before).pop()
    strangers = [socket.create_connection(door) for _ in range(3)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(number.to_bytes(8, "little") + b"\xff" * 64)
    links[0].sender(1).send(torch.full((100,), 7, dtype=torch.uint8))
    buffer = torch.zeros(100, dtype=torch.uint8)
    links[1]._group.recv([buffer], 0, 0).wait(timedelta(seconds=120))
    assert buffer.tolist() == [7] * 100
    for stranger in strangers:
        stranger.close()


def test_nobody_at_the_rendezvous_is_an_error() -> None:
    rendezvous = Rendezvous((HOST, HOST), 0.1)
    with pytest.raises(DeviceError, match=r"stage 0 on 127.0.0.1 did not meet"):
        Links(rendezvous, 0, LocalBoard(2))


def test_the_board_is_small_and_nothing_on_it_is_overwritten() -> None:
    board = LocalBoard(2)
    board.put("0/0", b"first")
    with pytest.raises(DeviceError, match="each told once"):
        board.put("0/0", b"second")
    with pytest.raises(DeviceError, match="at most 4608 bytes, and one has 5000"):
        board.put("0/1", bytes(5000))
    for number in range(15):
        board.put(f"more {number}", b"")
    with pytest.raises(DeviceError, match="at most 16 values"):
        board.put("one more", b"")
    assert board.read(["0/0", "0/1"]) == {"0/0": b"first"}


def test_the_board_is_for_its_rendezvous_alone() -> None:
    keeper, old, new = BoardKeeper(), Rendezvous((HOST,), 1.0), Rendezvous((HOST,), 1.0)
    for rendezvous in (old, new):
        keeper.open_rendezvous(rendezvous)
        keeper.board_put(rendezvous.secret, "key", rendezvous.secret)
    assert keeper.board_read(new.secret, ["key"]) == {"key": new.secret}
    for other in (old.secret, b""):
        with pytest.raises(DeviceError, match="over"):
            keeper.board_put(other, "key", b"")
    keeper.close_rendezvous()
    with pytest.raises(DeviceError, match="over"):
        keeper.board_read(new.secret, ["key"])
    assert new.secret.hex() not in repr(new)
    assert repr(new.secret) not in repr(new)
