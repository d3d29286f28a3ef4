"""The packed-shard cache and the transport as users set them, from the command line and Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from llmpq.cli.run_options import run_options, run_parser
from quant.common.errors import SpecError
from quant.loading.cache_settings import CacheSettings


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], CacheSettings()),
        (["--cache_dir", "/there", "--cache-limit-gib", "2.5"], CacheSettings("/there", 2.5)),
        (["--no-cache"], CacheSettings(enabled=False)),
        (["--no_cache", "--transport", "ray"], CacheSettings(enabled=False)),
    ],
)
def test_command_line(options: list[str], settings: CacheSettings) -> None:
    files = ["--plan", "plan.json", "--input", "in.jsonl", "--output", "out.jsonl"]
    chosen = run_options(run_parser().parse([*files, *options]))
    assert chosen.cache == settings
    assert chosen.transport == ("ray" if "ray" in options else "auto")


def test_a_limit_that_is_none(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SpecError, match="cache limit is -1 GiB"):
        plan.run([[5]], cache_limit_gib=-1)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [3]}\n')
    files = ["--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    arguments = ["--plan", str(tmp_path / "plan.json"), *files, "--cache_limit_gib", "0"]
    assert run_cli.main(arguments) == 2
    assert "cache limit is 0 GiB" in capsys.readouterr().err


def test_a_folder_of_nobody(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan.json")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [3]}\n')
    files = ["--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    plan_file = str(tmp_path / "plan.json")
    assert run_cli.main(["--plan", plan_file, *files, "--cache_dir", "~no-such-user/x"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("llmpq-dist: error: cache folder ~no-such-user/x")
    assert message.count("\n") == 1
