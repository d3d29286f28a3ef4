"""The promises of docs/security.md: nothing of others is run, nothing is written or read elsewhere,
secrets stay where they are. Names are only shown: test_shown_names.py; parsers: tests/properties;
what a run leaves: tests/llmpq/cli/test_interrupt.py.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from llmpq import Plan
from llmpq.cli import plan as plan_cli
from llmpq.cli import run as run_cli
from llmpq.cli.common import EXIT_BAD_INPUT
from llmpq.cli.measure.checkpoints import convert_main
from llmpq.jobs.job import OpenJob
from llmpq.jobs.job_output import JobOutput
from llmpq.rows.results import Result
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import INDEX_FILE
from quant.common.errors import CheckpointError
from quant.common.files import write_text, write_whole
from quant.common.text import printable
from quant.loading.cache_folder import CacheKey, NewEntry, ShardCache
from tests.llmpq.fake_jobs import IDENTITY
from tests.llmpq.hostile import with_texts
from tests.llmpq.secret_words import HF_SECRET, RAY_SECRET, with_secrets
from tests.paths import ROOT

PACKAGES = ("llmpq", "actors", "planner", "quant")
OUTSIDE = ("../../outside", "/etc/outside", "..", "a/../../outside", "x\0y", "a\\..\\b")


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", [*OUTSIDE[:4], "../{0}/secret.safetensors", "{1}"])
def test_an_index_names_files_of_its_folder_only(name: str, tmp_path: Path) -> None:
    """Where the file exists and is a good one, too."""
    outside, folder = tmp_path / "outside", tmp_path / "model"
    outside.mkdir()
    folder.mkdir()
    save_file({"w": torch.ones(3)}, outside / "secret.safetensors")
    file = name.format("outside", outside / "secret.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError):
        Checkpoint(folder).read("w")
    (folder / "config.json").write_text("{}")
    os.rename(folder / INDEX_FILE, folder / "pytorch_model.bin.index.json")
    assert convert_main([str(folder), str(tmp_path / "target")]) == EXIT_BAD_INPUT
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_ids_are_only_data(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    row = {"custom_id": name, "prompt": [1]}
    (folder / "in.jsonl").write_text(json.dumps(row) + "\n")
    from llmpq.jobs.inputs import JobInput

    with JobOutput(folder / "out.jsonl") as output:
        job = OpenJob(JobInput.find([folder / "in.jsonl"]), output, IDENTITY)
        for todo in job.todo():
            job.write(Result(todo.custom_id, "text", (1,), "stop"))
        job.finish()
    assert json.loads((folder / "out.jsonl").read_text())["custom_id"] == name
    allowed = {"a", "a/b", "a/b/in.jsonl", "a/b/out.jsonl"}
    assert {n for n in everything_below(tmp_path) if "out.jsonl.job" not in n} == allowed


@pytest.mark.parametrize("label", OUTSIDE)
def test_cached_layers_stay_in_their_folder(label: str, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "a/cache")
    key = CacheKey(label, label)
    cache.store(NewEntry(key, lambda: [("w", torch.ones(4))], {}, 16))
    assert cache.path_of(key).parent == tmp_path / "a/cache"
    assert cache.path_of(key).is_file()
    assert {n for n in everything_below(tmp_path) if not n.startswith("a/cache/")} == {
        "a",
        "a/cache",
    }


@pytest.mark.parametrize("text", ["../../outside", "/etc/outside"])
def test_names_in_a_plan_are_no_places_to_write(text: str, plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    hostile = Plan(with_texts(plan.spec, text))
    hostile.save(folder / "plan.json")
    loaded = Plan.load(folder / "plan.json")
    loaded.report(folder / "report.html")
    arguments = ["--plan", str(folder / "plan.json"), "--output", str(folder / "out.jsonl")]
    (folder / "in.jsonl").write_text('{"prompt": [1]}\n')
    assert run_cli.main([*arguments, "--input", str(folder / "in.jsonl")]) == EXIT_BAD_INPUT
    below = {"a", "a/b", *(f"a/b/{name}" for name in ("plan.json", "report.html", "in.jsonl"))}
    assert everything_below(tmp_path) == below


def test_files_aside_cannot_be_foreseen_or_replaced_by_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("precious")
    seen = set[str]()
    real = os.replace

    def noting(source: Path, target: Path) -> None:
        seen.add(Path(source).name)
        real(source, target)

    monkeypatch.setattr("os.replace", noting)
    for _ in range(3):
        write_whole(path, "new")
    assert len(seen) == 3
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / ".llmpq-known.part").symlink_to(victim)
    with pytest.raises(OSError, match="exists"):
        write_whole(path, "newer")
    assert victim.read_text() == "precious"
    assert path.read_text() == "new"


# --- secrets stay where they are ----------------------------------------------------------------

URL_SECRET = "pa55-in-URL"
SECRETS = (HF_SECRET, RAY_SECRET, URL_SECRET)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return with_secrets(tmp_path)


def test_no_secret_in_messages(
    plan: Plan,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read at its import
    plan.save(tmp_path / "plan.json")
    (tmp_path / "in.jsonl").write_text('{"prompt": [5]}\n')
    rest = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    run = ["--plan", str(tmp_path / "plan.json"), *rest]
    cluster = ["--cluster", str(ROOT / "cluster_specs/single_a100.yaml"), "-o", "p.json"]
    url = f"https://user:{URL_SECRET}@127.0.0.1:1"
    monkeypatch.chdir(tmp_path)
    for main, arguments in (
        (run_cli.main, [*run, "--address", f"ray://user:{URL_SECRET}@127.0.0.1:1"]),
        (run_cli.main, [*run, "--address", "127.0.0.1:1"]),
        (run_cli.main, [*run, "--address", f"user:{URL_SECRET}@127.0.0.1:1"]),
        (run_cli.main, [*run, "--submit", f"user:{URL_SECRET}@127.0.0.1:1"]),
        (run_cli.main, [*run, "--submit", url]),
        (run_cli.main, [*run, "--model", url]),
        (run_cli.main, [*run, "--model", "some/private-model"]),
        (run_cli.main, [*run, "--model", f"some/{HF_SECRET}"]),
        (plan_cli.main, ["--model", "some/private-model", *cluster]),
        (plan_cli.main, ["--model", f"x?token={URL_SECRET}", *cluster]),
    ):
        assert main(arguments) == EXIT_BAD_INPUT, arguments
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert "error" in text
        assert not [secret for secret in SECRETS if secret in text], text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@h/x and http://h/y", "https://***@h/x and http://h/y"),
        ("GET http://h?a=1&token=abc&b=2", "GET http://h?a=1&token=***&b=2"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("hf_abcdefghijkl is", "*** is"),
        ("no Ray at 'u:p@h:1' (x)", "no Ray at '***@h:1' (x)"),
        ("--address=u:p:@ss/w@h:1", "--address=***@h:1"),
        ("ray://u:p@s:/s@[::1]:1 at 12:30 a@b", "ray://***@[::1]:1 at 12:30 a@b"),
        ("new_token=5, tokens=6, a@b", "new_token=5, tokens=6, a@b"),
    ],
)
def test_what_counts_as_a_secret(text: str, shown: str) -> None:
    assert printable(text) == shown


# --- access -------------------------------------------------------------------------------------


@pytest.fixture
def wide_umask() -> Iterator[None]:
    before = os.umask(0o000)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("wide_umask")
def test_the_cache_is_the_users_own_whatever_the_umask(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache")
    key = CacheKey("layer", "text")
    cache.store(NewEntry(key, lambda: [("w", torch.ones(4))], {}, 16))
    assert mode(tmp_path / "cache") == 0o700
    assert mode(cache.path_of(key)) == 0o600


@pytest.mark.parametrize(("umask", "wanted"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644)])
def test_other_files_follow_the_umask(umask: int, wanted: int, plan: Plan, tmp_path: Path) -> None:
    from llmpq.jobs.inputs import JobInput

    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": [1]}\n')
    before = os.umask(umask)
    try:
        plan.save(tmp_path / "plan.json")
        plan.report(tmp_path / "report.html")
        write_text(tmp_path / "trace.json", "{}")
        with JobOutput(tmp_path / "out.jsonl") as output:
            job = OpenJob(JobInput.find([tmp_path / "in.jsonl"]), output, IDENTITY)
            list(job.todo())
            job.write(Result("a", "text", (1,), "stop"))
            job.finish()
    finally:
        os.umask(before)
    for name in ("plan.json", "report.html", "trace.json", "out.jsonl", "out.jsonl.job/job.json"):
        assert mode(tmp_path / name) == wanted, name
    assert mode(tmp_path / "out.jsonl.job") == 0o777 & ~umask
