"""The job that `llmpq run --submit` makes of a command, and Ray's answers, without a cluster."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmpq import Plan
from llmpq.cli import run as run_cli
from llmpq.cli import submit
from llmpq.cli.run_options import run_parser
from llmpq.cli.submit import entrypoint, exit_code, split_options
from llmpq.jobs.inputs import JobInput
from llmpq.remote import ray_jobs
from llmpq.remote.ray_jobs import JobEnd, RayJobs, dashboard_client, keep_folder_to_driver
from quant.common.errors import DeviceError, InputError, SpecError
from tests.llmpq.fake_jobs import write_prompts


@pytest.fixture
def here(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder one submits from, with a plan and prompts in it."""
    folder = tmp_path / "here"
    (folder / "more").mkdir(parents=True)
    plan.save(folder / "plan.json")
    write_prompts(folder / "a.jsonl", {"prompt": "a"})
    write_prompts(folder / "more" / "b.jsonl", {"prompt": "b"})
    monkeypatch.chdir(folder)
    return folder


def sent(plan: Plan, folder: Path, *command: str) -> list[str]:
    """The job's arguments, behind `exec llmpq-dist`."""
    folder.mkdir(exist_ok=True)
    words = shlex.split(entrypoint(command, plan.spec, folder))
    assert words[:2] == ["exec", "llmpq-dist"]
    return words[2:]


def test_a_template_travels_with_the_job(plan: Plan, here: Path, tmp_path: Path) -> None:
    (here / "mine.jinja").write_text("{{ messages }}")
    given = ["--plan", "plan.json", "--input", "a.jsonl", "--output", "/out.jsonl"]
    arguments = sent(plan, tmp_path / "job", *given, "--chat-template", "mine.jinja")
    named = arguments[arguments.index("--chat_template") + 1]
    assert (tmp_path / "job" / named).read_text() == "{{ messages }}"


def test_the_job_has_the_options_of_the_command(plan: Plan, here: Path, tmp_path: Path) -> None:
    options = ["--temperature=0.5", "--stop", "a b", "'", "$(x)", "--ignore-eos", "--seed", "-3"]
    paths = ["--output", "/shared/out.jsonl", "--trace", "/shared/t.json", "--cluster", "c.yaml"]
    command = ["--strat-file-name", "plan.json", "--input", "a.jsonl", "more", *options, *paths]
    arguments = sent(plan, tmp_path / "job", *command, "--address", "ray://here:1", "--resume")
    given, got = run_parser().parse_args(command), run_parser().parse_args(arguments)
    changed = {"plan", "input", "address", "cluster", "resume", "model"}
    for name in (set(vars(given)) | set(vars(got))) - changed:
        assert getattr(got, name) == getattr(given, name), name
    assert (got.address, got.resume, "cluster" in got) == ("auto", True, False)
    assert got.plan == "plan.json"
    assert Plan.load(tmp_path / "job" / "plan.json").spec == plan.spec


