"""What log-probabilities cost: passes of prompts and decode steps with them and without, and
likelihoods over HTTP as lm-evaluation-harness's `local-completions` asks for them, on this CPU.

    python -m benchmarks.speed.logprobs [--model FOLDER] [--turns 8] [--requests 64]

SmolLM2-135M-Instruct in bfloat16 unless another model is given: the smaller the model, the larger
the share of the head. One stage with all layers computes the same prompts in turns, plain and with
`prompt_logprobs` of 0, 1 and 20; ratios are taken turn by turn, and the first warms up. Seconds are
those of one core, of all threads of the process together. Requests of one prompt each go to a
server in this process, eight at a time, with `echo`, `logprobs` 1 and `max_tokens` 1, and plain;
every turn has its own, so that none begins with what is kept of an earlier one.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from benchmarks.lab import header, processor_name, spread, table_row
from benchmarks.speed.structured import given, stage_alone

PROMPTS, PROMPT_TOKENS, AT_ONCE = 8, 128, 8
ASKED = (None, 0, 1, 20)
CLUSTER = "name: one\nnodes: [{name: a, accelerators: {CPU: 1}, threads: 1, memory_gib: 3}]\n"


def passes(folder: Path, turns: int) -> list[str]:
    """Rows of a table with tokens/s of prompts by what is asked of each, and their ratios."""
    import numpy as np
    import torch

    from actors.messages import Request, Sampling
    from actors.schedule.driver import PipelineDriver
    from actors.schedule.live_run import Inbox, LiveRun
    from actors.schedule.scheduler import QueueSizes
    from actors.schedule.table import make_scheduler

    longest = PROMPT_TOKENS + 1
    stage = stage_alone(folder, PROMPTS, longest)

    class Alone:
        """A pipeline of the one stage."""

        stages = 1

        def submit(self, batch: Any, token_ids: Any) -> Any:
            return stage.step(batch, torch.from_numpy(token_ids))

        def result(self, handle: Any) -> Any:
            return handle

    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(3, 1000, PROMPT_TOKENS).tolist()) for _ in range(PROMPTS)]
    sizes = QueueSizes(PROMPTS, PROMPTS, PROMPTS, longest)

    def seconds(asked: int | None) -> float:
        plain = [Request(str(n), ids, 1, Sampling()) for n, ids in enumerate(prompts)]
        inbox = Inbox(1)
        inbox.put([replace(each, prompt_logprobs=asked) for each in plain])
        inbox.close()
        driver = PipelineDriver(make_scheduler(sizes, 1), Alone())
        began = process_time()
        told = [each for some in LiveRun(driver, inbox, longest, 0).events() for each in some]
        took = process_time() - began
        assert all((each.prompt_logprobs is None) == (asked is None) for each in told)
        return took

    took: dict[int | None, list[float]] = {asked: [] for asked in ASKED}
    for _ in range(turns + 1):
        for asked, times in took.items():
            times.append(seconds(asked))
    tokens, plain = PROMPTS * PROMPT_TOKENS, took[None][1:]
    return [
        table_row((
            "plain" if asked is None else f"prompt_logprobs {asked}",
            spread([tokens / each for each in times[1:]], 0),
            spread([a / b for a, b in zip(plain, times[1:], strict=True)], 3),
        ))
        for asked, times in took.items()
    ]  # fmt: skip


def likelihoods(folder: Path, requests: int) -> list[str]:
    """Rows of a table with requests/s and prompt tokens/s over HTTP."""
    import httpx2
    import numpy as np

    from llmpq import Cluster, Workload
    from llmpq.run.options import RunOptions
    from llmpq.serve.options import ServeOptions
    from llmpq.serve.pipeline_engine import PipelineEngine
    from llmpq.serve.server import Server
    from llmpq.serve.service import Service

    with TemporaryDirectory() as made:
        path = Path(made) / "cluster.yaml"
        path.write_text(CLUSTER)
        workload = Workload(PROMPTS, PROMPT_TOKENS, 1)
        plan = Cluster.from_yaml(path).plan(folder, workload, bits=[16], dtype="bfloat16")
    engine = PipelineEngine(plan.spec, RunOptions(policy="orca"))
    draw = np.random.default_rng(1)
    named = {"model": engine.model_name, "max_tokens": 1, "temperature": 0}
    kinds = {"plain": {}, "echo, logprobs 1": {"echo": True, "logprobs": 1}}

    async def race() -> dict[str, list[float]]:
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        server = Server(Service(engine, ServeOptions(port=0)))
        running = asyncio.create_task(server.serve())
        while not server.started or engine.status == "loading":
            await asyncio.sleep(0.05)
        async with httpx2.AsyncClient() as client:
            for _ in range(4):
                for kind, fields in kinds.items():
                    url = f"http://127.0.0.1:{server.bound_port}/v1/completions"
                    prompts = draw.integers(3, 1000, (requests, PROMPT_TOKENS)).tolist()
                    took[kind].append(await _seconds(client, url, named | fields, prompts))
        server.should_exit = True
        await running
        return took

    engine.start()
    try:
        took = asyncio.run(race())
    finally:
        engine.close()
    return [
        table_row((
            kind,
            spread([requests / each for each in times[1:]], 1),
            spread([requests * PROMPT_TOKENS / each for each in times[1:]], 0),
        ))
        for kind, times in took.items()
    ]  # fmt: skip


async def _seconds(client: Any, url: str, body: dict[str, Any], prompts: list[list[int]]) -> float:
    """Seconds of a request of `body` for each prompt, some at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> None:
        async with room:
            answer = await client.post(url, json=body | {"prompt": prompt}, timeout=600)
        assert answer.status_code == 200, answer.text

    began = perf_counter()
    await asyncio.gather(*map(one, prompts))
    return perf_counter() - began


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    options = given(parser)
    print(f"{processor_name()}; {options.model.name}, prompts of {PROMPT_TOKENS} tokens\n")
    asked = f"{PROMPTS} prompts together"
    print(header((asked, "tokens/s of a core", "of plain")), *passes(options.model, options.turns),
          sep="\n", flush=True)  # fmt: skip
    ray.init(address="local", log_to_driver=False)
    print("\n" + header((f"{AT_ONCE} at a time", "requests/s", "prompt tokens/s")))
    print(*likelihoods(options.model, options.requests), sep="\n")


if __name__ == "__main__":
    main()
