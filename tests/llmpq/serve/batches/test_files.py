"""Files: sending, listing, expiry, limits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.options import BatchOptions, ServeOptions
from tests.llmpq.serve.asking import KEY, NOW_S, error_of, run
from tests.llmpq.serve.batches.world import FullDisk, World, content_of, line, world
from tests.llmpq.serve.pretend_engine import PretendEngine

BOUNDARY = "0123456789"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
SMALL_MIB = 4096 / 2**20


def part(name: str, value: str, filename: str | None = None) -> str:
    named = "" if filename is None else f'; filename="{filename}"'
    disposition = f'Content-Disposition: form-data; name="{name}"{named}'
    return f"--{BOUNDARY}\r\n{disposition}\r\n\r\n{value}\r\n"


PURPOSE = part("purpose", "batch")
FILE = part("file", "{}\n", "a.jsonl")
END = f"--{BOUNDARY}--\r\n"


def is_empty(made: World) -> bool:
    return not list(made.store.files.folder.iterdir()) and not made.store.stored_bytes


def test_a_file_is_kept_listed_read_and_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        content = content_of([line("a")]) * 40_000  # several blocks
        async with world(tmp_path) as made:
            response = await made.upload(content)
            file = response.json()
            assert response.status_code == 200
            assert file == {
                "id": file["id"],
                "object": "file",
                "bytes": len(content),
                "created_at": NOW_S,
                "filename": "in.jsonl",
                "purpose": "batch",
                "status": "processed",
                "status_details": None,
                "expires_at": NOW_S + 30 * 24 * 3600,
            }
            assert (await made.client.get(f"/v1/files/{file['id']}")).json() == file
            read = await made.client.get(f"/v1/files/{file['id']}/content")
            assert read.content == content
        async with world(tmp_path) as made:  # of another server
            assert (await made.client.get("/v1/files")).json()["data"] == [file]
            deleted = (await made.client.delete(f"/v1/files/{file['id']}")).json()
            assert deleted == {"id": file["id"], "object": "file", "deleted": True}
            assert (await made.client.get(f"/v1/files/{file['id']}")).status_code == 404
            assert is_empty(made)

    run(scenario)


def test_a_list_has_pages(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            ids = [(await made.upload(b"{}")).json()["id"] for _ in range(5)]

            async def page(**query: str) -> tuple[list[str], bool]:
                found = (await made.client.get("/v1/files", params=query)).json()
                return [each["id"] for each in found["data"]], found["has_more"]

            assert await page() == (ids[::-1], False)
            assert await page(limit="2") == ([ids[4], ids[3]], True)
            assert await page(limit="2", after=ids[2]) == ([ids[1], ids[0]], False)
            assert await page(order="asc", limit="3", after=ids[0]) == (ids[1:4], True)
            assert await page(purpose="batch_output") == ([], False)
            for query in ("limit=0", "limit=x", "order=up", "after=file-x", "offset=1"):
                response = await made.client.get(f"/v1/files?{query}")
                assert response.status_code == (404 if "after" in query else 400)
                error_of(response)

    run(scenario)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (FILE + END, "purpose is missing"),
        (PURPOSE + END, "file is missing"),
        (part("purpose", "assistants") + FILE + END, "files are taken for batches alone"),
        (PURPOSE + part("file", "{}") + END, "send it as a file"),
        (PURPOSE + part("file", "", "a.jsonl") + END, "file is empty"),
        (PURPOSE + PURPOSE + FILE + END, "given twice"),
        (PURPOSE + FILE + FILE + END, "given twice"),
        (PURPOSE + FILE, "cut off"),
        (PURPOSE + part("x", "y") + FILE + END, "unknown field 'x'"),
        (PURPOSE + part("purpos", "y" * 2000) + FILE + END, "more than 1024 bytes"),
        ("".join(part(f"x{i}", "y") for i in range(20)) + END, "more than 16 fields"),
        (PURPOSE + part("expires_after[anchor]", "created_at") + FILE + END, "seconds is missing"),
        (PURPOSE + part("expires_after[hours]", "1") + FILE + END, "expires_after"),
        ("no form", "malformed"),
        ("", "cut off"),
    ],
)
def test_malformed_forms_leave_nothing_behind(form: str, words: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            response = await made.client.post("/v1/files", content=form.encode(), headers=FORM)
            assert response.status_code == 400
            assert words in error_of(response)["message"]
            assert is_empty(made)

    run(scenario)


@pytest.mark.parametrize("seconds", ["3599", "2592001", "an hour"])
def test_expiry_has_bounds(seconds: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            after = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
            response = await made.upload(b"{}", **after)
            assert error_of(response)["param"] == "expires_after.seconds"

    run(scenario)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 415),
        ({}, 415),
        ({"content-type": "multipart/form-data"}, 400),
        ({"content-type": f"multipart/form-data; boundary={'x' * 1000}"}, 400),
        ({**FORM, "origin": "https://example.org"}, 403),
        ({**FORM, "origin": "null"}, 403),
    ],
)
def test_other_requests_are_refused(headers: dict[str, str], status: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            content = (PURPOSE + FILE + END).encode()
            response = await made.client.post("/v1/files", content=content, headers=headers)
            assert response.status_code == status
            error_of(response)
            assert is_empty(made)

    run(scenario)


def test_files_need_the_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, options=ServeOptions(api_key=KEY)) as made:
            assert (await made.upload(b"{}")).status_code == 401
            for path in ("/v1/files", "/v1/batches", "/v1/files/file-1/content"):
                assert (await made.client.get(path)).status_code == 401
            assert is_empty(made)

    run(scenario)


def test_files_and_their_sum_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = {"file_limit_mib": SMALL_MIB, "batch_dir_limit_gib": 2.5 * SMALL_MIB / 1024}
        async with world(tmp_path, **limits) as made:
            for size in (4097, 100_000):
                response = await made.upload(b"x" * size)
                assert response.status_code == 413
                assert "more than 4096 bytes" in error_of(response)["message"]
            assert is_empty(made)
            for expected in (200, 200, 413):
                response = await made.upload(b"x" * 4096)
                assert response.status_code == expected
            assert "delete files" in error_of(response)["message"]
            assert len(made.store.files) == 2

    run(scenario)


@pytest.mark.parametrize(
    "name", ["file-0", "file-" + "0" * 32, "..%2Flock", "%2e%2e%2flock", "batch_" + "0" * 32]
)
def test_ids_lead_nowhere_else(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
                response = await made.client.get(path)
                assert response.status_code == 404
                error_of(response)
            assert (await made.client.delete(f"/v1/files/{name}")).status_code == 404
            assert (await made.client.post(f"/v1/batches/{name}/cancel")).status_code == 404

    run(scenario)


def test_a_file_expires(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path) as made:
            after = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
            file = (await made.upload(b"{}", **after)).json()
            assert file["expires_at"] == NOW_S + 3600
            made.now_s = NOW_S + 3600
            assert (await made.client.get(f"/v1/files/{file['id']}")).status_code == 404
            made.store.remove_expired(made.now_s)
            assert is_empty(made)

    run(scenario)


@pytest.mark.parametrize("call", ["open_new", "write", "fsync", "rename", "sync_folder"])
def test_a_full_disk_is_said_and_nothing_stays(call: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = FullDisk(call)
        async with world(tmp_path, disk=disk) as made:
            response = await made.upload(b"{}")
            assert response.status_code == 507
            assert "disk is full" in error_of(response)["message"]
            disk.call = None
            assert not made.store.arriving_bytes
            assert (await made.upload(b"{}")).status_code == 200
        async with world(tmp_path) as made:
            assert len(list(made.store.files.folder.iterdir())) == 2
            assert len(made.store.files) == 1

    run(scenario)


def test_a_server_that_loads_takes_no_files(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with world(tmp_path, PretendEngine(status="loading")) as made:
            assert (await made.upload(b"{}")).status_code == 503
            assert (await made.client.get("/v1/files")).status_code == 200

    run(scenario)


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    options = BatchOptions(tmp_path / "a" / "folder")
    store = BatchStore(options)
    with pytest.raises(SpecError, match="in use by another llmpq serve"):
        BatchStore(options)
    store.close()
    assert not options.batch_dir.exists()
    options.batch_dir.write_text("a file")
    with pytest.raises(SpecError, match="pass another --batch_dir"):
        BatchStore(options)


def test_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    ours = (f"file-{'1' * 32}.part", f"file-{'0' * 32}.jsonl")
    for name in (*ours, "my own.jsonl"):
        (files / name).write_text("x")
    BatchStore(BatchOptions(tmp_path)).close()
    assert [path.name for path in files.iterdir()] == ["my own.jsonl"]
