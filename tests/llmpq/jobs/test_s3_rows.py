"""Rows and results in a server of S3's protocol on loopback: needs s3fs and moto[server]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmpq.jobs.inputs import JobInput
from quant.common import url_files
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, results_in, run_job

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import s3fs

    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": "us-east-1"}
    settings |= {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    s3fs.S3FileSystem.clear_instance_cache()
    fs = s3fs.S3FileSystem()
    if fs.exists("bucket"):  # of the test before, as the server's state is the process's
        fs.rm("bucket", recursive=True)
    fs.mkdir("bucket")
    for day, rows in enumerate((prompts(4), prompts(3, 4))):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        fs.pipe_file(f"bucket/in/day={day}/part.jsonl", lines.encode())
    yield fs
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("url", ["s3://bucket/out.jsonl", "s3://bucket/out/"])
def test_a_job_there(bucket: Any, url: str, tmp_path: Path) -> None:
    source: Any = "s3://bucket/in/day=*/*.jsonl"
    assert JobInput.find([source]).names == ("day=0/part.jsonl", "day=1/part.jsonl")
    assert run_job(source, url, limit=3).left == 7
    assert run_job(source, url).resumed == 3
    assert run_job(source, url).left == 0
    bucket.invalidate_cache()
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bucket.find(url.rstrip("/")):
        (copy / Path(path).name).write_bytes(bucket.cat_file(path))
    assert len(results_in(copy if url.endswith("/") else copy / "out.jsonl")) == 7
    names = {Path(path).parts[1] for path in bucket.find("bucket")}
    assert names == {"in", Path(url).name}


def test_what_is_not_there(bucket: Any) -> None:
    with pytest.raises(InputError, match="cannot read input s3://none/in: no such file, or"):
        JobInput.find(["s3://none/in"])
    with pytest.raises(InputError, match="cannot write output s3://none/out: no such"):
        run_job("s3://bucket/in/day=0/part.jsonl", "s3://none/out")  # type: ignore[arg-type]
