"""What somebody or something else has done to the folder of files and batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch, FileObject

from actors.messages import Request
from llmpq.errors import SpecError
from llmpq.serve.batches import runner
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.engine import TokenEvent
from llmpq.serve.options import BatchOptions
from tests.llmpq.serve.asking import NOW_S, run
from tests.llmpq.serve.batches.world import content_of, line, world
from tests.llmpq.serve.pretend_engine import PretendEngine

LINES = [line("c0"), line("c1", n=0), *(line(f"c{number}") for number in range(2, 9))]
ANSWERED = {"c0": None, "c1": 400}


class Interrupted(PretendEngine):
    """Answers the first line alone."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if bytes(request.prompt_ids) != b"of c0":
            await self.go_on.wait()
        async for event in super().generate(request):
            yield event


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a batch of which two lines are answered."""
    folder = tmp_path_factory.mktemp("begun") / "folder"

    async def scenario() -> None:
        async with world(folder, Interrupted()) as made:
            begun = await made.begun(LINES, metadata={"job": "nightly"})
            counts = {"total": 9, "completed": 1, "failed": 1}
            await made.until(begun, lambda batch: batch["request_counts"] == counts)

    run(scenario)
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which tests may damage."""
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    return Path(shutil.copytree(begun, tmp_path / "folder"))


def path(folder: Path, kind: str) -> Path:
    """The path of something of the only batch."""
    (record,) = (folder / "batches").glob("*.json")
    (content,) = (folder / "files").glob("*.jsonl")
    job = record.with_suffix("") / "results.jsonl.job"
    paths = {"record": record, "input": content, "job": job.parent, "shards": job}
    return paths.get(kind) or job / {"manifest": "job.json"}.get(kind, kind)


def truncate(at: Path) -> None:
    at.write_bytes(at.read_bytes()[:20])


def change(at: Path) -> None:
    content = at.read_bytes()
    at.write_bytes(content.replace(b"of c8", b"of c9"))
    assert at.read_bytes() != content


def remove(at: Path) -> None:
    shutil.rmtree(at) if at.is_dir() else at.unlink()


def make_folder(at: Path) -> None:
    remove(at)
    at.mkdir()


def make_file(at: Path) -> None:
    remove(at)
    at.write_text("a file")


def rewrite(**fields: object) -> Callable[[Path], None]:
    def rewrite_json(at: Path) -> None:
        at.write_text(json.dumps(json.loads(at.read_text()) | fields))

    return rewrite_json


def all_bytes(folder: Path) -> set[bytes]:
    found = (folder, *folder.rglob("*"))
    return {each.read_bytes() for each in found if each.is_file()}


async def end(folder: Path) -> tuple[dict[str, Any], dict[str | None, int | None]]:
    """The batch at its end, and the statuses of the lines that it gives out, by their ids."""
    async with world(folder) as made:
        (listed,) = (await made.client.get("/v1/batches")).json()["data"]
        batch = await made.finished(listed["id"])
        Batch.model_validate(batch, strict=True)
        found = await made.lines(batch["output_file_id"])
        errors = await made.lines(batch["error_file_id"])
        assert all(each["response"]["status_code"] == 200 for each in found)
        statuses = {each["custom_id"]: each["response"]["status_code"] for each in errors}
        return batch, {each["custom_id"]: None for each in found} | statuses


@pytest.mark.parametrize(
    ("kind", "damage", "code", "message"),
    [
        ("input", truncate, "changed_file", "not what was sent"),
        ("input", change, "changed_file", "not what was sent"),
        ("input", remove, "unreadable_file", "No such file"),
        ("input", make_folder, "unreadable_file", "s a directory"),
        ("manifest", truncate, "batch_damaged", "job.json cannot be read as the manifest"),
        ("manifest", make_folder, "batch_damaged", "s a directory"),
        ("manifest", rewrite(generation="x"), "batch_damaged", "generation is 'x'"),
        ("manifest", rewrite(model="0" * 12), "batch_damaged", "made by another model"),
        ("manifest", rewrite(sampling=[]), "batch_damaged", "sampling is no object"),
        ("record", truncate, "damaged_record", "cannot be read"),
        ("record", make_folder, "damaged_record", "s a directory"),
        ("record", rewrite(created_at="noon"), "damaged_record", "valid integer"),
        ("record", rewrite(id=f"batch_{'0' * 32}"), "damaged_record", "is that of 'batch_000"),
        ("record", remove, "damaged_record", "its record is lost"),
    ],
)
def test_a_damaged_batch_fails_with_what_it_has(
    folder: Path, kind: str, damage: Callable[[Path], None], code: str, message: str
) -> None:
    async def scenario() -> None:
        job = path(folder, "job")
        damage(damaged := path(folder, kind))
        kept = all_bytes(job) | all_bytes(damaged)
        batch, answers = await end(folder)
        assert batch["status"] == "failed"
        (error,) = batch["errors"]["data"]
        assert (error["code"], message in error["message"]) == (code, True), error
        assert str(folder) not in error["message"]
        assert "--" not in error["message"]
        assert answers == ANSWERED
        assert {**batch["request_counts"], "total": 9} == {"total": 9, "completed": 1, "failed": 1}
        assert batch["failed_at"] == NOW_S
        assert kept <= all_bytes(folder)
        again, answers = await end(folder)
        assert (again, answers) == (batch, ANSWERED)

    run(scenario)


