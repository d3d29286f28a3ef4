"""A real server on loopback: clients that go, stall or are many, and an orderly end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from dataclasses import replace

import httpx2
import openai
import pytest

from llmpq.errors import SpecError, StageLostError
from llmpq.serve.engine import GenerationError
from llmpq.serve.options import ServeOptions
from llmpq.serve.server import Server
from tests.llmpq.serve.asking import (
    CHAT,
    COMPLETIONS,
    KEY,
    SMALL_BYTES,
    chat,
    completion,
    events,
    run,
    service_of,
    serving,
    until,
    url,
)
from tests.llmpq.serve.pretend_engine import LIMITS, PretendEngine

LONG = replace(LIMITS, new_tokens=100_000, slot_tokens=100_000)


async def connected(
    server: Server, path: str, body: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection over which `body` was sent."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", server.bound_port))
    reader, writer = await asyncio.open_connection(sock=made, limit=SMALL_BYTES)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What still comes, also before the connection is reset."""
    found = b""
    try:
        while part := await reader.read(SMALL_BYTES):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("hold_after", [0, 3])
def test_a_client_that_goes_frees_its_generations(is_streamed: bool, hold_after: int) -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=hold_after)
        async with serving(engine) as server:
            body = completion(n=2, stream=is_streamed)
            reader, writer = await connected(server, COMPLETIONS, body)
            await until(lambda: len(engine.live) == 2)
            if is_streamed and hold_after:
                await reader.readuntil(b"data: ")
            writer.close()
            await until(lambda: not engine.live)
            assert engine.tokens <= 2 * hold_after

    run(scenario)


def test_a_client_that_does_not_read_is_bounded_and_then_cut_off() -> None:
    async def scenario() -> None:
        engine = PretendEngine(answer=lambda request: b"x" * 90_000, limits=LONG)
        async with serving(engine, stall_s=0.2) as server:
            body = completion(stream=True, max_tokens=90_000)
            reader, writer = await connected(server, COMPLETIONS, body)
            await until(lambda: bool(engine.live))
            await until(lambda: not engine.live)
            assert 10 < engine.tokens < 2000
            await until(lambda: not server.server_state.connections)
            assert b"[DONE]" not in await rest(reader)
            writer.close()

    run(scenario)


def test_a_whole_answer_that_is_not_read_does_not_stay() -> None:
    async def scenario() -> None:
        engine = PretendEngine(answer=lambda request: bytes(500), limits=LONG)
        async with serving(engine, stall_s=0.2) as server:
            body = completion(n=50, logprobs=5, max_tokens=1000)
            _, writer = await connected(server, COMPLETIONS, body)
            await until(lambda: bool(engine.live))
            await until(lambda: not server.server_state.connections)
            assert engine.tokens == 50 * 501
            writer.close()

    run(scenario)


def test_an_address_that_is_taken_is_said() -> None:
    async def scenario() -> None:
        async with serving(PretendEngine()) as server:
            options = ServeOptions(port=server.bound_port)
            with pytest.raises(SpecError, match="choose another port"):
                await Server(service_of(PretendEngine(), options)).serve()

    run(scenario)


def test_a_client_that_reads_slowly_gets_all() -> None:
    async def scenario() -> None:
        engine = PretendEngine(answer=lambda request: b"x" * 2000, limits=LONG)
        async with serving(engine, stall_s=5.0) as server:
            body = completion(stream=True, max_tokens=3000)
            reader, writer = await connected(server, COMPLETIONS, body)
            text = b""
            while b"[DONE]" not in text:
                text += await reader.read(SMALL_BYTES)
                await asyncio.sleep(0)
            assert text.count(b'"text":"x"') == 2000
            writer.close()

    run(scenario)


def test_the_end_waits_for_answers_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=2)
        async with serving(engine) as server, httpx2.AsyncClient(base_url=url(server)) as client:
            first = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
            await until(lambda: engine.is_holding)
            signal.raise_signal(signal.SIGTERM)
            refused = await client.post(COMPLETIONS, json=completion())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "service_unavailable"
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            assert (await client.get("/health")).status_code == 200
            assert not server.should_exit
            engine.go_on.set()
            assert events((await first).text)[-1]["choices"][0]["finish_reason"] == "stop"
            await until(lambda: server.should_exit)

    run(scenario)


