"""Links meet without anything that listens for it, and only with those who know the secret."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import ray  # noqa: F401  (brings psutil)
import torch

# isort: split
import psutil

from actors.transport.gloo_links import Links
from actors.transport.rendezvous import BoardKeeper, LocalBoard, Rendezvous
from quant.common.errors import DeviceError
from tests.actors.linking import HOST, meet


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
    rendezvous = Rendezvous(("127.0.0.1", "127.0.0.2"), 20.0)
    before = listening()
    links = meet(2, rendezvous=rendezvous)
    assert len(links) == 2
    assert {address for address, _ in listening() - before} == set(rendezvous.hosts)


def test_who_does_not_know_the_secret_is_not_linked() -> None:
    """A stranger may have come first under a neighbour's number."""
    board = LocalBoard(2)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(Links, Rendezvous((HOST,) * 2, 20.0), i, board) for i in range(2)]
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
    links[1]._group.recv([buffer], 0, 0).wait(timedelta(seconds=20))
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
