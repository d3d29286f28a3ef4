"""Workers are forks of a prepared process, with what their command gave them, and end with it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401  (brings psutil)

# isort: split
import psutil

from actors.processes.device import stage_environment
from llmpq.remote.session import prepared_forks
from llmpq.remote.worker_forks import WorkerForks

PROGRAM = """
import json, os, sys
torch, numba = (sys.modules.get(name) for name in ("torch", "numba"))
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv[1:], "folder": os.getcwd(),
    "variable": os.environ.get("OF_A_WORKER"), "nice": os.nice(0),
    "threads": torch and [torch.get_num_threads(), numba.get_num_threads()],
    "alone": os.getpgid(0) == os.getpid(),
}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[WorkerForks]:
    with closing(WorkerForks(stage_environment(1))) as started:
        yield started


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(forks: WorkerForks, program: Path) -> subprocess.Popen[str]:
    """Start `program` as Ray starts a worker."""
    return subprocess.Popen(
        [*shlex.split(forks.runtime_env["py_executable"]), str(program), "an", "argument"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=program.parent,
        env=os.environ | {"OF_A_WORKER": "yes", **stage_environment(2)},
        preexec_fn=lambda: os.nice(3),
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


CHECKS = "tests.llmpq.remote.prepared_checks"


def test_forks_do_what_they_are_asked_with_all_that_transformers_has(forks: WorkerForks) -> None:
    names = ("leave_out_what_only_compilers_need", "generate_as_transformers", "fail")
    asked = [forks.ask(f"{CHECKS}:{name}") for name in names]
    assert [is_done() for is_done in asked] == [True, True, False]


def test_a_worker_is_a_fork_with_its_own_command_and_surroundings(
    program: Path, forks: WorkerForks
) -> None:
    """And what is left once there is nobody to fork: tests before this one have their forks."""
    nice = os.nice(0) + 3
    surroundings = {"arguments": ["an", "argument"], "folder": str(program.parent)}
    surroundings |= {"variable": "yes", "nice": nice}
    with start(forks, program) as first, start(forks, program) as second:
        found = [told(first), told(second)]
        (parent,) = {each.pop("parent") for each in found}
        goes_on, ends = (psutil.Process(each.pop("pid")) for each in found)
        assert found == [{**surroundings, "threads": [2, 2], "alone": True}] * 2
        prepared = psutil.Process(parent)
        assert prepared.ppid() == os.getpid()
        second.communicate("\n")  # a caller stays as long as its worker
        asked_before = [each for each in prepared.children() if each not in (goes_on, ends)]
        psutil.wait_procs([ends, *asked_before], timeout=60)
        assert prepared.children() == [goes_on]
        forks._process.kill()
        forks._process.wait()
        first.communicate()
    _, left = psutil.wait_procs([goes_on], timeout=60)
    assert not left
    assert not psutil.pid_exists(parent)
    assert not forks.ask("builtins:print")()
    forks.close()
    assert not forks.ask("builtins:print")()
    with start(forks, program) as third:  # there is nothing to fork: it becomes Python
        found = [told(third)]
        plain = {"pid": third.pid, "parent": os.getpid(), "threads": None, "alone": False}
        assert found == [{**surroundings, **plain}]
        third.communicate("\n")


@pytest.mark.rare  # `test_jobs_command.py` kills a run, of whose processes none is left
def test_the_prepared_process_ends_with_who_started_it() -> None:
    code = "import os\nfrom llmpq.remote.worker_forks import WorkerForks\n"
    code += "print(WorkerForks({})._process.pid, flush=True)\nos._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with suppress(psutil.NoSuchProcess):  # it may be gone already
        psutil.Process(int(done.stdout)).wait(timeout=60)


def test_none_is_prepared_where_ray_is_joined_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared_forks("10.0.0.1:6379") is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert prepared_forks(None) is None
