"""A local Ray starts what runs have a use for; its agents begin once somebody asks for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import ray

# isort: split
import psutil
from ray._private import services
from ray._private.node import Node

from actors.processes.device import stage_environment, use_threads
from actors.processes.ray_head import below_head, has_stage_environment
from llmpq.remote import waiting_agent
from llmpq.remote.light_head import light_head
from llmpq.remote.session import ray_session
from llmpq.remote.worker_forks import WorkerForks
from tests.llmpq.processes import name_of

PROGRAM = Path(waiting_agent.__file__)
AGENT = """
import socket, sys
port = int(next(word for word in sys.argv if "port=" in word).partition("=")[2])
with socket.create_server(("127.0.0.1", port)) as server:
    print(*sys.argv[1:], flush=True)
    server.accept()[0].sendall(b"an agent")
"""


def test_this_ray_has_what_is_left_out_and_gets_it_back() -> None:
    methods = ("start_monitor", "start_api_server", "start_log_monitor")
    patched = [(Node, name) for name in (*methods, "start_raylet")]
    command = "_build_python_executable_command_memory_profileable"
    patched += [(services, "get_node"), (services, command)]
    before = [getattr(owner, name) for owner, name in patched]
    with closing(WorkerForks({})) as forks, light_head(forks):
        for name in methods:
            getattr(Node, name)(None, include_dashboard=False)  # else it asks None for files
        agent = getattr(services, command)("runtime_env_agent", "/folder")
        assert Path(agent[-1]) == PROGRAM
        assert getattr(services, command)("dashboard", "/folder") == before[-1]("dashboard", "")
    assert [getattr(owner, name) for owner, name in patched] == before


@pytest.mark.parametrize("option", ["--runtime-env-agent-port=0", "--of-another-ray=0"])
def test_an_agent_begins_at_the_port_that_was_told_for_it(tmp_path: Path, option: str) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    place = [f"--session-dir={tmp_path}", "--node-id=7", "--node-ip-address=127.0.0.1"]
    command = [sys.executable, "-I", "-S", str(PROGRAM), str(agent), option, *place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if option.startswith("--runtime"):
            while not (told := tmp_path / "runtime_env_agent_port_7").exists():
                assert process.poll() is None
            place = [f"{option[:-1]}{told.read_text()}", *place]
            address = ("127.0.0.1", int(told.read_text()))
            socket.create_connection(address).close()
            assert process.stdout.readline().split() == place
            with socket.create_connection(address) as connection:
                assert connection.recv(8) == b"an agent"
        else:  # it is not known how that one is told its ports: it begins at once
            assert process.stdout.readline() == ""
    assert process.returncode == (0 if option.startswith("--runtime") else 1)


def test_an_agent_that_waits_ends_with_its_raylet(tmp_path: Path) -> None:
    place = [f"--session-dir={tmp_path}", "--node-id=7", "--node-ip-address=127.0.0.1"]
    command = [sys.executable, "-I", "-S", str(PROGRAM), "x", "--runtime-env-agent-port=0", *place]
    code = "import os, subprocess, sys\nsubprocess.Popen(sys.argv[1:])\n"
    code += f"while not os.path.exists({str(tmp_path / 'runtime_env_agent_port_7')!r}): pass"
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, timeout=60, check=True
    )
    assert done.stderr == b""  # it had this pipe too, which is closed


class Probe:
    def __init__(self, threads: int) -> None:
        use_threads(threads)

    def find(self) -> dict[str, Any]:
        import numba
        import torch

        found = {
            name: os.environ.get(name) for name in ("GLIBC_TUNABLES", "OF_IT", "LLMPQ_WORKERS")
        }
        threads = [torch.get_num_threads(), numba.get_num_threads()]
        return found | {"threads": threads, "maker": psutil.Process(os.getppid()).ppid()}


def test_stages_come_up_without_the_agent_of_environments_which_comes_when_it_is_needed() -> None:
    def has_agent() -> bool:
        return "RuntimeEnvAgent" in {name_of(each.pid) for each in below_head()}  # type: ignore[attr-defined]

    forks = WorkerForks(stage_environment(1))
    with closing(forks), ray_session("local", forks=forks):
        assert has_stage_environment()
        probe: Any = ray.remote(Probe)
        wanted = {"GLIBC_TUNABLES": stage_environment(1)["GLIBC_TUNABLES"], "OF_IT": None}
        wanted |= {"LLMPQ_WORKERS": None, "threads": [2, 2], "maker": os.getpid()}
        assert ray.get(probe.remote(2).find.remote()) == wanted
        assert not has_agent()
        other = probe.options(runtime_env={"env_vars": {"OF_IT": "yes"}}).remote(1)
        assert ray.get(other.find.remote()) == wanted | {"OF_IT": "yes", "threads": [1, 1]}
        assert has_agent()
    assert not has_stage_environment()
