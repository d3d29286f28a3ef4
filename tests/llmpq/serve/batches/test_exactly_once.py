"""Every line of a batch comes out once, wherever the server is killed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from llmpq.jobs.job_files import Disk
from llmpq.serve.batches import batch_job
from tests.llmpq.serve.asking import NOW_S, run
from tests.llmpq.serve.batches.world import FINISHED, content_of, line, world
from tests.paths import ROOT

LINES = 24
CALLS = ("open_new", "write", "fsync", "close", "rename", "unlink", "make_folder", "sync_folder")


class WatchedDisk(Disk):
    """Copies the folder before some of its calls: what a kill at that moment leaves."""

    def __init__(self, folder: Path, copies: Path, before: set[int]) -> None:
        self.calls = 0
        self._mutex = threading.RLock()
        for name in CALLS:
            setattr(self, name, self._watched(name, folder, copies, before))

    def _watched(self, name: str, folder: Path, copies: Path, before: set[int]) -> Any:
        call = getattr(super(), name)

        def watched(*arguments: Any) -> Any:
            with self._mutex:
                self.calls += 1
                if self.calls in before:
                    shutil.copytree(folder, copies / f"{self.calls:05d}", symlinks=True)
                return call(*arguments)

        return watched


def lines() -> list[object]:
    """Good lines and bad ones, one of an id that stands there already."""
    good: list[object] = [line(f"c{number}") for number in range(LINES - 4)]
    return [*good, b"{}", line("c1"), {**line("c-method"), "method": "GET"}, line("c-n", n=0)]


def check(found: list[dict[str, Any]]) -> None:
    """Every line is there once, those that are good with their answers."""
    assert len(found) == LINES
    done = [each for each in found if each["response"] and each["response"]["status_code"] == 200]
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in done}
    assert texts == {f"c{number}": f"of c{number}" for number in range(LINES - 4)}
    assert len(done) == LINES - 4
    names = [each["custom_id"] for each in found if each not in done]
    assert sorted(map(str, names)) == ["None", "c-method", "c-n", "c1"]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.rare) for seed in (1, 2))]
)
def test_a_kill_between_any_two_calls_to_the_disk(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "SHARD_S", 0.005)
    copies = tmp_path / "copies"
    copies.mkdir()
    folder = tmp_path / "folder"
    draw = random.Random(seed)
    disk = WatchedDisk(folder, copies, set(draw.sample(range(10, 90), 15)))
    begun: list[str] = []

    async def first() -> None:
        async with world(folder, disk=disk) as made:
            begun.append(await made.begun(lines()))
            batch = await made.finished(begun[0])
            check(await made.results(batch))

    async def again(copy: Path) -> bool:
        async with world(copy) as made:
            made.now_s = NOW_S + 10
            if made.store.batches.get(begun[0]) is None:
                return False
            batch = await made.finished(begun[0])
            assert batch["request_counts"] == {"total": LINES, "completed": LINES - 4, "failed": 4}
            check(await made.results(batch))
            assert len(made.store.files) == 3
            return True

    run(first)
    resumed = 0
    for copy in sorted(copies.iterdir()):
        found: list[bool] = []

        async def once(copy: Path = copy, found: list[bool] = found) -> None:
            found.append(await again(copy))

        run(once)
        resumed += found[0]
    assert resumed >= 3


def committed(folder: Path) -> list[Path]:
    """The shards below a folder in which others come and go."""
    with suppress(FileNotFoundError):
        return list(folder.rglob("part-*"))
    return []


def test_a_server_that_is_killed_goes_on(tmp_path: Path) -> None:
    def started(answers: int) -> tuple[subprocess.Popen[str], int]:
        module = "tests.llmpq.serve.batches.pretend_server"
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(tmp_path / "folder"), str(answers)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, int(process.stdout.readline())

    async def scenario() -> None:
        batch_id = ""
        for attempt in range(2):
            process, port = await asyncio.to_thread(started, 8 if attempt < 1 else LINES)
            try:
                client = openai.AsyncOpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
                )
                if not batch_id:
                    file = await client.files.create(file=content_of(lines()), purpose="batch")
                    made = await client.batches.create(
                        input_file_id=file.id,
                        endpoint="/v1/completions",
                        completion_window="24h",
                    )
                    batch_id = made.id
                batch = await client.batches.retrieve(batch_id)
                before = batch.request_counts.completed
                while batch.status not in FINISHED:
                    batch = await client.batches.retrieve(batch_id)
                    shards = committed(tmp_path / "folder" / "batches")
                    done = batch.request_counts.completed
                    if attempt < 1 and shards and done >= before + 4:
                        break
                if attempt < 1:
                    assert batch.status == "in_progress"
                    process.send_signal(signal.SIGKILL)
                    continue
                assert batch.status == "completed"
                output = await client.files.content(batch.output_file_id)
                errors = await client.files.content(batch.error_file_id)
                check([json.loads(each) for each in (output.text + errors.text).splitlines()])
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait) in (0, -signal.SIGTERM)
            finally:
                process.kill()
                process.wait()
                await client.close()

    run(scenario)
