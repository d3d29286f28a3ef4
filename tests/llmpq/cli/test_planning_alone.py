"""Planning without weights, torch or Ray: what is imported, misspelt and shipped."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from llmpq import Cluster
from llmpq.cli import plan as plan_cli
from tests.paths import SPECS


def test_unknown_option_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_cli.main(["--modle", "opt-30b"])
    assert caught.value.code == 2
    assert "--modle" in capsys.readouterr().err


def test_planning_imports_neither_torch_nor_ray_nor_transformers() -> None:
    code = (
        "import sys; from llmpq import Cluster, Workload;"
        "Cluster.from_counts(['T4'], [1]).plan('opt-125m', Workload(4, 64, 16));"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_shipped_cluster_file_is_known_yaml() -> None:
    folder = SPECS
    for path in folder.glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["nodes"], path
        assert Cluster.from_yaml(path).spec.devices
