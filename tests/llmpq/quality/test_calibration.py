"""Plans of rounding `gptq`: the checkpoint that their runs take is calibrated once, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmpq import Cluster, Plan, Workload
from llmpq.quality.calibration import with_calibrated
from llmpq.run.options import RunOptions
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from tests.actors.models import random_prompts
from tests.llmpq.conftest import ONE_DEVICE


@pytest.fixture
def calibrated(tiny: tuple[Path, Any], tmp_path: Path) -> Plan:
    file = tmp_path / "cluster.yaml"
    file.write_text(ONE_DEVICE)
    workload = Workload(global_batch=2, prompt_length=8, new_tokens=4)
    options: dict[str, Any] = {"dtype": "float32", "bits": [4], "rounding": "gptq"}
    return Cluster.from_yaml(file).plan(tiny[0], workload, **options)


def test_a_checkpoint_is_made_once_and_is_that_of_every_later_run(
    calibrated: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(cache_dir=tmp_path / "cache")
    prompts = random_prompts([40] * 8)
    made = with_calibrated(calibrated.spec, options, lambda _: prompts)
    folder = Path(str(made.model))
    assert folder.parent == tmp_path / "cache" / "gptq"
    assert Checkpoint(folder).keeps_codes
    other = with_calibrated(calibrated.spec, options)  # on random ids
    assert other.model != made.model

    def never(*_: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr("llmpq.quality.quantize.quantize_checkpoint", never)
    assert with_calibrated(calibrated.spec, options, lambda _: prompts) == made
    assert with_calibrated(calibrated.spec, options) == other
    assert with_calibrated(calibrated.spec, made) == made
    weighted = replace(calibrated.spec, rounding="weighted")
    assert with_calibrated(weighted, options) == options


def test_without_a_folder_to_keep_it_the_run_is_refused(calibrated: Plan) -> None:
    with pytest.raises(SpecError, match="keeps a calibrated checkpoint"):
        calibrated.run([[3]], no_cache=True)


def test_rounding_beside_a_quantized_checkpoint_is_refused_in_planning(
    calibrated: Plan, tmp_path: Path
) -> None:
    made = with_calibrated(calibrated.spec, RunOptions(cache_dir=tmp_path / "cache"))
    cluster = Cluster.from_yaml(tmp_path / "cluster.yaml")
    with pytest.raises(SpecError, match="rounding gptq is calibrated on weights that are not"):
        cluster.plan(made.model, Workload(2, 8, 4), rounding="gptq")