def test_relative_inputs_travel_and_keep_their_names(
    plan: Plan, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--plan", "plan.json", "--output", "/o.jsonl", "--input"]
    before = JobInput.find(["more/b.jsonl", "a.jsonl"])
    got = run_parser().parse_args(sent(plan, tmp_path / "job", *command, "more/b.jsonl", "a.jsonl"))
    before_rows = [(p.place, p.row) for p in before.rows()]
    monkeypatch.chdir(tmp_path / "job")
    after = JobInput.find(got.input)
    assert after.names == before.names == ("more/b.jsonl", "a.jsonl")
    assert [(p.place, p.row) for p in after.rows()] == before_rows
    monkeypatch.chdir(here)
    got = run_parser().parse_args(sent(plan, tmp_path / "j2", *command, "/far/*.parquet", "~/x"))
    assert got.input == ["/far/*.parquet", "~/x"]
    assert not (tmp_path / "j2" / "input").exists()


def test_the_model_of_here_gets_its_absolute_path(plan: Plan, here: Path, tmp_path: Path) -> None:
    command = ["--plan", "plan.json", "--input", "/a", "--output", "/o"]
    (here / "model").mkdir()
    for named, wanted in (("model", str(here / "model")), ("facebook/opt", "facebook/opt")):
        got = sent(plan, tmp_path / "job", *command, "--model", named)
        assert got[got.index("--model") + 1] == wanted
    assert "--model" not in sent(plan, tmp_path / "job", *command)  # the plan's is absolute
    moved = Plan(replace(plan.spec, model=replace(plan.spec.model, source="model")))
    got = sent(moved, tmp_path / "job", *command)
    assert got[got.index("--model") + 1] == str(here / "model")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--input", "a.jsonl", "--output", "out.jsonl"], "--output is 'out.jsonl'"),
        (["--input", "a.jsonl", "--output", "/o", "--cache-dir", "c"], "--cache_dir is 'c'"),
        (["--input", "a.jsonl", "--output", "/o", "--trace", "t"], "--trace is 't'"),
        (["--input", "none.jsonl", "--output", "/o"], "cannot read input none.jsonl"),
        (["--input", "/a", "--output", "/o" * 70_000], "a shell takes"),
    ],
)
def test_paths_that_the_cluster_could_not_use(
    arguments: list[str], problem: str, plan: Plan, here: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        sent(plan, tmp_path / "job", "--plan", "plan.json", *arguments)


def test_too_much_to_travel(
    plan: Plan, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "MAX_UPLOAD_BYTES", 2**20)
    with (here / "a.jsonl").open("ab") as file:
        file.truncate(3 * 2**20)
    with pytest.raises(InputError, match="3 MiB, at most 1 do"):
        sent(plan, tmp_path / "job", "--plan", "plan.json", "--input", "a.jsonl", "--output", "/o")


def test_exit_codes_are_those_of_the_command() -> None:
    codes = {0: 0, 1: 1, 2: 2, 3: 3, 127: 1, -9: 1, None: 1, 130: 130, 143: 143, 77: 1}
    for code, wanted in codes.items():
        status = "SUCCEEDED" if code == 0 else "FAILED"
        assert exit_code(JobEnd(status, code, "")) == wanted
    assert exit_code(JobEnd("STOPPED", None, "")) == 143


@pytest.mark.parametrize(
    "arguments",
    [["--no-wait"], ["--stop-job", "x"], ["--submit", "u", "--stop-job", "x", "--follow-job", "y"]],
)
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        split_options(arguments, "llmpq run")
    assert left.value.code == 2


def test_what_is_wrong_here_is_not_submitted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--submit", "http://127.0.0.1:1", "--input", "/a", "--output", "/o", "--plan"]
    for more, problem in (
        (["none.json"], "none.json"),
        (["plan.json", "--top_p", "3"], "top_p"),
        (["plan.json", "--shard-rows", "0"], "--shard_rows is 0"),
        (["plan.json"], "no Ray dashboard answers"),
    ):
        assert run_cli.main([*command, *more]) == 2
        assert problem in capsys.readouterr().err


class ToldJobs:
    """Ray's jobs that take one and tell its end at once."""

    address = "http://head:8265"

    def __init__(self, _address: str) -> None:
        pass

    def submit(self, _line: str, _folder: Path) -> str:
        return "raysubmit_1"

    def stop(self, _job: str) -> JobEnd:
        return JobEnd("STOPPED", None, "")


@pytest.mark.parametrize("prog", ["llmpq run", "llmpq-dist"])
def test_jobs_are_told_of_under_the_name_that_was_called(
    prog: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "RayJobs", ToldJobs)
    files = ["--plan", "plan.json", "--input", "a.jsonl", "--output", "/o.jsonl"]
    assert run_cli.main(["--submit", "http://head:8265", "--no-wait", *files], prog=prog) == 0
    printed = capsys.readouterr()
    assert printed.out == "raysubmit_1\n"
    for option in ("--follow_job", "--stop_job"):
        assert f"{prog} --submit http://head:8265 {option} raysubmit_1" in printed.err
    assert run_cli.main(["--submit", "http://head:8265", "--stop_job", "x"], prog=prog) == 0
    assert capsys.readouterr().err.startswith(f"{prog}: job x is stopped")


@pytest.mark.parametrize("address", ["auto", "ray://h:1", "http://", "http://h:x", "h:8265", "h"])
def test_addresses_of_no_dashboard(address: str) -> None:
    with pytest.raises(SpecError, match="http://HEAD:8265"):
        RayJobs(address)


def test_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(SpecError) as raised:
        RayJobs("http://me:secret@head:8265")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("status", "body"), [(404, b"no"), (200, b"<html>"), (200, b'{"a": 1}')])
