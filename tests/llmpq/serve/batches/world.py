"""Files and batches over a pretend engine: the application, its folder and its clock."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from llmpq.jobs.job_files import Disk
from llmpq.serve.batches.batches import Batches
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.options import BatchOptions, ServeOptions
from llmpq.serve.server import application
from llmpq.serve.service import Service
from tests.llmpq.serve.asking import COMPLETIONS, NOW_S, OPTIONS, completion
from tests.llmpq.serve.pretend_engine import PretendEngine

FINISHED = ("completed", "failed", "expired", "cancelled")


@dataclass
class World:
    """A server without sockets, whose clock a test sets."""

    client: httpx2.AsyncClient
    engine: PretendEngine
    service: Service
    store: BatchStore
    now_s: float = NOW_S

    async def upload(self, content: bytes, **fields: str) -> httpx2.Response:
        """Send a file for a batch."""
        return await self.client.post(
            "/v1/files",
            files={"file": ("in.jsonl", content)},
            data={"purpose": "batch", **fields},
        )

    async def create(self, file_id: str, **fields: object) -> httpx2.Response:
        """Begin a batch of a file."""
        body = {
            "input_file_id": file_id,
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
            **fields,
        }
        return await self.client.post("/v1/batches", json=body)

    async def begun(self, lines: Sequence[object], **fields: object) -> str:
        """The id of a new batch of such lines."""
        file = (await self.upload(content_of(lines))).json()
        response = await self.create(file["id"], **fields)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is."""
        found = (await self.client.get(f"/v1/batches/{batch_id}")).json()
        assert isinstance(found, dict)
        return found

    async def until(self, batch_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """A batch as soon as something holds of it."""
        while not holds(found := await self.batch(batch_id)):
            await asyncio.sleep(0.002)
        return found

    async def finished(self, batch_id: str) -> dict[str, Any]:
        """A batch at its end."""
        return await self.until(batch_id, lambda batch: batch["status"] in FINISHED)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file; none where there is no file."""
        if file_id is None:
            return []
        response = await self.client.get(f"/v1/files/{file_id}/content")
        assert response.status_code == 200
        return [json.loads(line) for line in response.text.splitlines()]

    async def results(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The lines of both files of a batch."""
        output = await self.lines(batch["output_file_id"])
        return output + await self.lines(batch["error_file_id"])


@asynccontextmanager
async def world(
    folder: Path,
    engine: PretendEngine | None = None,
    options: ServeOptions = OPTIONS,
    disk: Disk | None = None,
    **limits: float,
) -> AsyncIterator[World]:
    """A world that goes on with what is in `folder`, and stops where it is afterwards."""
    engine = engine or PretendEngine()
    service = Service(engine, options, clock=lambda: made.now_s)
    store = BatchStore(BatchOptions(folder, **limits), disk)
    batches = Batches(store, service)
    transport = httpx2.ASGITransport(application(service, batches))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        made = World(client, engine, service, store)
        batches.start()
        try:
            yield made
        finally:
            await batches.close()
            store.close()


def line(custom_id: str, **fields: object) -> dict[str, object]:
    """A line that asks for a completion."""
    body = completion(**{"prompt": f"of {custom_id}", **fields})
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": body}


def content_of(lines: Sequence[object]) -> bytes:
    """A file of lines: bytes as they are, others as JSON."""
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines
    )


class FullDisk(Disk):
    """A disk that fails at the call of a name."""

    def __init__(self, call: str) -> None:
        self.call: str | None = call

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "call"):

            def fail(*arguments: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device", "a file")

            return fail
        return super().__getattribute__(name)
