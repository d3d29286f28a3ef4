"""The head of a local Ray with what a run has a use for, and nothing that it would wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.processes.device import stage_environment
from llmpq.remote.setup_worker import OWN_PROGRAM, WORKERS
from llmpq.remote.worker_forks import SETUP_PROGRAM

if TYPE_CHECKING:
    from llmpq.remote.worker_forks import WorkerForks

SETTINGS = {
    "gcs_rpc_server_reconnect_timeout_s": 600,
    "prestart_worker_first_driver": False,
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 1000,
}
"""Settings of a local Ray. By default it ends a process that has missed GCS for 60 s, whatever that
does; here a run ends by itself before, and has time to say so where results are read slowly. Nor
does it start a process for each core before one is asked for: stages have processes of their own.
Whoever finds a socket not there yet, as the raylet does that of its own object store, looks again
after 20 ms, not after a second.
"""

_UNUSED = ("start_monitor", "start_api_server", "start_log_monitor")
"""Methods of Ray's `Node` that start its autoscaler, its dashboard (without pages too) and what
sends the words of workers to the driver: Python processes that import for a second each, of which
`ray.init` waits for the second.
"""

_OF_AGENTS = (
    *("aiohttp", "aiohttp_cors", "grpc", "opencensus", "prometheus_client", "pydantic"),
    *("opentelemetry.exporter.prometheus", "opentelemetry.proto"),
)
"""The imports of `ray/dashboard/optional_deps.py`."""

_AGENT = str(Path(__file__).with_name("waiting_agent.py"))

_LOOK_S = 0.02
_LOOKS = 100


@contextmanager
def light_head(forks: WorkerForks | None) -> Iterator[None]:
    """Have a Ray that is started meanwhile take 127.0.0.1 for its node's address, and start no
    process that a run has no use for; where its workers are `forks`, its agents wait until somebody
    asks for them (`llmpq/remote/waiting_agent.py`).

    Ray takes that address on systems where it knows single nodes only: all its ports are then on
    loopback. The variable of that switch, read when Ray is imported, comes before. What this Ray
    has not, or has otherwise, is left as it is.
    """
    from ray._private import ray_constants, services, utils
    from ray._private.node import Node

    with ExitStack() as stack:
        if ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in environ:
            stack.enter_context(replaced(ray_constants, "ENABLE_RAY_CLUSTER", lambda _: False))
        for name in _UNUSED:
            stack.enter_context(replaced(Node, name, lambda _: _start_nothing))
        stack.enter_context(replaced(services, "get_node", _node_once_there))
        stack.enter_context(replaced(utils, "get_dashboard_dependency_error", _looked_for))
        if forks is not None:
            stack.enter_context(replaced(Node, "start_raylet", forks_for_workers(forks)))
            name = "_build_python_executable_command_memory_profileable"
            stack.enter_context(replaced(services, name, _waiting_agents))
        yield


@contextmanager
def replaced(owner: object, name: str, made: Callable[[Any], object]) -> Iterator[None]:
    """Have what is `made` of an attribute of Ray's in its place meanwhile; nothing where there is
    none.
    """
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, made(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _start_nothing(node: object, **_: object) -> None:
    """Stand for a method of Ray's `Node` that starts a process."""


def forks_for_workers(forks: WorkerForks) -> Callable[[Any], object]:
    """Make of `Node.start_raylet` one whose raylet starts our program in place of Ray's for each
    worker, with the variables of stages.
    """

    def made(start: Any) -> object:
        def start_raylet(node: Any, *arguments: Any, **options: Any) -> Any:
            own = getattr(node._ray_params, "worker_path", None)
            if not (isinstance(own, str) and own.endswith(".py")):  # a Ray that does it otherwise
                return start(node, *arguments, **options)
            node._ray_params.worker_path = SETUP_PROGRAM
            variables = {WORKERS: forks.address, OWN_PROGRAM: own, **stage_environment(1)}
            with _variables(variables):
                started = start(node, *arguments, **options)
            node.has_stage_environment = True  # `actors.processes.ray_head` asks for it
            return started

        return start_raylet

    return made


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Give processes that are started meanwhile these variables."""
    before = {name: environ.get(name) for name in values}
    environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value


def _looked_for(error: Callable[[], object]) -> object:
    """Make of what imports all that an agent does, to know whether it is there, what finds it."""

    def missing() -> object:
        with suppress(ImportError):  # where the package around a module is not there
            if all(map(find_spec, _OF_AGENTS)):
                return None
        return error()

    return missing


def _waiting_agents(build: Any) -> object:
    """Have the commands of Ray's agents begin with our program, which knows the rest."""

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        own: list[str] = build(component, *arguments, **options)
        plain = len(own) == 2 and os.path.basename(own[0]).startswith("python")
        return [own[0], "-I", "-S", _AGENT] if plain and "agent" in component else own

    return command


def _node_once_there(get_node: Any) -> object:
    """Look for a node every `_LOOK_S` before Ray does, which waits a second where it is not there
    yet.
    """

    def get(address: str, node_id: str) -> Any:
        with suppress(Exception):  # Ray's own way follows, and tells what is wrong
            from ray._private.services import _get_gcs_client_options
            from ray._private.state import GlobalState

            state = GlobalState()
            state._initialize_global_state(_get_gcs_client_options(address))
            for _ in range(_LOOKS):
                if any(each["NodeID"] == node_id for each in state.node_table()):
                    break
                time.sleep(_LOOK_S)
        return get_node(address, node_id)

    return get
