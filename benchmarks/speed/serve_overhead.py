"""What the server itself costs: tokens per second over HTTP of an engine that has them at once.

`python -m benchmarks.speed.serve_overhead [--streams 1 32] [--tokens 200]`. The server
runs in a process of its own with the demo model's tokenizer in another, the clients in this one,
over loopback. Printed as Markdown, for each number of streams at once: tokens per second, and
processor time per token of the server and of its tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import ray  # noqa: F401

from benchmarks.lab import header

# isort: split
import psutil  # Ray brings it, and has just put it on the path

from actors.messages import Request
from actors.sampling_options import GREEDY, Sampling
from benchmarks.lab import processor_name
from llmpq.rows.row import Row
from llmpq.serve.engine import (
    EngineLimits,
    EngineStatus,
    QueueState,
    TokenEvent,
)
from llmpq.serve.model_tokenizer import ModelTokenizer
from llmpq.serve.options import ServeOptions
from llmpq.serve.server import Server
from llmpq.serve.service import Service
from llmpq.tokenizing.tokenizer_process import RowLimits

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/demo_model"
TEXT_CHARACTERS = 10_000
LIMITS = EngineLimits(1024, 4096, 8192, 4096, 1 << 20)


class InstantEngine:
    """An engine that has the tokens of a text at once, over and over; text is made of them by the
    model's tokenizer.
    """

    model_name = "instant"
    created_s = 0
    limits = LIMITS
    sampling: Sampling = GREEDY
    status: EngineStatus = "ready"
    queue = QueueState(0, 0, 1024, 0, 0)

    def __init__(self, tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._token_ids = token_ids

    async def encode(self, row: Row) -> tuple[int, ...]:
        """Token ids of a prompt, as `Engine.encode`."""
        return await self._tokenizer.encode(row)

    async def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of token ids, as `Engine.decode`."""
        return await self._tokenizer.decode(token_ids, before)

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Tokens as fast as they are read, as `Engine.generate`."""
        for number in range(request.max_new_tokens):
            is_last = number == request.max_new_tokens - 1
            token_id = self._token_ids[number % len(self._token_ids)]
            yield TokenEvent(token_id, "length" if is_last else None)


def serve(connection: Connection) -> None:
    """Serve on a free port, which is told, until the process is ended."""

    async def whole() -> None:
        text = (ROOT / "README.md").read_text()[:TEXT_CHARACTERS]
        token_ids = await tokenizer.encode(Row("text", text=text))
        engine = InstantEngine(tokenizer, token_ids)
        server = Server(Service(engine, ServeOptions(port=0)))
        server.on_listening = connection.send
        await server.serve()

    with closing(ModelTokenizer(MODEL, RowLimits())) as tokenizer:
        asyncio.run(whole())


async def stream(port: int, tokens: int) -> int:
    """Bytes of one streamed completion, which is read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "instant", "prompt": "a", "max_tokens": tokens, "stream": True})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write((head + body).encode())
    answer = await reader.read(-1)
    writer.close()
    if b"[DONE]" not in answer or b'"finish_reason":"length"' not in answer:
        raise RuntimeError(f"the answer is not complete: {answer[-200:]!r}")
    return len(answer)


async def streams(port: int, count: int, tokens: int) -> None:
    """So many streams at once."""
    await asyncio.gather(*(stream(port, tokens) for _ in range(count)))


def processor_s(process: psutil.Process) -> float:
    """Seconds of processor time so far."""
    times = process.cpu_times()
    return times.user + times.system


def measure(port: int, server: psutil.Process, count: int, options: argparse.Namespace) -> str:
    """A line of the table."""
    workers = server.children()
    tokenizer = max(workers, key=processor_s)
    asyncio.run(streams(port, count, options.tokens))
    rates, costs = [], []
    for _ in range(options.passes):
        before = [processor_s(each) for each in (server, tokenizer)]
        began_s = time.perf_counter()
        asyncio.run(streams(port, count, options.tokens))
        taken_s = time.perf_counter() - began_s
        after = [processor_s(each) for each in (server, tokenizer)]
        made = count * options.tokens
        rates.append(made / taken_s)
        costs.append([(b - a) / made * 1e6 for a, b in zip(before, after, strict=True)])
    own, text = (median(each) for each in zip(*costs, strict=True))
    return f"| {count} | {median(rates):,.0f} | {own:.0f} | {text:.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    try:
        port = ours.recv()
        server = psutil.Process(process.pid)
        print(f"{processor_name()}, {options.tokens} tokens a stream\n")
        print(header("streams | tokens/s | server, µs/token | tokenizer, µs/token"))
        for count in options.streams:
            print(measure(port, server, count, options))
    finally:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
