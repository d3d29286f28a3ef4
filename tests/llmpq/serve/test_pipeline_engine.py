"""The engine over real stages of the demo model: its answers are those of `generate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.messages import Request
from actors.processes.observer import ClockOffset, Observer
from actors.replicas.replica import Restarts
from llmpq import Cluster, Plan, Workload
from llmpq.rows.row import Row
from llmpq.run.options import RunOptions
from llmpq.run.spans import RequestTracer
from llmpq.serve.engine import (
    EngineStoppingError,
    PromptTooLongError,
    TokenEvent,
)
from llmpq.serve.metrics import ServeMetrics
from llmpq.serve.options import ServeOptions
from llmpq.serve.pipeline_engine import PipelineEngine
from llmpq.serve.service import Service
from tests.llmpq.divided_plans import SCHEDULE, divided_plan
from tests.llmpq.run.test_spans import Exported
from tests.llmpq.serve.asking import COMPLETIONS, client_of
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
    return Cluster.from_yaml(path).plan(MODEL, Workload(4, 80, NEW_TOKENS), **options)


@pytest.fixture(scope="module")
def divided() -> Plan:
    """One stage that prefills, and two that decode."""
    schedule = replace(SCHEDULE, decode_requests=4)
    given: dict[str, Any] = {"lengths": (32, NEW_TOKENS), "theta": 1.0}
    return Plan(divided_plan(MODEL, (0.1,), (0.1, 0.1), schedule, **given))


@cache
def model_and_tokenizer() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    return model, AutoTokenizer.from_pretrained(MODEL)


def expected(text: str) -> tuple[tuple[int, ...], list[int]]:
    """Token ids of the prompt, and those that the whole model generates."""
    model, tokenizer = model_and_tokenizer()
    given = tokenizer(text, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    prompt = given["input_ids"][0].tolist()
    return tuple(prompt), made[len(prompt) :]


async def ready(engine: PipelineEngine) -> None:
    while engine.status == "loading":
        await asyncio.sleep(0.05)
    assert engine.status == "ready"


def with_engine(
    plan: Plan, use: Callable[[PipelineEngine], Awaitable[None]], trace_to: str | None = None
) -> None:
    """Run `use` while an engine is ready, and end it."""

    async def whole() -> None:
        await ready(engine)
        await use(engine)

    options = RunOptions(policy="orca", prefill_chunk_tokens=3, trace_to=trace_to)
    if plan.spec.prefill_plan is not None:
        options = RunOptions(policy="exegpt", trace_to=trace_to)
    engine = PipelineEngine(plan.spec, options)
    engine.start()
    try:
        asyncio.run(whole())
    finally:
        engine.close()
    assert engine.status == "draining"


def generation(engine: PipelineEngine, name: str, ids: tuple[int, ...]) -> Request:
    return Request(name, ids, NEW_TOKENS, engine.sampling, draw_id=name)


def logprobs_of(prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the whole model, in the plan's dtype, for each of the new tokens."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tuple(tokens)])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def assert_logprobs(events: list[TokenEvent], prompt: tuple[int, ...]) -> None:
    """The tokens are greedy ones, each with those of the three most probable."""
    wanted = logprobs_of(prompt, [event.token_id for event in events])
    for event, row in zip(events, wanted, strict=True):
        best = row.topk(3)
        assert event.logprobs is not None
        logprob, top = event.logprobs.logprob, event.logprobs.top
        assert logprob == pytest.approx(best.values[0].item(), abs=1e-4)
        assert top[0] == (event.token_id, logprob)
        assert [each for each, _ in top] == best.indices.tolist()
        assert [each for _, each in top] == pytest.approx(best.values.tolist(), abs=1e-4)


async def assert_completions_have_them(engine: PipelineEngine) -> None:
    """Over HTTP, of tokens that are drawn."""
    body = {"model": engine.model_name, "prompt": PROMPTS[1], "logprobs": 2}
    body |= {"temperature": 1.5, "seed": 1}
    async with client_of(Service(engine, ServeOptions())) as client:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        both = await client.post(COMPLETIONS, json=body | {"logprobs": 0, "top_p": 1e-9})
    (choice,) = answer["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    lengths = [len(token) for token in told["tokens"]]
    assert told["text_offset"] == [sum(lengths[:number]) for number in range(len(lengths))]
    for token, own, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert top[token] >= own
        assert 2 <= len(top) <= 3
    best = both.json()["choices"][0]["logprobs"]
    alone = zip(best["tokens"], best["token_logprobs"], strict=True)
    assert best["top_logprobs"] == [{token: own} for token, own in alone]


async def assert_heads_are_shared(engine: PipelineEngine) -> None:
    """A prompt that comes again is computed but for its last tokens, with the same answer."""
    ids = (await engine.encode(Row("p", text="def f(x): return x\n" * 9)))[:70]
    body = {"model": engine.model_name, "prompt": list(ids), "temperature": 0, "max_tokens": 5}
    async with client_of(Service(engine, ServeOptions())) as client:
        answers = [(await client.post(COMPLETIONS, json=body)).json() for _ in range(3)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    found = [each["usage"].get("prompt_tokens_details") for each in answers]
    assert found == [None, {"cached_tokens": 64}, {"cached_tokens": 64}]


async def assert_traces_go_over_all_stages(engine: PipelineEngine, exported: Exported) -> None:
    """What each stage computes of a request lies within it, in its trace."""
    body = {"model": engine.model_name, "prompt": "yield x", "max_tokens": 6, "ignore_eos": True}
    metrics = ServeMetrics(clock=time.perf_counter)
    service = Service(engine, ServeOptions(), metrics=metrics, tracer=engine.tracer)
    async with client_of(service) as client:
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert engine.tracer is not None
    await asyncio.to_thread(engine.tracer.flush)
    spans = exported.spans
    (root,) = (each for each in spans if each.name == "request")
    assert {each.context.trace_id for each in spans} == {root.context.trace_id}
    assert all(root.start_time <= each.start_time < each.end_time for each in spans)
    assert group_has_all(
        engine, {(each.name, each.attributes.get("llmpq.stage")) for each in spans}
    )
    prompt = len(await engine.encode(Row("p", text="yield x")))
    for each in spans:
        wanted = {"prefill": prompt, "decode": 5}.get(each.name)
        assert each.attributes.get("llmpq.tokens") == wanted


def group_has_all(engine: PipelineEngine, told: set[tuple[str, Any]]) -> bool:
    """Whether each stage is told of: of a divided plan those that prefill, then the others."""
    assert engine.group is not None
    stages = engine.group.plan.stages
    parts = {name for name, stage in told if stage is None}
    assert parts == {"request", "tokenize", "generate", "queue", "text"}
    return {stage for _, stage in told if stage is not None} == set(range(len(stages)))


@pytest.mark.parametrize("name", ["plan", pytest.param("divided", marks=pytest.mark.rare)])
def test_many_answers_at_once_are_those_of_generate(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Observer, "_ping", lambda *_: ClockOffset(0.0, 0.0))  # of one machine
    exported = Exported()
    tracer = RequestTracer(exported.provider)
    monkeypatch.setattr("llmpq.run.spans.open_tracer", lambda url, model: tracer)

    async def use(engine: PipelineEngine) -> None:
        async def answer(number: int, text: str) -> None:
            await asyncio.sleep(0.02 * number)
            ids = await engine.encode(Row("p", text=text))
            asked = replace(
                generation(engine, str(number), ids), top_logprobs=(None, 3)[number % 2]
            )
            events = [e async for e in engine.generate(asked)]
            prompt, tokens = expected(text)
            assert ids == prompt
            assert [event.token_id for event in events] == tokens
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
            assert events[-1].finish_reason in ("stop", "length")
            if number % 2:
                assert_logprobs(events, prompt)
            assert {e.logprobs is None for e in events} == {number % 2 == 0}
            _, tokenizer = model_and_tokenizer()
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            assert await engine.decode(tokens) == whole

        await asyncio.gather(*(answer(i, text) for i, text in enumerate(PROMPTS)))
        await assert_completions_have_them(engine)
        if name == "plan":
            await assert_heads_are_shared(engine)
        assert (engine.queue.waiting, engine.queue.running, engine.queue.kv_tokens_used) == (0,) * 3

        await assert_traces_go_over_all_stages(engine, exported)

    with_engine(request.getfixturevalue(name), use, "http://localhost:4318")


def test_a_generation_that_nobody_reads_any_more_leaves_its_room(plan: Plan) -> None:
    async def use(engine: PipelineEngine) -> None:
        ids = await engine.encode(Row("p", text=PROMPTS[0]))
        for number in range(20):
            first: TokenEvent | None = None
            async with aclosing(
                engine.generate(generation(engine, f"left-{number}", ids))
            ) as events:
                first = await anext(events)
            assert first is not None
        last = [e async for e in engine.generate(generation(engine, "last", ids))]
        assert [event.token_id for event in last] == expected(PROMPTS[0])[1]
        with pytest.raises(PromptTooLongError):
            await engine.encode(Row("p", text="word " * 400))
        engine.close()
        with pytest.raises(EngineStoppingError):
            await anext(engine.generate(generation(engine, "late", ids)))

    with_engine(plan, use)


def test_a_copy_that_is_lost_costs_no_answer_and_comes_back(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipeline does not recover by itself here; its requests go on at the other copy."""
    monkeypatch.setattr(Restarts, "pause_before", lambda *_: 0.1)
    engine = PipelineEngine(plan.spec, RunOptions(policy="orca", retries=0))
    deaths = 0

    async def answer(number: int, text: str) -> None:
        nonlocal deaths
        ids = await engine.encode(Row("p", text=text))
        asked = generation(engine, f"{deaths}-{number}", ids)
        tokens: list[int] = []
        async for event in engine.generate(asked):
            tokens.append(event.token_id)
            if not deaths and number == 5 and len(tokens) == 3:
                deaths += 1
                ray.kill(pool.replicas[1].group.stages[1].actor)
        assert tokens == expected(text)[1]

    async def until_all_ready() -> None:
        while len(pool.ready_plans) < 2:
            await asyncio.sleep(0.05)

    async def whole() -> None:
        await until_all_ready()
        await asyncio.gather(*(answer(i, text) for i, text in enumerate(PROMPTS)))
        while pool.replicas[1].error is None:  # perhaps all had ended when it was killed
            await asyncio.sleep(0.05)
        assert engine.status == "ready"
        await until_all_ready()
        await asyncio.gather(*(answer(i, text) for i, text in enumerate(PROMPTS)))

    engine.start(copies=2)
    try:
        while engine.group is None:
            time.sleep(0.05)
        pool: Any = engine.group
        asyncio.run(whole())
        assert deaths == 1
        assert engine.queue.slots == 8
    finally:
        engine.close()
