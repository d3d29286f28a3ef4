"""The engine over real stages of the demo model: its answers are those of `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmpq import Cluster, Plan, Workload
from llmpq.rows.row import Row
from llmpq.run.options import RunOptions
from llmpq.serve.engine import (
    EngineStoppingError,
    GenerationRequest,
    PromptTooLongError,
    TokenEvent,
)
from llmpq.serve.pipeline_engine import PipelineEngine
from tests.paths import EXAMPLES

pytestmark = pytest.mark.usefixtures("local_ray")

MODEL = EXAMPLES / "demo_model"
PROMPTS = ["def f(x):", "class A", "import os", "The list", "return", "for i in", "a", "while"]
NEW_TOKENS = 12


CLUSTER = """
name: two-emulated
nodes: [{name: a, accelerators: {T4: 2}, usable_memory_gib: 0.1}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER)
    options = {"bits": [16], "dtype": "float32", "keep_all_devices": True, "theta": 1.0}
    return Cluster.from_yaml(path).plan(MODEL, Workload(4, 32, NEW_TOKENS), **options)


def expected(text: str) -> tuple[tuple[int, ...], list[int]]:
    """Token ids of the prompt, and those that the whole model generates."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    given = tokenizer(text, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    prompt = given["input_ids"][0].tolist()
    return tuple(prompt), made[len(prompt) :]


async def ready(engine: PipelineEngine) -> None:
    for _ in range(1200):
        if engine.status != "loading":
            break
        await asyncio.sleep(0.05)
    assert engine.status == "ready"


def with_engine(plan: Plan, use: Callable[[PipelineEngine], Awaitable[None]]) -> None:
    """Run `use` while an engine is ready, and end it."""

    async def whole() -> None:
        await ready(engine)
        await use(engine)

    engine = PipelineEngine(plan.spec, RunOptions(policy="orca", prefill_chunk_tokens=3))
    engine.start()
    try:
        asyncio.run(whole())
    finally:
        engine.close()
    assert engine.status == "draining"


def request(engine: PipelineEngine, name: str, ids: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(name, ids, NEW_TOKENS, engine.sampling, name)


def test_many_answers_at_once_are_those_of_generate(plan: Plan) -> None:
    async def use(engine: PipelineEngine) -> None:
        async def answer(number: int, text: str) -> None:
            await asyncio.sleep(0.02 * number)
            ids = await engine.encode(Row("p", text=text))
            events = [e async for e in engine.generate(request(engine, str(number), ids))]
            prompt, tokens = expected(text)
            assert ids == prompt
            assert [event.token_id for event in events] == tokens
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
            assert events[-1].finish_reason in ("stop", "length")
            assert await engine.decode(tokens) == AutoTokenizer.from_pretrained(MODEL).decode(
                tokens, skip_special_tokens=True
            )

        await asyncio.gather(*(answer(i, text) for i, text in enumerate(PROMPTS)))
        assert (engine.queue.waiting, engine.queue.running, engine.queue.kv_tokens_used) == (0,) * 3

    with_engine(plan, use)


def test_a_generation_that_nobody_reads_any_more_leaves_its_room(plan: Plan) -> None:
    async def use(engine: PipelineEngine) -> None:
        ids = await engine.encode(Row("p", text=PROMPTS[0]))
        for number in range(20):
            first: TokenEvent | None = None
            async with aclosing(engine.generate(request(engine, f"left-{number}", ids))) as events:
                first = await anext(events)
            assert first is not None
        last = [e async for e in engine.generate(request(engine, "last", ids))]
        assert [event.token_id for event in last] == expected(PROMPTS[0])[1]
        with pytest.raises(PromptTooLongError):
            await engine.encode(Row("p", text="word " * 400))
        engine.close()
        with pytest.raises(EngineStoppingError):
            await anext(engine.generate(request(engine, "late", ids)))

    with_engine(plan, use)
