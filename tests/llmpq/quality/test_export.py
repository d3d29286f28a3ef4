"""`llmpq export vllm`: the weights, the script as a shell runs it, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from llmpq import Cluster, Workload
from llmpq.cli.measure.checkpoints import export_main
from llmpq.quality.vllm import VllmPlan
from planner.plan.spec import PlanSpec
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from tests.actors.models import save_tiny
from tests.llmpq.commands import exit_code
from tests.llmpq.quality.test_quantize import _ROPE

pytestmark = pytest.mark.usefixtures("short_measurement")
CONFIG = LlamaConfig(**_ROPE | {"num_hidden_layers": 3}, num_key_value_heads=2)
QUICK = ["--sequences", "4", "--sequence_length", "40"]
FAKE = '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$VLLM_PP_LAYER_PARTITION"\nprintf "%s\\n" "$@"\n'


def plan_of(folder: Path, kinds: dict[str, int], bits: list[int], **changes: Any) -> PlanSpec:
    """A plan of the tiny model in `folder`, a stage on every device, with other fields."""
    if not (folder / "model").exists():
        save_tiny(folder / "model", CONFIG)
    cluster = Cluster.from_counts(list(kinds), list(kinds.values()))
    planned = cluster.plan(
        folder / "model", Workload(4, 8, 4), bits=bits, keep_all_devices=True, tensor_parallel=1
    )
    return replace(planned.spec, **changes)


def started(script: Path, folder: Path, *options: str, **variables: str) -> tuple[int, list[str]]:
    """What the script calls vLLM with: a line of variables, then the arguments."""
    (folder / "vllm").write_text(FAKE)
    (folder / "vllm").chmod(0o755)
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [script, *options], env=variables, capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout or done.stderr).splitlines()


@pytest.mark.parametrize(
    ("kinds", "method", "dtype"),
    [({"T4": 2}, "compressed-tensors", "float16"), ({"V100-32GB": 2}, "gptq", "float16")],
)
def test_weights_and_script(
    kinds: dict[str, int],
    method: str,
    dtype: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = plan_of(tmp_path, kinds, [4])
    plan.save(tmp_path / "plan.json")
    made = tmp_path / "made"
    assert (
        exit_code(export_main, ["vllm", str(tmp_path / "plan.json"), "-o", str(made), *QUICK]) == 0
    )
    out = capsys.readouterr()
    assert f"start it: sh {made / 'serve.sh'}" in out.out
    assert ("gptq_gemm" in out.err) == (method == "gptq")
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == method
    assert settings.get("sym", True)
    coded = Checkpoint(made).coded("model.layers.2.mlp.up_proj")
    assert coded is not None
    code, lines = started(made / "serve.sh", tmp_path, "--port", "1")
    assert code == 0
    partition = ",".join(str(len(stage.layers)) for stage in plan.stages)
    assert lines[0] == f"0,1 {partition}"
    words = " ".join(lines[1:])
    assert words.startswith(f"serve {made} --pipeline-parallel-size 2 --tensor-parallel-size 1 ")
    assert f"--dtype {dtype} --max-model-len 12 --max-num-seqs 4" in words
    assert ("--quantization gptq" in words) == (method == "gptq")
    assert words.endswith("--port 1")


def test_plain_weights_stay_where_they_are(tmp_path: Path) -> None:
    """On two nodes, the ranks of which are told apart by their number; names are never run."""
    plan = plan_of(tmp_path, {"A100-40GB": 1, "A100-80GB": 1}, [16])
    assert len({stage.node for stage in plan.stages}) == 2
    evil = "n$(touch evil)\ntouch evil\n`touch evil`'\""
    model = replace(plan.model, name=evil)
    stages = tuple(replace(s, node=s.node + evil, device=f"{evil}{s.device}") for s in plan.stages)
    vllm = VllmPlan(replace(plan, model=model, stages=stages), "plan.json")
    assert vllm.method is None
    script = tmp_path / "serve.sh"
    script.write_text(vllm.script(str(tmp_path / "a model's $(touch evil)")))
    script.chmod(0o755)
    code, lines = started(script, tmp_path, NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert code == 0
    assert lines[0].startswith("0 ")
    assert lines[2] == str(tmp_path / "a model's $(touch evil)")
    words = " ".join(lines)
    assert "--headless --nnodes 2 --node-rank 1 --master-addr 10.0.0.1" in words
    assert started(script, tmp_path, MASTER_ADDR="10.0.0.1")[0] == 2
    assert started(script, tmp_path, NODE_RANK="2", MASTER_ADDR="10.0.0.1")[0] == 2
    assert not list(tmp_path.rglob("evil"))
    assert not Path("evil").exists()


def test_what_vllm_cannot_do(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"T4": 2}, [3, 4])
    first, last = plan.stages
    four = {"bitwidths": (4,) * len(first.layers)}
    first = replace(first, **four)
    last = replace(last, bitwidths=(4,) * len(last.layers))
    hosted = replace(first, hosted_experts=(0,))
    other = replace(last, expert_bitwidths=(8,) * len(last.layers))
    narrow = replace(last, bitwidths=(3,) * len(last.layers))
    pair = replace(last, devices=("node0/T4:1", "node0/T4:2"))
    away = replace(last, node="node1", devices=pair.devices)
    gptq = {"quant_method": "gptq", "sym": False}
    wrong: dict[str, tuple[tuple[Any, ...], Any]] = {
        r"experts of layers 0 lie in the host's memory .*host_memory_gib": ((hosted, last), None),
        r"layer \d has 4 bits and its experts 8": ((first, other), None),
        r"layers of 3 bits, .*Marlin takes 4, 8 and 16; plan with --format vllm": (
            (first, narrow),
            None,
        ),
        r"stages have 1 and 2 devices": ((first, pair), None),
        r"GPTQ weights have zeros": ((first, last), gptq),
    }
    for message, (stages, stored) in wrong.items():
        with pytest.raises(SpecError, match=f"vLLM cannot serve plan.json: .*{message}"):
            VllmPlan(replace(plan, stages=stages), "plan.json", stored)
    grown = replace(first, devices=("node0/T4:0", "node0/T4:1"))
    third = replace(grown, node="node2")
    with pytest.raises(SpecError, match="4 of node0 and 2 of node1 in this order"):
        VllmPlan(replace(plan, stages=(grown, grown, away)), "plan.json")
    assert VllmPlan(replace(plan, stages=(third, away)), "plan.json").nodes == 2
