"""Rows and results in servers on loopback that speak as object stores do, by the real clients: S3
needs s3fs and moto[server], Google's store gcsfs and gcp-storage-emulator. Data sets of the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfFileSystem

from llmpq.jobs.inputs import JobInput
from quant.common import url_files
from quant.common.errors import InputError
from tests.llmpq.fake_jobs import prompts, results_in, run_job
from tests.llmpq.object_server import FILES, REPO, HubHandler, object_server

pytestmark = pytest.mark.usefixtures("no_waiting")


@contextmanager
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    s3fs, moto_server = map(pytest.importorskip, ("s3fs", "moto.server"))
    server = moto_server.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": "us-east-1"}
    settings |= {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3fs.S3FileSystem()
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which no emulator knows
    gcsfs, emulator = map(pytest.importorskip, ("gcsfs", "gcp_storage_emulator.server"))
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    port = server._api._httpd.server_port
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield gcsfs.GCSFileSystem(project="p")
    server.stop()
    gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.fixture(params=[s3, gs], ids=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    with request.param(monkeypatch) as fs:
        if fs.exists("bucket"):  # of the test before, as the server's state is the process's
            fs.rm("bucket", recursive=True)
        fs.mkdir("bucket")
        for day, rows in enumerate((prompts(4), prompts(3, 4))):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            fs.pipe_file(f"bucket/in/day={day}/part.jsonl", lines.encode())
        yield fs


@pytest.mark.parametrize("name", ["out.jsonl", "out/"])
def test_a_job_there(bucket: Any, name: str, tmp_path: Path) -> None:
    scheme = bucket.protocol[0]
    source: Any = f"{scheme}://bucket/in/day=*/*.jsonl"
    url = f"{scheme}://bucket/{name}"
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
    there = f"{bucket.protocol[0]}://"
    source: Any = f"{there}bucket/in/day=0/part.jsonl"
    with pytest.raises(InputError, match=f"cannot read input {there}none/in: no such file, or"):
        JobInput.find([f"{there}none/in"])
    with pytest.raises(InputError, match=f"cannot write output {there}none/out: no such"):
        run_job(source, f"{there}none/out")


def test_rows_of_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by its client as in a folder; a cut stream goes on, and a change is told."""
    monkeypatch.setattr(url_files, "BACKOFF_S", 0.0)
    with object_server(HubHandler) as server:
        template = server.url("/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url(""))
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        for day, rows in enumerate((prompts(4), prompts(3, 4))):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            server.objects[f"{FILES}day={day}/part.jsonl"] = lines.encode()
        there = f"hf://{REPO}/"
        source: Any = f"{there}day=*/*.jsonl"
        assert JobInput.find([source]).names == ("day=0/part.jsonl", "day=1/part.jsonl")
        assert JobInput.find([f"{there}day=1/"]).names == ("part.jsonl",)
        assert run_job(source, tmp_path / "out.jsonl", limit=3).left == 7
        server.faults = [403, "cut"]
        with pytest.raises(InputError, match=f"{there}day=0/part.jsonl.*no access"):
            run_job(source, tmp_path / "out.jsonl")
        assert run_job(source, tmp_path / "out.jsonl").resumed == 3
        assert server.faults == []
        assert len(results_in(tmp_path / "out.jsonl")) == 7
        for name in ("none.jsonl", "none/*.jsonl"):
            with pytest.raises(InputError, match=r"no such file|no file of that name"):
                JobInput.find([there + name])
        with pytest.raises(InputError, match="hf://datasets/me/none/a: no such file"):
            JobInput.find(["hf://datasets/me/none/a"])
        HfFileSystem.clear_instance_cache()
