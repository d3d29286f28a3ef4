"""The demo with a group of two CPUs (`docs/planning.md`): its commands, on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmpq import Plan
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from tests.paths import DEMO_MODEL, EXAMPLES, SPECS

NEW_TOKENS, PROMPTS = 12, 12


@pytest.mark.rare  # the demo; test_rank_groups.py has smaller models
@pytest.mark.usefixtures("local_ray", "no_waiting")
def test_two_devices_that_share_every_layer_give_the_tokens_of_generate(tmp_path: Path) -> None:
    lines = (EXAMPLES / "demo_prompts.jsonl").read_text().splitlines()[:PROMPTS]
    prompts, plan, output = (tmp_path / name for name in ("in.jsonl", "plan.json", "out.jsonl"))
    prompts.write_text("\n".join(lines))
    planning = ["--model", str(DEMO_MODEL), "--cluster", str(SPECS / "demo_group_cpu.yaml")]
    planning += ["--input", str(prompts), "--n", str(NEW_TOKENS), "--tensor_parallel", "2"]
    exact = ["--bits", "16", "--dtype", "float32"]
    assert plan_cli.main([*planning, *exact, "-o", str(plan)]) == 0
    (stage,) = Plan.load(plan).spec.stages
    assert stage.device_names == ("here/CPU:0", "here/CPU:1")
    running = ["--plan", str(plan), "--input", str(prompts), "--output", str(output)]
    assert run_cli.main([*running, "--ignore_eos"]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    expected = generated(list(map(json.loads, lines)))
    assert {each["custom_id"]: each["token_ids"] for each in found} == expected


def generated(rows: list[dict[str, str]]) -> dict[str, list[int]]:
    """The tokens that transformers' `generate` gives in float32 for each row, by its id."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    found = {}
    for row in rows:
        given = tokenizer(row["prompt"], return_tensors="pt")
        tokens = model.generate(**given, **length)
        found[row["custom_id"]] = tokens[0, given["input_ids"].shape[1] :].tolist()
    return found
