"""A server of its own process over a slow pretend engine: `python -m … FOLDER ANSWERS` tells its
port; after so many answers it makes no more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from actors.messages import Request
from llmpq.serve.batches import batch_job
from llmpq.serve.batches.batches import Batches
from llmpq.serve.batches.store import BatchStore
from llmpq.serve.engine import TokenEvent
from llmpq.serve.options import BatchOptions, ServeOptions
from llmpq.serve.server import Server
from llmpq.serve.service import Service
from tests.llmpq.serve.pretend_engine import PretendEngine

TOKEN_S = 0.01


class SlowEngine(PretendEngine):
    """Takes its time for each token."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if len(self.seen) >= int(sys.argv[2]):
            await asyncio.Event().wait()
        async for event in super().generate(request):
            await asyncio.sleep(TOKEN_S)
            yield event


if __name__ == "__main__":
    batch_job.SHARD_S = 0.05
    service = Service(SlowEngine(), ServeOptions(port=0))
    server = Server(service, Batches(BatchStore(BatchOptions(Path(sys.argv[1]))), service))
    server.on_listening = lambda port: print(port, flush=True)
    server.run()
