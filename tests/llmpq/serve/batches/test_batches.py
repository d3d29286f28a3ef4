"""Batches: from a file of requests to files of answers and errors."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from llmpq.serve.batches import batch_job, runner
from llmpq.serve.engine import GenerationError
from tests.llmpq.serve.asking import CHAT, COMPLETIONS, NOW_S, chat, completion, error_of, run
from tests.llmpq.serve.batches.world import FullDisk, content_of, line, world
from tests.llmpq.serve.pretend_engine import PretendEngine

DAY_S = 24 * 3600


def without_names(body: dict[str, Any]) -> dict[str, Any]:
    """An answer but for what each has of its own."""
    return {name: value for name, value in body.items() if name not in ("id", "created")}


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_answers_are_those_of_http(endpoint: str, tmp_path: Path) -> None:
    make = completion if endpoint == COMPLETIONS else chat
    bodies = [
        make(n=2, seed=3, temperature=1.0),
        make(stop=["l"], max_tokens=7),
        make(logprobs=1 if endpoint == COMPLETIONS else True),
        make(model="other"),
        make(temprature=1),
        make(max_tokens=10_000),
        make(n=129),
    ]
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": endpoint, "body": body}
        for number, body in enumerate(bodies)
    ]

    async def scenario() -> None:
        async with world(tmp_path) as made:
            begun = await made.begun(lines, endpoint=endpoint, metadata={"job": "nightly"})
            batch = await made.finished(begun)
            assert batch["request_counts"] == {"total": 7, "completed": 3, "failed": 4}
            assert batch["metadata"] == {"job": "nightly"}
            output = await made.lines(batch["output_file_id"])
            errors = await made.lines(batch["error_file_id"])
            assert {each["custom_id"] for each in output} == {"c0", "c1", "c2"}
            found = {each["custom_id"]: each for each in output + errors}
            assert len(found) == len(bodies)
            assert len({each["id"] for each in found.values()}) == len(bodies)
            for number, body in enumerate(bodies):
                http = await made.client.post(endpoint, json=body)
                answer = found[f"c{number}"]
                assert list(answer) == ["id", "custom_id", "response", "error"]
                assert answer["error"] is None
                assert answer["response"]["status_code"] == http.status_code
                assert without_names(answer["response"]["body"]) == without_names(http.json())
                assert answer["response"]["request_id"]

    run(scenario)


def test_the_states_of_a_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=0)
        async with world(tmp_path, engine) as made:
            file = (await made.upload(content_of([line("a"), b"", line("b")]))).json()
            created = (await made.create(file["id"])).json()
            assert created["object"] == "batch"
            assert created["status"] == "validating"
            assert created["errors"] is None
            assert created["expires_at"] == NOW_S + DAY_S
            running = await made.until(created["id"], lambda batch: engine.is_holding)
            assert running["status"] == "in_progress"
            assert running["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
            refused = await made.client.delete(f"/v1/files/{file['id']}")
            assert (refused.status_code, error_of(refused)["code"]) == (409, "file_in_use")
            made.now_s += 5
            engine.go_on.set()
            batch = await made.finished(created["id"])
            assert batch["status"] == "completed"
            times = ("in_progress_at", "finalizing_at", "completed_at")
            assert [batch[name] - NOW_S for name in times] == [0, 5, 5]
            assert batch["error_file_id"] is None
            output = (await made.client.get(f"/v1/files/{batch['output_file_id']}")).json()
            assert output["purpose"] == "batch_output"
            assert output["expires_at"] is None
            assert (await made.create(output["id"])).status_code == 400
            refused = await made.client.post(f"/v1/batches/{batch['id']}/cancel")
            assert refused.status_code == 409
            assert "is completed" in error_of(refused)["message"]
            assert (await made.client.delete(f"/v1/files/{file['id']}")).status_code == 200
            await made.until(batch["id"], lambda _: not made.store.job_path(batch["id"]).exists())

    run(scenario)


def test_one_bad_line_is_an_error_line(tmp_path: Path) -> None:
    bad: list[tuple[object, str | None, str]] = [
        (b"{", None, "not JSON"),
        (b"[1]", None, "must be a JSON object"),
        (b"\xff{}", None, "not UTF-8"),
        (b"[" * 100_000, None, "nests too deeply"),
        ({**line("x1"), "method": "GET"}, "x1", "it must be 'POST'"),
        ({**line("x2"), "url": CHAT}, "x2", "the batch's endpoint is"),
        ({**line("x3"), "extra": 1}, "x3", "unknown field 'extra'"),
        ({**line("x4"), "body": []}, "x4", "body is a list"),
        ({"custom_id": "x5"}, "x5", "method is missing"),
        ({**line("x6"), "custom_id": ""}, None, "custom_id"),
        ({**line("x7"), "custom_id": 7}, None, "custom_id is 7"),
        (
            {**line("x8"), "custom_id": "\ud800"},
            None,
            "unable to parse raw data as a unicode string",
        ),
        (line("good"), "good", "stands in line 1 already"),
        (line("x9", user="x" * 5_000_000), None, "more than 4194304 bytes"),
    ]

    async def scenario() -> None:
        async with world(tmp_path) as made:
            begun = await made.begun([line("good"), *(each[0] for each in bad), line("last")])
            batch = await made.finished(begun)
            assert batch["status"] == "completed"
            assert batch["request_counts"] == {"total": 16, "completed": 2, "failed": 14}
            output = await made.lines(batch["output_file_id"])
            assert sorted(each["custom_id"] for each in output) == ["good", "last"]
            errors = await made.lines(batch["error_file_id"])
            found = {each["error"]["message"].partition(":")[0]: each for each in errors}
            for number, (_, custom_id, words) in enumerate(bad, start=2):
                answer = found[f"line {number}"]
                assert words in answer["error"]["message"]
                assert answer["custom_id"] == custom_id
                assert answer["response"] is None

    run(scenario)


def test_a_stream_and_other_bad_bodies_are_refused_in_their_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            lines = [line("a", stream=True), line("b", prompt="x" * 10_000), line("c", n=0)]
            batch = await made.finished(await made.begun(lines))
            assert batch["output_file_id"] is None
            errors = await made.lines(batch["error_file_id"])
            found = {each["custom_id"]: each["response"] for each in errors}
            assert {each["status_code"] for each in found.values()} == {400}
            params = {name: each["body"]["error"]["param"] for name, each in found.items()}
            assert params == {"a": "stream", "b": "prompt", "c": "n"}

    run(scenario)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\n \n", "empty_file"),
        (b"hello\nworld\n", "invalid_json_line"),
        (json.dumps([line("a"), line("b")], indent=1).encode(), "invalid_json_line"),
        (json.dumps(line("a"), indent=1).encode(), "invalid_json_line"),
        (gzip.compress(b"{}\n{}", mtime=0), "invalid_file"),
        (b"custom_id,prompt\n{}\n", "invalid_file"),
        (b"\xff\xfe{\0}\0\n", "invalid_file"),
        (b"{}\n" * 6, "too_many_lines"),
    ],
)
def test_a_file_that_is_no_batch_fails(
    content: bytes, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "MOST_LINES", 5)

    async def scenario() -> None:
        async with world(tmp_path) as made:
            file = (await made.upload(content)).json()
            created = (await made.create(file["id"])).json()
            batch = await made.finished(created["id"])
            assert (batch["status"], batch["failed_at"]) == ("failed", NOW_S)
            assert [each["code"] for each in batch["errors"]["data"]] == [code]
            assert batch["output_file_id"] is batch["error_file_id"] is None
            other = await made.finished(await made.begun([line("a")]))
            assert other["status"] == "completed"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 4000}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_fields_of_a_batch(fields: dict[str, Any], param: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            file = (await made.upload(b"{}")).json()
            response = await made.create(file["id"], **fields)
            assert response.status_code == 400
            assert error_of(response)["param"].startswith(param)
            assert (await made.client.get("/v1/batches")).json()["data"] == []

    run(scenario)


def test_batches_that_cannot_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            response = await made.create("file-" + "0" * 32)
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
            for content in (b"", b"{", b"[]"):
                headers = {"content-type": "application/json"}
                response = await made.client.post("/v1/batches", content=content, headers=headers)
                assert response.status_code == 400
            response = await made.client.post("/v1/batches/x/cancel", headers={"origin": "null"})
            assert response.status_code == 403

    run(scenario)


def test_batches_are_listed_the_newest_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            ids = [await made.begun([line("a")]) for _ in range(3)]
            for batch_id in ids:
                await made.finished(batch_id)
            found = (await made.client.get("/v1/batches?limit=2")).json()
            assert [each["id"] for each in found["data"]] == [ids[2], ids[1]]
            assert found["has_more"]
            found = (await made.client.get(f"/v1/batches?after={ids[1]}")).json()
            assert [each["id"] for each in found["data"]] == [ids[0]]
            assert not found["has_more"]
            assert (await made.client.get("/v1/batches?limit=101")).status_code == 400

    run(scenario)


def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PretendEngine(answer=lambda request: b"x" * (bytes(request.prompt_ids) != b"of 0"))
        engine.hold_after = 1  # the first line is done before, as its answer is empty
        async with world(tmp_path, engine) as made:
            first = await made.begun([line(str(number)) for number in range(20)])
            behind = await made.begun([line("a"), line("b")])
            await made.until(first, lambda batch: batch["request_counts"]["completed"] == 1)
            await made.until(behind, lambda batch: batch["status"] == "in_progress")
            for batch_id in (behind, first):  # one that waits for its turn, one that runs
                answer = await made.client.post(f"/v1/batches/{batch_id}/cancel")
                assert answer.json()["status"] == "cancelling"
                again = await made.client.post(f"/v1/batches/{batch_id}/cancel")
                assert again.status_code == 200 or "cancelled" in again.text
                batch = await made.finished(batch_id)
                assert batch["status"] == "cancelled"
                assert batch["cancelled_at"] == batch["cancelling_at"] == NOW_S
                output = await made.lines(batch["output_file_id"])
                assert [each["custom_id"] for each in output] == ["0"] * (batch_id == first)
                errors = await made.lines(batch["error_file_id"])
                assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
                assert len(errors) == (19 if batch_id == first else 2)
            assert not engine.live

    run(scenario)


def test_a_batch_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.005)

    async def scenario() -> None:
        engine = PretendEngine(answer=lambda request: b"x" * (bytes(request.prompt_ids) != b"of 0"))
        engine.hold_after = 1
        async with world(tmp_path, engine) as made:
            after = {"anchor": "created_at", "seconds": 3600}
            begun = await made.begun([line(str(number)) for number in range(5)])
            kept = await made.begun([line("0")], output_expires_after=after)
            await made.until(begun, lambda batch: batch["request_counts"]["completed"] == 1)
            made.now_s += DAY_S
            for batch_id in (begun, kept):
                batch = await made.finished(batch_id)
                assert (batch["status"], batch["expired_at"]) == ("expired", NOW_S + DAY_S)
                errors = await made.lines(batch["error_file_id"])
                assert {each["error"]["code"] for each in errors} == {"batch_expired"}
                assert batch["request_counts"]["failed"] == len(errors)
            file = (await made.client.get(f"/v1/files/{batch['error_file_id']}")).json()
            assert file["expires_at"] == made.now_s + 3600
            made.now_s += 31 * DAY_S
            while len(made.store.batches) or len(made.store.files) > 2:
                await asyncio.sleep(0.002)
            kinds = {each.filename.partition("_")[0] for each in made.store.files}
            assert kinds == {"batch"}  # the files of the first are kept until they are deleted

    run(scenario)


def test_faults_of_a_line_and_of_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PretendEngine(fault=GenerationError("stage 2 is lost"), fault_after=2)
        async with world(tmp_path, engine) as made:
            batch = await made.finished(await made.begun([line("a")]))
            (error,) = await made.lines(batch["error_file_id"])
            assert error["response"]["status_code"] == 500
            engine.fault = ValueError("a secret prompt")
            batch = await made.finished(await made.begun([line("a")]))
            (error,) = await made.lines(batch["error_file_id"])
            assert "secret" not in json.dumps(error)
            assert error["response"]["status_code"] == 500
            engine.fault = None
            engine.status = "failed"  # no fault of the line: it waits for another engine
            file = (await made.upload(content_of([line("b")]))).status_code
            assert file == 503
            engine.status = "ready"
            engine.fault, engine.hold_after, engine.fault_after = GenerationError("gone"), 1, 1
            begun = await made.begun([line("b")])
            await made.until(begun, lambda batch: engine.is_holding)
            engine.status = "failed"
            engine.go_on.set()
            await made.until(begun, lambda batch: not engine.live)
            engine.fault = None
        engine = PretendEngine()
        async with world(tmp_path, engine) as made:
            batch = await made.finished(begun)
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}

    run(scenario)


@pytest.mark.parametrize("call", ["open_new", "write", "fsync", "rename", "sync_folder"])
def test_a_full_disk_stops_a_batch_until_there_is_room(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)

    async def scenario() -> None:
        disk = FullDisk("nothing")
        engine = PretendEngine(hold_after=0)
        async with world(tmp_path, engine, disk=disk) as made:
            begun = await made.begun([line(str(number)) for number in range(9)])
            await made.until(begun, lambda batch: engine.is_holding)
            disk.call = call
            engine.go_on.set()
            await made.until(begun, lambda batch: "waits for" in caplog.text)
            assert (await made.batch(begun))["status"] == "in_progress"
            disk.call = None
            batch = await made.finished(begun)
            output = await made.lines(batch["output_file_id"])
            assert sorted(each["custom_id"] for each in output) == list("012345678")
        assert "No space left" in caplog.text

    run(scenario)


def test_a_lost_input_fails_its_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=0)
        async with world(tmp_path, engine) as made:
            begun = await made.begun([line("a")])
            await made.until(begun, lambda batch: engine.is_holding)
            (source,) = made.store.files.folder.glob("*.jsonl")
        source.unlink()
        async with world(tmp_path) as made:
            batch = await made.finished(begun)
            assert batch["errors"]["data"][0]["code"] == "unreadable_file"

    run(scenario)
