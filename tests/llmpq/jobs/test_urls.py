"""Rows behind URLs: found, streamed over lost connections, and refused where they change."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmpq.jobs.inputs import JobInput
from llmpq.rows.row import BadRow, Row
from quant.common import url_files
from quant.common.errors import InputError
from tests.llmpq.object_server import ObjectServer, object_server

LINES = [{"custom_id": f"r{n}", "prompt": f"prompt {n} " * 9} for n in range(20_000)]
CONTENT = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
IDS = [str(line["custom_id"]) for line in LINES]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have retries not wait, and several requests read a file of a few megabytes."""
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    monkeypatch.setattr(url_files, "BLOCK_BYTES", 2**18)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as started:
        started.objects["/data/rows.jsonl"] = CONTENT
        yield started


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()


def ids_of(*named: str) -> list[str]:
    return [placed.row.custom_id for placed in JobInput.find(named).rows()]


def rows_of(*named: str) -> list[Row | BadRow]:
    return [placed.row for placed in JobInput.find(named).rows()]


def parquet_of(count: int) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(LINES[:count]), sink)
    return sink.getvalue()


def test_folders_globs_and_partitions(memory: Any) -> None:
    lines = CONTENT.splitlines(keepends=True)
    memory.pipe_file("/data/day=1/a.jsonl", lines[0])
    memory.pipe_file("/data/day=2/a.jsonl.gz", gzip.compress(lines[1]))
    memory.pipe_file("/data/day=2/b.parquet", parquet_of(3))
    memory.pipe_file("/data/day=2/notes.txt", b"no rows")
    assert ids_of("memory://data/day=2/") == ids_of("memory://data/day=2") == ["r1", *IDS[:3]]
    assert ids_of("memory://data/day=*/a.*") == IDS[:2]
    assert ids_of("memory://data/**/a.jsonl") == ["r0"]
    assert JobInput.find(["memory://data/day=*/a.*"]).names == ("day=1/a.jsonl", "day=2/a.jsonl.gz")


def test_the_same_rows_as_of_a_local_file(tmp_path: Any, server: ObjectServer) -> None:
    """Generated ids and names of bad lines too, which go by files' names."""
    lines = b'{"prompt": "x"}\n{\n{"prompt": "x"}\n[1]\n'
    (tmp_path / "few.jsonl").write_bytes(lines)
    server.objects["/few.jsonl"] = lines
    expected = rows_of(str(tmp_path / "few.jsonl"))
    assert rows_of(f"file://{tmp_path}/few.jsonl") == expected
    assert rows_of(server.url("/few.jsonl")) == expected
    assert rows_of(server.url("/few.jsonl?")) == expected


@pytest.mark.parametrize("has_ranges", [True, False])
def test_faults_lose_and_double_nothing(server: ObjectServer, has_ranges: bool) -> None:
    """Whether a stream goes on at its offset, or is begun again and skips what was read."""
    server.has_ranges = has_ranges
    chance = random.Random(5)
    for _ in range(3):
        faults = chance.choices(("cut", "cut", 503, 429, 500), k=9)
        server.faults = [*faults[:4], None, *faults[4:]]
        assert ids_of(server.url("/data/rows.jsonl")) == IDS
        assert not server.faults


def test_parquet_is_read_in_parts(server: ObjectServer) -> None:
    server.objects["/rows.parquet"] = parquet_of(100)
    server.faults = ["cut", 503]
    assert ids_of(server.url("/rows.parquet")) == IDS[:100]
    server.objects["/data/more.jsonl"] = b'{"custom_id": "more", "prompt": "x"}\n'
    assert ids_of(server.url("/data/*.jsonl")) == ["more", *IDS]


def test_a_lasting_fault_ends_after_as_many_tries(server: ObjectServer) -> None:
    server.faults = [503] * 100
    with pytest.raises(InputError, match=r"rows\.jsonl: .*503.* \(6 tries\)"):
        ids_of(server.url("/data/rows.jsonl"))
    assert len(server.faults) == 100 - url_files.TRIES
    server.faults = [403] * 100
    with pytest.raises(InputError, match=r"rows\.jsonl: no access with the credentials"):
        ids_of(server.url("/data/rows.jsonl"))
    assert len(server.faults) == 99


@pytest.mark.parametrize(
    ("change", "has_ranges"),
    [
        (CONTENT[:-200], True),
        (CONTENT.upper(), True),
        (CONTENT + CONTENT[:90], False),
        pytest.param(CONTENT[:-200], False, marks=pytest.mark.rare),
        pytest.param(CONTENT.upper(), False, marks=pytest.mark.rare),
        pytest.param(CONTENT + CONTENT[:90], True, marks=pytest.mark.rare),
    ],
)
def test_a_change_in_the_middle_is_told(
    server: ObjectServer, change: bytes, has_ranges: bool
) -> None:
    server.has_ranges = has_ranges
    url = server.url("/data/rows.jsonl")
    rows = JobInput.find([url]).rows()
    next(rows)
    server.faults = ["cut"] * 2
    server.objects["/data/rows.jsonl"] = change
    with pytest.raises(InputError, match=f"input {url} changed while it was read"):
        list(rows)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("memory://data/none.jsonl", "no such file, or no such bucket"),
        ("memory://data/*.csv", "no file of that name there"),
        ("memory://data/", r"no file of that \.jsonl, .* there"),
        ("nosuch://data/in.jsonl", "Protocol not known: nosuch; name a path, or s3://"),
        ("http://127.0.0.1:1/in.jsonl", r"Cannot connect .* \(6 tries\)"),
    ],
)
def test_what_cannot_be_read_is_told_by_its_url(memory: Any, url: str, told: str) -> None:
    memory.pipe_file("/data/notes.txt", b"no rows")
    with pytest.raises(InputError, match=told) as raised:
        JobInput.find([url])
    assert url in str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "client", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs")]
)
def test_a_client_that_is_missing_is_named(
    scheme: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, client, None)  # as where it is not installed
    with pytest.raises(InputError, match=rf"pip install 'llmpq\[{extra}\]'"):
        JobInput.find([f"{scheme}://bucket/in.jsonl"])
