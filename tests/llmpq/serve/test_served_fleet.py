"""`llmpq serve` of a fleet, over HTTP and Ray: the tokens of `generate` from all its pipelines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.stage_figures import StageStats
from llmpq import Cluster, Fleet, Workload
from llmpq.cli.serve import main
from llmpq.serve import pipeline_engine
from llmpq.serve.server import Server
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetRecord, FleetSpec
from planner.plan.file import PLAN_VERSION
from tests.llmpq.serve.asking import COMPLETIONS
from tests.paths import DEMO_MODEL

PROMPTS = ["def f(x):", "class A", "import os", "The list", "return", "for i in"]
NEW_TOKENS = 12
PIPELINE = """
name: one
nodes: [{name: NAME, accelerators: {KIND: 1}, usable_memory_gib: 0.1}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""


@pytest.fixture
def fleet_file(tmp_path: Path) -> str:
    """Two pipelines of the demo model with one emulated device each."""
    options = {"bits": [16], "dtype": "float32", "theta": 1.0}
    plans = []
    for name, kind, batch in (("a", "T4", 2), ("b", "V100-SXM2-16GB", 4)):
        text = PIPELINE.replace("NAME", name).replace("KIND", kind)
        cluster = Cluster(ClusterSpec.from_dict(yaml.safe_load(text)))
        plans.append(cluster.plan(DEMO_MODEL, Workload(batch, 32, NEW_TOKENS), **options).spec)
    record = FleetRecord(1.0, 2, 0.0, 1e9)
    fleet = FleetSpec(PLAN_VERSION, "two", tuple(plans), (), 1.0, 1.0, record)
    Fleet(fleet).save(tmp_path / "fleet.json")
    return str(tmp_path / "fleet.json")


class KeptEngine(pipeline_engine.PipelineEngine):
    """Is there for the test, and keeps its figures when it is closed."""

    made: list[KeptEngine]
    figures: tuple[StageStats, ...] | None = None

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.made.append(self)

    def close(self) -> None:
        self.figures = None if self.group is None else self.group.observer.figures()
        super().close()


@pytest.mark.rare  # test_pipeline_engine.py serves copies
@pytest.mark.usefixtures("local_ray")
def test_the_command_serves_a_fleet_from_all_its_pipelines(
    fleet_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    KeptEngine.made = []
    texts: list[str] = []

    async def ask(client: httpx2.AsyncClient, prompt: str) -> str:
        body = {"model": "demo_model", "prompt": prompt, "max_tokens": NEW_TOKENS}
        answer = await client.post(COMPLETIONS, json=body | {"temperature": 0})
        return answer.json()["choices"][0]["text"]

    async def ask_all(server: Server) -> None:
        running = asyncio.create_task(server.serve())
        (engine,) = KeptEngine.made
        while engine.group is None or len(engine.group.ready_plans) < 2:
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{server.bound_port}"
        async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
            texts.extend(await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS)))
        server.should_exit = True
        await running

    monkeypatch.setattr(pipeline_engine, "PipelineEngine", KeptEngine)
    monkeypatch.setattr(Server, "run", lambda server: asyncio.run(ask_all(server)))
    assert main(["--plan", fleet_file, "--port", "0", "--batch_dir", "none"]) == 0
    assert texts == generated()
    (engine,) = KeptEngine.made
    assert engine.figures is not None
    assert all(each.prefill_tokens + each.decode_tokens > 0 for each in engine.figures)


def generated() -> list[str]:
    """The answers of the whole model."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    found = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        tokens = made[given["input_ids"].shape[1] :]
        found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return found
