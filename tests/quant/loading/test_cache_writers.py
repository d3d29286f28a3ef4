"""Two processes that write to one cache."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import warnings
from pathlib import Path
from typing import Any

import torch

from quant.checkpoint.tensor_files import reserved_bytes
from quant.loading.cache_folder import CacheKey, NewEntry, ShardCache

FORK = multiprocessing.get_context("fork")  # another process would import torch for seconds


def write(folder: Path, name: str, limit: int, ready: Any, hits: Any) -> None:
    warnings.simplefilter("ignore")
    generator = random.Random(name)
    ready.wait()
    for _ in range(15):
        cache = ShardCache(folder, limit)
        for number in generator.sample(range(12), 3):
            key = CacheKey("layer", str(number))
            tensor = torch.full((4000 + number,), number)
            found = cache.restore(key, lambda cached: cached.read("x"))
            if found is None:
                cache.store(NewEntry(key, lambda t=tensor: [("x", t)], {}, tensor.nbytes))
            else:
                hits.value += 1
                assert torch.equal(found, tensor)


def bytes_in(folder: Path) -> int:
    """The bytes of all files at one moment: nobody makes room or renames meanwhile."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # a file that a faster writer made needless
            return sum(item.stat().st_size for item in os.scandir(folder))
    return 0


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """Every layer that is read is the right one, and the limit holds at every moment."""
    limit = 8 * reserved_bytes(8 * 4012)
    ready, hits = FORK.Barrier(3), [FORK.Value("i", 0) for _ in range(2)]
    writers = [
        FORK.Process(target=write, args=(tmp_path, name, limit, ready, found))
        for name, found in zip(("one", "two"), hits, strict=True)
    ]
    for writer in writers:
        writer.start()
    ready.wait(60)
    sizes: list[int] = []
    while any(writer.is_alive() for writer in writers):
        sizes.append(bytes_in(tmp_path))
        writers[0].join(0.01)  # in which the lock is theirs
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert all(found.value for found in hits)
    sizes.append(bytes_in(tmp_path))
    assert limit // 2 < max(sizes) <= limit
    assert not list(tmp_path.glob(".*.part"))
