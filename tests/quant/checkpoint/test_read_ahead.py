from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from quant.checkpoint.read_ahead import FileRange, ReadAhead, is_cached

CHUNK = 4 << 20
WINDOW = 3 * CHUNK


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file of 16 chunks that takes no disk."""
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.truncate(16 * CHUNK)
    return path


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_reads_in_order_and_no_further_than_the_window(big: Path) -> None:
    """The reader stands still at the window's end until the next range is waited for."""
    ranges = [FileRange(big, i * 2 * CHUNK, (i + 1) * 2 * CHUNK) for i in range(8)]
    allowed, seen, violations = WINDOW, [], []
    at_limit = threading.Event()

    def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        seen.append(offset)
        if offset >= allowed:
            violations.append(offset)
        if offset + CHUNK >= allowed:
            at_limit.set()
        return os.preadv(descriptor, buffers, offset)

    with ReadAhead(ranges, WINDOW, read_into, lambda *_: False) as ahead:
        for file_range in ranges:
            assert at_limit.wait(30)
            at_limit.clear()
            allowed = min(16 * CHUNK, file_range.stop + WINDOW)
            if allowed == 16 * CHUNK == seen[-1] + CHUNK:
                at_limit.set()
            ahead.wait_for(file_range)
            assert seen[-1] + CHUNK >= file_range.stop
    assert seen == [i * CHUNK for i in range(16)]
    assert violations == []


def test_a_range_larger_than_the_window(big: Path) -> None:
    whole = FileRange(big, 5, 16 * CHUNK - 3)
    with ReadAhead([whole], 1) as ahead:
        ahead.wait_for(whole)
        ahead.wait_for(whole)
        ahead.wait_for(FileRange(big, 0, 1))  # not among the ranges: nothing to wait for
    assert readers() == []


def test_leaving_early_ends_the_reader(big: Path) -> None:
    ranges = [FileRange(big, 0, 8 * CHUNK), FileRange(big, 8 * CHUNK, 16 * CHUNK)]
    with pytest.raises(KeyboardInterrupt), ReadAhead(ranges, CHUNK):
        raise KeyboardInterrupt
    assert readers() == []


def test_what_cannot_be_read_is_told_to_whoever_waits_for_it(big: Path, tmp_path: Path) -> None:
    cut = FileRange(big, 15 * CHUNK, 17 * CHUNK)
    missing = FileRange(tmp_path / "missing", 0, 1)
    good = FileRange(big, 0, CHUNK)
    with ReadAhead([cut, missing, good], WINDOW, is_there=lambda *_: False) as ahead:
        ahead.wait_for(good)
        with pytest.raises(OSError, match="ends at byte"):
            ahead.wait_for(cut)
        with pytest.raises(FileNotFoundError):
            ahead.wait_for(missing)


@pytest.mark.parametrize("there", [True, False])
def test_what_is_in_memory_is_not_read_again(there: bool, big: Path) -> None:
    reads = []

    def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return os.preadv(descriptor, buffers, offset)

    whole = FileRange(big, 0, 16 * CHUNK)
    with ReadAhead([whole], WINDOW, read_into, lambda *_: there) as ahead:
        ahead.wait_for(whole)
    assert len(reads) == (0 if there else 16)


def test_a_file_that_ends_too_early_is_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    with path.open("rb") as file:
        assert not is_cached(file.fileno(), 0, 10_001)
        assert not is_cached(file.fileno(), 20_000, 30_000)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_reader_that_broke(big: Path) -> None:
    def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise RuntimeError("a fault of ours")

    ranges = [FileRange(big, 0, CHUNK), FileRange(big, CHUNK, 2 * CHUNK)]
    with ReadAhead(ranges, WINDOW, read_into, lambda *_: False) as ahead:
        for file_range in ranges:
            ahead.wait_for(file_range)
    assert readers() == []


def test_nothing_to_read() -> None:
    with ReadAhead([], WINDOW):
        pass
    assert readers() == []