def test_something_else_answers(status: int, body: bytes) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            with pytest.raises(DeviceError, match="is no Ray dashboard"):
                RayJobs(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


class CutConnections:
    """Ray's client for a job whose log connection breaks, or is closed, after every second piece;
    one request for its state in two is not answered.
    """

    def __init__(self, log: list[str], is_closed_in_order: bool = False) -> None:
        self.log, self.is_closed_in_order = log, is_closed_in_order
        self.grown = self.asked = 0

    async def tail_job_logs(self, _job: str) -> AsyncIterator[str]:
        self.grown = min(len(self.log), self.grown + 2)
        for piece in self.log[: self.grown]:
            yield piece
        if not self.is_closed_in_order:
            raise RuntimeError("closed unexpectedly")

    def get_job_info(self, _job: str) -> Any:
        self.asked += 1
        if self.asked % 2 == 0:
            raise ConnectionError("refused")
        ended = self.grown == len(self.log)
        status = SimpleNamespace(is_terminal=lambda: ended)
        return SimpleNamespace(status=status, driver_exit_code=3, message=None)

    def get_job_logs(self, _job: str) -> str:
        return "".join(self.log) + "end"


@pytest.mark.parametrize("in_order", [True, False])
def test_a_log_is_followed_over_broken_connections(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "RETRY_S", 0.0)
    jobs = RayJobs.__new__(RayJobs)
    jobs.address = "http://head:8265"
    pieces = [f"line {i}\n" for i in range(7)]
    jobs._client = CutConnections(pieces, in_order)  # type: ignore[assignment]
    seen: list[str] = []
    assert jobs.follow("job", seen.append).exit_code == 3
    assert "".join(seen) == "".join(pieces) + "end"


def test_a_reader_that_goes_away_ends_following() -> None:
    def gone(_text: str) -> None:
        raise BrokenPipeError

    jobs = RayJobs.__new__(RayJobs)
    jobs.address = "http://head:8265"
    jobs._client = CutConnections(["a", "b", "c"])  # type: ignore[assignment]
    with pytest.raises(BrokenPipeError):
        jobs.follow("job", gone)


def test_a_ray_that_knows_no_tokens_is_followed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray before 2.52 does."""
    monkeypatch.delattr("ray.exceptions.AuthenticationError")
    jobs = RayJobs.__new__(RayJobs)
    jobs.address = "http://head:8265"
    jobs._client = CutConnections(["a"])  # type: ignore[assignment]
    seen: list[str] = []
    assert jobs.follow("job", seen.append).exit_code == 3
    assert "".join(seen) == "aend"


def test_a_cluster_that_stays_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "RETRY_S", 0.0)
    monkeypatch.setattr(ray_jobs, "RECONNECT_S", 0.0)
    jobs = RayJobs.__new__(RayJobs)
    jobs.address = "http://head:8265"
    jobs._client = CutConnections(["a", "b", "c"])  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="Job job may be going on"):
        jobs.follow("job", lambda _text: None)


def test_stages_do_not_get_the_folder_of_the_job() -> None:
    config = {"runtime_env": {"working_dir": "gcs://a.zip", "env_vars": {"A": "1"}}, "metadata": {}}
    name = "RAY_JOB_CONFIG_JSON_ENV_VAR"
    theirs = {name: json.dumps(config)}
    keep_folder_to_driver(theirs)
    assert json.loads(theirs[name]) == config  # a job that we did not submit
    ours = theirs | {"LLMPQ_SUBMITTED": "1"}
    keep_folder_to_driver(ours)
    assert json.loads(ours[name]) == {"runtime_env": {"env_vars": {"A": "1"}}, "metadata": {}}


def test_the_address_given_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client would prefer the one in the environment."""
    import ray.job_submission

    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:1")
    monkeypatch.setattr(
        ray.job_submission,
        "JobSubmissionClient",
        lambda address: (address, os.environ.get("RAY_ADDRESS")),
    )
    assert dashboard_client("http://head:8265") == ("http://head:8265", None)
    assert os.environ["RAY_ADDRESS"] == "ray://elsewhere:1"
