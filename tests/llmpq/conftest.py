"""A tiny checkpoint, a cluster of emulated devices for it, and plans over them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from llmpq import Cluster, Fleet, Plan, Workload
from llmpq.remote.light_head import light_head
from llmpq.remote.token import make_token
from llmpq.remote.worker_forks import SET_UP, WorkerForks
from planner.cluster.spec import ClusterSpec
from planner.fleet.fleet_spec import FleetRecord, FleetSpec
from planner.plan.file import PLAN_VERSION
from tests.actors.configs import CONFIGS
from tests.actors.models import save_tiny
from tests.llmpq import forked_tokenizers

NEW_TOKENS = 8
PROMPT_LENGTH = 16
BATCH = 6
NODE: dict[str, Any] = {"include_dashboard": False, **SET_UP}
"""Options of every Ray node of tests."""

EMULATED = """
name: three-emulated
nodes:
  - {name: a, accelerators: {T4: 1}, usable_memory_gib: 0.00045}
  - {name: b, accelerators: {V100-SXM2-16GB: 1}, usable_memory_gib: 0.0006}
  - {name: c, accelerators: {A100-SXM4-40GB: 1}, usable_memory_gib: 0.0006}
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""

ONE_DEVICE = """
name: one-emulated
nodes: [{name: a, accelerators: {T4: 1}, usable_memory_gib: 0.01}]
network: {internode_gbit_per_s: 100}
emulate: {time_scale: 0}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of a tiny random LLaMA, and the model itself."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, save_tiny(folder, CONFIGS["llama"])


@pytest.fixture(scope="session")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three emulated devices of different kinds."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(EMULATED)
    return path


@pytest.fixture(scope="session")
def plan(tiny: tuple[Path, Any], cluster_file: Path) -> Plan:
    """A plan of the tiny model in float32 at 16 bit, three stages."""
    return tiny_plan(tiny[0], cluster_file)


@pytest.fixture(scope="session")
def one_stage(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The same with one stage, whose process is soon there: for where their number is no matter."""
    path = tmp_path_factory.mktemp("one") / "cluster.yaml"
    path.write_text(ONE_DEVICE)
    return tiny_plan(tiny[0], path)


@pytest.fixture(scope="session")
def fleet(tiny: tuple[Path, Any]) -> Fleet:
    """Two pipelines of the tiny model: one stage on a T4, and two on a V100 and an A100."""
    nodes = yaml.safe_load(EMULATED.replace("0.00045", "0.01"))["nodes"]
    plans = [
        fleet_part(tiny[0], nodes[:1], batch=3),
        fleet_part(tiny[0], [each | {"usable_memory_gib": 0.001} for each in nodes[1:]], BATCH),
    ]
    predicted = [plan.spec.predicted for plan in plans]
    return Fleet(
        FleetSpec(
            version=PLAN_VERSION,
            cluster="two-pipelines",
            replicas=tuple(plan.spec for plan in plans),
            unused_devices=(),
            latency_s=max(each.latency_s for each in predicted),
            tokens_per_s=sum(each.tokens_per_s for each in predicted),
            record=FleetRecord(1.0, 2, 0.0, 1e9),
        )
    )


def fleet_part(folder: Path, nodes: list[Any], batch: int) -> Plan:
    """A pipeline over all devices of these nodes."""
    shared = {key: value for key, value in yaml.safe_load(EMULATED).items() if key != "nodes"}
    cluster = Cluster(ClusterSpec.from_dict({**shared, "nodes": nodes}))
    given: dict[str, Any] = {"dtype": "float32", "bits": [16], "keep_all_devices": True}
    return cluster.plan(folder, Workload(batch, PROMPT_LENGTH, NEW_TOKENS), **given)


def tiny_plan(folder: Path, cluster_file: Path, **options: object) -> Plan:
    """A plan of the tiny model with more options."""
    workload = Workload(BATCH, PROMPT_LENGTH, NEW_TOKENS)
    given = {"dtype": "float32", "bits": [16], "keep_all_devices": True, **options}
    return Cluster.from_yaml(cluster_file).plan(folder, workload, **given)


@pytest.fixture(autouse=True)
def tokenizer_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers start fast, but for tests of their processes."""
    pretend = SimpleNamespace(**vars(subprocess) | {"Popen": forked_tokenizers.start})
    monkeypatch.setattr("llmpq.tokenizing.child_process.subprocess", pretend)


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process join a Ray, or look at what comes before one."""
    monkeypatch.setattr("llmpq.remote.shared_stages.prepared_forks", lambda address: None)
    monkeypatch.setattr("llmpq.remote.session.prepared_ahead", nullcontext)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs do not wait for the clock's next tick: of files just written they tell by content."""
    monkeypatch.setattr("quant.common.files.sleep", lambda seconds: None)


@pytest.fixture(scope="session")
def worker_environment(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Ray's `runtime_env` for workers that start fast, by the server of all processes of tests."""
    shared = getattr(request.config, "workerinput", {}).get("worker_environment")
    if shared is not None:
        yield shared
        return
    with closing(WorkerForks({})) as forks:
        yield forks.runtime_env


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Any]:
    """A cluster of Ray with a head of these options, without what only people at it would use.

    It has a token, as nodes that `ray.init` starts have: a process uses tokens always or never.
    """
    from ray._private.authentication import authentication_token_setup
    from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR
    from ray.cluster_utils import Cluster as RayCluster

    make_token()
    authentication_token_setup.enable_token_auth_by_default()
    many_nodes = {ENABLE_RAY_CLUSTERS_ENV_VAR: "1"}  # the node's address is not the local one
    with patch.dict(os.environ, many_nodes), light_head(None):
        cluster = RayCluster(initialize_head=True, head_node_args=NODE | head)
    yield cluster
    cluster.shutdown()


@contextmanager
def no_metrics() -> Iterator[None]:
    """Have Ray nodes that are started meanwhile gather no metrics."""
    from ray._private import services
    from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT

    name = "_build_python_executable_command_memory_profileable"
    build = getattr(services, name)

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        own: list[str] = build(component, *arguments, **options)
        none = [own[0], "-I", "-S", str(Path(__file__).with_name("no_metrics.py"))]
        return none if component == PROCESS_TYPE_DASHBOARD_AGENT else own

    with patch.object(services, name, command):
        yield


@pytest.fixture(scope="package")
def ray_address() -> Iterator[str]:
    """Address of a Ray node of two CPUs that serves all tests of this process in this folder."""
    with ExitStack() as stack:
        with no_metrics():  # others that are started meanwhile gather theirs
            cluster = stack.enter_context(ray_cluster(num_cpus=2))
        yield cluster.address


@pytest.fixture(scope="module")
def local_ray(ray_address: str, worker_environment: dict[str, str]) -> Iterator[None]:
    """A joined Ray, for tests that neither end it nor look at its processes. Stages of a busy
    machine have their time to answer.
    """
    import ray

    ray.init(address=ray_address, log_to_driver=False, runtime_env=worker_environment)
    with patch("actors.processes.observer.POLL_S", 120.0):
        yield
    ray.shutdown()
