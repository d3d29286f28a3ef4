"""A plan as a model of lm-evaluation-harness, against the harness's own backend of transformers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import ignore_patterns
from threading import Event, Thread
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig

from llmpq import Cluster, Plan, Workload
from llmpq.run.options import RunOptions
from llmpq.serve.pipeline_engine import PipelineEngine
from quant.common.errors import CheckpointError, InputError, SpecError
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.llmpq.conftest import ONE_DEVICE
from tests.llmpq.serve.asking import COMPLETIONS, serving, url
from tests.llmpq.small_tokenizers import write_byte_tokenizer

pytest.importorskip("lm_eval", reason="the extra lm_eval is not installed")
pytest.importorskip("accelerate", reason="the harness's backend of transformers needs it")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from llmpq.lm_eval import LlmpqLM

BOS = "<s>"
PAIRS = (("Which?", " This."), ("A ", "b"), ("", "no context"), (f"{BOS}twice", " begun"))
TEXTS = ("A text that is longer than the model sees at once. " * 4, "x", "Short.")
GREEDY: dict[str, Any] = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaMA that knows all bytes."""
    path = tmp_path_factory.mktemp("bytes")
    config = LlamaConfig(**CONFIGS["llama"].to_dict() | {"vocab_size": 260})
    save_tiny(path, config)
    write_byte_tokenizer(path, ("<pad>", BOS, "</s>"), begin=BOS)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token, tokenizer.pad_token = "</s>", "<pad>"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def planned(folder: Path) -> Plan:
    path = folder / "cluster.yaml"
    path.write_text(ONE_DEVICE)
    return Cluster.from_yaml(path).plan(folder, Workload(3, 65, 12), dtype="float32", bits=[16])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return HFLM(str(folder), device="cpu", dtype="float32", max_length=64)


def test_likelihoods_are_those_of_the_backend_of_transformers(
    planned: Plan, reference: Any
) -> None:
    model = LlmpqLM(planned, max_length=64, batch_size=8, device="cuda:0")
    pairs = asked("loglikelihood", *PAIRS)
    found, expected = model.loglikelihood(pairs), reference.loglikelihood(pairs)
    assert [each[0] for each in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
    assert [each[1] for each in found] == [each[1] for each in expected]
    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    rolled = model.loglikelihood_rolling(texts)
    assert rolled == pytest.approx(reference.loglikelihood_rolling(texts), abs=1e-4)


@pytest.mark.usefixtures("local_ray")
def test_answers_are_those_of_the_backend_of_transformers(planned: Plan, reference: Any) -> None:
    """Of one warm session, cut at stop strings, of prompts that are longer than what is seen."""
    with closing(LlmpqLM(planned, max_length=64)) as model:
        prompts = [("Which?", GREEDY), (TEXTS[0], GREEDY), ("A", GREEDY | {"max_gen_toks": 12})]
        requests = asked("generate_until", *prompts)
        whole = reference.generate_until(requests)
        assert model.generate_until(requests) == whole
        ends = ((answer[1:], prompt) for answer, (prompt, _) in zip(whole, prompts, strict=True))
        stop, prompt = next((c, prompt) for rest, prompt in ends for c in rest if c.isalnum())
        cut = asked(
            "generate_until", (prompt, GREEDY | {"until": ["\n", stop], "max_gen_toks": 12})
        )
        assert model.generate_until(cut) == reference.generate_until(cut)
        with pytest.raises(InputError, match=r"request 0 \('Which\?'…\): .*best_of"):
            model.generate_until(asked("generate_until", ("Which?", GREEDY | {"best_of": 3})))
        with pytest.raises(InputError, match="asks for 64 new tokens, but 64 are seen"):
            model.generate_until(asked("generate_until", ("Which?", GREEDY | {"max_gen_toks": 64})))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_served_plan_tells_the_same_to_the_harness(
    batch_size: int, planned: Plan, folder: Path
) -> None:
    """Its `local-completions` ask with `echo` and `logprobs` for a new token, which `max_length`
    counts; told of a BOS, they add one to texts that have one, too.
    """
    pytest.importorskip("tenacity", reason="the harness's models of APIs need its extra api")
    pytest.importorskip("aiohttp", reason="the harness's models of APIs need its extra api")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    pairs = asked("loglikelihood", *PAIRS[:3])
    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    expected = LlmpqLM(planned, max_length=64)
    with served(planned) as (url, name):
        model = LocalCompletionsAPI(
            base_url=url + COMPLETIONS,
            model=name,
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            add_bos_token=True,
            batch_size=batch_size,
            max_length=66,
        )
        found = model.loglikelihood(pairs)
        rolled = model.loglikelihood_rolling(texts)
    wanted = expected.loglikelihood(pairs)
    assert [each[0] for each in found] == pytest.approx([e[0] for e in wanted], abs=1e-4)
    assert [each[1] for each in found] == [each[1] for each in wanted]
    assert rolled == pytest.approx(expected.loglikelihood_rolling(texts), abs=1e-4)


@contextmanager
def served(plan: Plan) -> Iterator[tuple[str, str]]:
    """The address of a server of `plan` in another thread, and the model's name."""
    engine = PipelineEngine(plan.spec, RunOptions(policy="orca"))
    ready: Future[str] = Future()
    end = Event()

    async def serve() -> None:
        async with serving(engine) as server:
            while engine.status == "loading":
                await asyncio.sleep(0.05)
            ready.set_result(url(server))
            await asyncio.to_thread(end.wait)

    engine.start()
    running = Thread(target=lambda: asyncio.run(serve()))
    running.start()
    try:
        yield ready.result(timeout=300), engine.model_name
    finally:
        end.set()
        running.join()
        engine.close()


def test_arguments_that_are_none_are_refused(planned: Plan, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="load_in_4bit"):
        LlmpqLM(planned, load_in_4bit=True)
    with pytest.raises(SpecError, match="device 'tpu'"):
        LlmpqLM(planned, device="tpu")
    bare = shutil.copytree(folder, tmp_path / folder.name, ignore=ignore_patterns("tokenizer*"))
    with pytest.raises(CheckpointError, match="no tokenizer can be read"):
        LlmpqLM(planned, model=str(bare))