def test_an_engine_that_is_lost_ends_the_server_once_answers_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=2)
        async with serving(engine) as server, httpx2.AsyncClient(base_url=url(server)) as client:
            first = asyncio.create_task(client.post(CHAT, json=chat(stream=True)))
            await until(lambda: engine.is_holding)
            engine.status = "failed"
            await until(lambda: "lost for good" in caplog.text)
            refused = await client.post(COMPLETIONS, json=completion())
            assert refused.status_code == 503
            assert "the engine has failed" in refused.json()["error"]["message"]
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
            assert not server.should_exit
            engine.go_on.set()
            assert events((await first).text)[-1]["choices"][0]["finish_reason"] == "stop"
            await until(lambda: server.should_exit)

    with pytest.raises(StageLostError, match="lost for good; start the server again"):
        run(scenario)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_that_take_too_long_are_given_up_at_the_end(is_streamed: bool) -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=2)
        async with (
            serving(engine, drain_s=0.0) as server,
            httpx2.AsyncClient(base_url=url(server)) as client,
        ):
            body = completion(stream=is_streamed)
            first = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await until(lambda: engine.is_holding)
            signal.raise_signal(signal.SIGTERM)
            response = await first
            error = events(response.text)[-1] if is_streamed else response.json()
            assert "the server ended before" in error["error"]["message"]
            assert response.status_code == (200 if is_streamed else 503)
            assert not engine.live
            await until(lambda: server.should_exit)

    run(scenario)


def test_a_second_signal_gives_up_what_runs() -> None:
    async def scenario() -> None:
        engine = PretendEngine(hold_after=2)
        async with serving(engine, drain_s=1000.0) as server:
            reader, writer = await connected(server, COMPLETIONS, completion())
            await until(lambda: engine.is_holding)
            for _ in range(2):
                assert not server.should_exit
                signal.raise_signal(signal.SIGTERM)
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            assert not engine.live
            await until(lambda: server.should_exit)
            writer.close()

    run(scenario)


def test_the_client_of_openai_understands_every_answer() -> None:
    async def scenario() -> None:
        engine = PretendEngine()
        async with serving(engine, api_key=KEY, queue_limit=0) as server:
            address = f"{url(server)}/v1"
            client = openai.AsyncOpenAI(base_url=address, api_key=KEY, max_retries=0)
            assert [model.id async for model in client.models.list()] == ["pretend"]
            assert (await client.completions.create(**completion())).choices[0].text == "Hello"
            whole = await client.chat.completions.create(**chat(logprobs=True, top_logprobs=1))
            assert whole.choices[0].message.content == "user: Hello\n"
            assert whole.choices[0].logprobs.content[0].token == "u"
            asked = completion(prompt="abc", echo=True, logprobs=0, max_tokens=0)
            echoed = await client.completions.create(**asked, extra_body={"prompt_logprobs": 0})
            assert echoed.choices[0].text == "abc"
            assert echoed.choices[0].logprobs.token_logprobs == [None, -1.0, -2.0]
            assert list(echoed.choices[0].prompt_logprobs[1]) == [str(ord("b"))]
            stream = await client.chat.completions.create(
                **chat(stream=True, stream_options={"include_usage": True})
            )
            chunks = [chunk async for chunk in stream]
            deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(deltas) == "user: Hello\n"
            assert chunks[-1].usage.total_tokens == 25
            with pytest.raises(openai.BadRequestError, match="tokens"):
                await client.completions.create(**completion(prompt="x" * 300))
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(**completion(model="other"))
            engine.queue = replace(engine.queue, running=4)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(**completion())
            engine.queue = replace(engine.queue, running=0)
            engine.fault, engine.fault_after = GenerationError("stage 1 is lost"), 2
            stream = await client.completions.create(**completion(stream=True))
            with pytest.raises(openai.APIError, match="stage 1 is lost"):
                [chunk async for chunk in stream]
            wrong = openai.AsyncOpenAI(base_url=address, api_key="wrong", max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                await wrong.models.list()
            await client.close()
            await wrong.close()

    run(scenario)
