"""Forms over HTTP: OpenAI's own client and pydantic read what the demo model is made to answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from llmpq import Cluster, Workload
from llmpq.run.options import RunOptions
from llmpq.serve.options import ServeOptions
from llmpq.serve.pipeline_engine import PipelineEngine
from llmpq.serve.server import Server
from llmpq.serve.service import Service
from quant.common.errors import SpecError
from tests.llmpq.conftest import ONE_DEVICE
from tests.paths import DEMO_MODEL

pytestmark = pytest.mark.usefixtures("local_ray")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ASKED = [{"role": "user", "content": "A pet?"}]


class Pet(BaseModel):
    """With all that pydantic's schemas are made of: references, unions, limits."""

    class Home(BaseModel):
        street: str = Field(max_length=8)

    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    homes: list[Home] = Field(max_length=2)
    chip: int | None = Field(le=9, ge=0)


def served(tmp_path: Path, schema: dict[str, Any]) -> PipelineEngine:
    """The demo model, with a schema for requests that ask for no form."""
    (tmp_path / "cluster.yaml").write_text(ONE_DEVICE.replace("0.01", "0.1"))
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    given = {"bits": [16], "dtype": "float32", "theta": 1.0}
    cluster = Cluster.from_yaml(tmp_path / "cluster.yaml")
    plan = cluster.plan(DEMO_MODEL, Workload(8, 32, 400), **given)
    options = RunOptions(chat_template=tmp_path / "t.jinja", json_schema=schema)
    return PipelineEngine(plan.spec, options)


async def assert_answers_have_their_forms(client: openai.AsyncOpenAI) -> None:
    """Eight drawn answers at once, a stream, completions, and what is refused."""
    model = (await client.models.list()).data[0].id
    parsed = await client.chat.completions.parse(
        model=model,
        messages=ASKED,
        response_format=Pet,
        n=8,
        temperature=1.0,
        seed=1,
        logprobs=True,
    )
    assert all(isinstance(each.message.parsed, Pet) for each in parsed.choices)
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": Pet.model_json_schema()},
    }
    stream = await client.chat.completions.create(
        model=model, messages=ASKED, response_format=schema, stream=True
    )
    Pet.model_validate_json("".join([c.choices[0].delta.content or "" async for c in stream]))
    for given, fits in (
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}.__contains__),
        ({"guided_regex": "[0-9]{4}"}, lambda text: text.isdecimal() and len(text) == 4),
        ({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}},
         lambda text: json.loads(text) == {"a": 1}),
    ):  # fmt: skip
        made = await client.completions.create(
            model=model, prompt=["def", [5, 6]], extra_body=given, temperature=1.0
        )
        assert [(each.finish_reason, fits(each.text)) for each in made.choices] == [
            ("stop", True)
        ] * 2
    plain = await client.completions.create(model=model, prompt="a")
    assert json.loads(plain.choices[0].text) == {"a": 1}
    text = {"response_format": {"type": "text"}}
    free = await client.completions.create(model=model, prompt="a", max_tokens=4, extra_body=text)
    assert "{" not in free.choices[0].text
    await call_tools(client, model)
    never = {"guided_json": {"type": "integer", "minimum": 5, "maximum": 4}}
    with pytest.raises(openai.BadRequestError, match="guided_json cannot be kept: Unsat"):
        await client.completions.create(model=model, prompt="a", extra_body=never)


async def call_tools(client: openai.AsyncOpenAI, model: str) -> None:
    """Drawn answers that must call, of which one is parsed by the client each time."""
    named = {"type": "function", "function": {"name": "Pet"}}
    for choice in ("required", named):
        called = await client.chat.completions.parse(
            model=model,
            messages=ASKED,
            tools=[openai.pydantic_function_tool(Pet)],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.0,
            seed=3,
            n=4,
        )
        for each in called.choices:
            (call,) = each.message.tool_calls
            assert isinstance(call.function.parsed_arguments, Pet)
            assert (each.finish_reason, each.message.content) == ("tool_calls", None)


def test_a_default_form_that_cannot_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"structured_outputs .* cannot be kept: Unsat"):
        served(tmp_path, {"type": "integer", "minimum": 5, "maximum": 4})


def test_the_client_of_openai_parses_every_answer(tmp_path: Path) -> None:
    engine = served(tmp_path, {"const": {"a": 1}})

    async def scenario() -> None:
        server = Server(Service(engine, ServeOptions(port=0)))
        running = asyncio.create_task(server.serve())
        while not server.started or engine.status == "loading":
            await asyncio.sleep(0.02)
        address = f"http://127.0.0.1:{server.bound_port}/v1"
        try:
            async with openai.AsyncOpenAI(base_url=address, api_key="-", max_retries=0) as client:
                await assert_answers_have_their_forms(client)
        finally:
            server.should_exit = True
            await running

    engine.start()
    try:
        asyncio.run(scenario())
    finally:
        engine.close()
