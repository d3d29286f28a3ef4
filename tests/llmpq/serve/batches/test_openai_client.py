"""The package `openai` understands files and batches of a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from llmpq.serve.batches.batches import Batches
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.options import BatchOptions, ServeOptions
from llmpq.serve.server import Server
from llmpq.serve.service import Service
from tests.llmpq.serve.asking import KEY, run
from tests.llmpq.serve.batches.world import FINISHED, content_of, line
from tests.llmpq.serve.pretend_engine import PretendEngine


@asynccontextmanager
async def served(folder: Path, engine: PretendEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server over `engine`, with files and batches in `folder`."""
    service = Service(engine, ServeOptions(port=0, api_key=KEY))
    store = BatchStore(BatchOptions(folder, file_limit_mib=1))
    server = Server(service, Batches(store, service))
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.001)
        address = f"http://127.0.0.1:{server.bound_port}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
            yield client
    finally:
        server.should_exit = True
        await running
        store.close()


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    """A batch at its end."""
    while (batch := await client.batches.retrieve(batch_id)).status not in FINISHED:
        await asyncio.sleep(0.01)
    return batch


def test_the_client_of_openai_runs_a_batch(tmp_path: Path) -> None:
    source = tmp_path / "requests.jsonl"
    source.write_bytes(content_of([line("a"), line("b", n=2), line("c", temperature=-1)]))
    after = {"anchor": "created_at", "seconds": 7200}

    async def scenario() -> None:
        engine = PretendEngine(hold_after=0)
        async with served(tmp_path / "folder", engine) as client:
            file = await client.files.create(file=source, purpose="batch", expires_after=after)
            assert (file.filename, file.bytes) == ("requests.jsonl", source.stat().st_size)
            assert file.expires_at == file.created_at + 7200
            assert [each.id async for each in client.files.list()] == [file.id]
            begun = await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                metadata={"kind": "test"},
                output_expires_after=after,
            )
            with pytest.raises(openai.ConflictError):
                await client.files.delete(file.id)
            engine.go_on.set()
            batch = await ended(client, begun.id)
            assert batch.status == "completed"
            assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
            output = (await client.files.content(batch.output_file_id)).text.splitlines()
            answers = {each["custom_id"]: each for each in map(json.loads, output)}
            completion = openai.types.Completion.model_validate(answers["b"]["response"]["body"])
            assert [choice.text for choice in completion.choices] == ["of b", "of b"]
            (error,) = (await client.files.content(batch.error_file_id)).text.splitlines()
            assert json.loads(error)["response"]["body"]["error"]["param"] == "temperature"
            with pytest.raises(openai.ConflictError):
                await client.batches.cancel(batch.id)
            assert (await client.files.delete(file.id)).deleted

    run(scenario)


def test_the_client_of_openai_lists_batches_and_is_told_of_mistakes(tmp_path: Path) -> None:
    source = tmp_path / "requests.jsonl"
    source.write_bytes(content_of([line("a")]))

    async def scenario() -> None:
        async with served(tmp_path / "folder", PretendEngine()) as client:
            file = await client.files.create(file=source, purpose="batch")
            batches = [
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                for _ in range(4)
            ]
            listed = [each.id async for each in client.batches.list(limit=2)]  # two pages
            assert listed == [each.id for each in batches[::-1]]
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve("batch_none")
            with pytest.raises(openai.BadRequestError, match="batches alone"):
                await client.files.create(file=source, purpose="fine-tune")
            with pytest.raises(openai.APIStatusError, match="more than"):
                await client.files.create(file=("big", b"x" * 2_000_000), purpose="batch")
            for each in batches:
                assert (await ended(client, each.id)).status == "completed"
            assert (await client.files.delete(file.id)).deleted

    run(scenario)