@pytest.mark.parametrize("kind", ["job", "shards"])
@pytest.mark.parametrize("damage", [make_file, pytest.param(make_folder, id="empty")])
def test_a_job_folder_that_is_none(folder: Path, kind: str, damage: Callable[[Path], None]) -> None:
    async def scenario() -> None:
        damage(path(folder, kind))
        batch, answers = await end(folder)
        if damage is make_folder:  # as if nothing had been done
            assert batch["request_counts"] == {"total": 9, "completed": 8, "failed": 1}
            return
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "batch_damaged"
        assert (batch["output_file_id"], answers) == (None, {})
        assert b"a file" in all_bytes(folder / "batches")

    run(scenario)


def test_results_that_are_a_folder_or_damaged(folder: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = Path(shutil.copytree(folder, tmp_path / "other"))
        (path(folder, "job") / "results.jsonl").mkdir()
        batch, answers = await end(folder)
        assert (batch["status"], answers) == ("failed", ANSWERED)
        assert "is a folder" in batch["errors"]["data"][0]["message"]
        (shard,) = path(other, "shards").glob("part-*")
        truncate(shard)
        truncate(path(other, "manifest"))
        batch, answers = await end(other)
        assert (batch["status"], answers) == ("failed", {})

    run(scenario)


def test_what_can_be_read_of_a_damaged_record_stays(folder: Path) -> None:
    async def scenario() -> None:
        record = path(folder, "record")
        before = json.loads(record.read_text())
        rewrite(status="?", request_counts={"total": "many"})(record)
        (folder / "batches" / f"{before['id']}.json.1.damaged").write_text("an earlier one")
        batch, _ = await end(folder)
        for name in ("input_file_id", "metadata", "created_at", "endpoint"):
            assert batch[name] == before[name]
        assert (folder / "batches" / f"{before['id']}.json.2.damaged").is_file()

    run(scenario)


def test_a_finished_batch_keeps_its_files(folder: Path) -> None:
    async def scenario() -> None:
        done, _ = await end(folder)
        assert done["status"] == "completed"
        truncate(path_of_record := folder / "batches" / f"{done['id']}.json")
        batch, answers = await end(folder)
        assert batch["status"] == "failed"
        assert len(answers) == 9
        for name in ("output_file_id", "error_file_id"):
            assert batch[name] == done[name]
        assert path_of_record.is_file()

    run(scenario)


@pytest.mark.parametrize("damage", [truncate, make_folder, remove])
def test_the_record_of_an_input_is_made_anew(folder: Path, damage: Callable[[Path], None]) -> None:
    async def scenario() -> None:
        content = path(folder, "input")
        damage(content.with_suffix(".json"))
        async with world(folder) as made:
            file = (await made.client.get(f"/v1/files/{content.stem}")).json()
            FileObject.model_validate(file, strict=True)
            assert file["status"] == "error"
            assert "record" in file["status_details"]
            assert file["bytes"] == len(content_of(LINES))
        batch, answers = await end(folder)
        assert (batch["status"], len(answers)) == ("completed", 9)

    run(scenario)


def test_a_file_without_content(folder: Path) -> None:
    async def scenario() -> None:
        async with world(folder / "new") as made:
            file = (await made.upload(b"{}")).json()
            made.store.path(file["id"]).unlink()
            assert (await made.client.get(f"/v1/files/{file['id']}/content")).status_code == 404

    run(scenario)


def test_records_that_may_not_be_read_are_no_reason_to_fail_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def refused(at: Path) -> bytes:
        if at.suffix == ".json":
            raise PermissionError(13, "Permission denied", str(at))
        return read(at)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refused)
        with pytest.raises(SpecError, match="Permission denied; give the user of the server"):
            BatchStore(BatchOptions(folder))

    async def scenario() -> None:
        batch, _ = await end(folder)
        assert batch["status"] == "completed"

    run(scenario)


def test_a_fault_of_the_server_does_not_come_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[object] = []

    def opened(*arguments: object) -> None:
        tries.append(arguments)
        raise ValueError("a secret")

    monkeypatch.setattr(runner, "BatchJob", opened)

    async def scenario() -> None:
        batch, answers = await end(folder)
        assert (batch["status"], answers) == ("failed", ANSWERED)
        assert "a fault of the server" in batch["errors"]["data"][0]["message"]
        assert len(tries) == runner.MOST_FAULTS

    run(scenario)
