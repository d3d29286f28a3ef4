"""Recipes start just the devices that their plan uses, and commands that are llmpq's own: their
scripts are run with stubs of the schedulers' programs.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from llmpq import Cluster, Plan, Workload
from llmpq.cli.recipe import main
from llmpq.cli.run_options import run_parser, serve_parser
from llmpq.recipe.machines import machines_of
from planner.cluster.spec import ClusterSpec
from planner.plan.spec import all_stages
from tests.llmpq.commands import exit_code
from tests.llmpq.recipe.stubs import JOB, NOTE, Call, Stubs
from tests.paths import SPECS

MIXED = SPECS / "t4_v100_a100.yaml"
PLAIN = """
name: Old & new
nodes:
  - {name: old, accelerators: {T4: 4}, host_memory_gib: 96}
  - {name: older, accelerators: {T4: 4}, host_memory_gib: 96}
  - {name: middle, accelerators: {V100-SXM2-32GB: 2}, host_threads: 8}
network: {internode_gbit_per_s: 25}
"""
RUN = ["--input", "/data/a b.jsonl", "--output", "/data/r.jsonl", "--dedupe"]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cluster of machines of one type each, and a plan for all of it."""
    path = tmp_path_factory.mktemp("plain") / "cluster.yaml"
    path.write_text(PLAIN)
    return path, planned(path)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("mixed") / "cluster.yaml"
    path.write_text(MIXED.read_text())
    return path, planned(path)


def planned(cluster: Path) -> Path:
    options: dict[str, Any] = {"bits": [8], "method": "uniform", "keep_all_devices": True}
    plan = Cluster.from_yaml(cluster).plan("opt-30b", Workload(4, 64, 16), **options)
    plan.save(cluster.parent / "plan.json")
    return cluster.parent / "plan.json"


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    """Nothing that it started stays, also where a test fails."""
    yield Stubs(tmp_path)
    for path in (tmp_path / "homes").glob("*/.ray/*.pids"):
        for pid in path.read_text().split():
            if b"llmpq" in words_of(pid):
                os.killpg(int(pid), signal.SIGKILL)


def written(
    files: tuple[Path, Path], kind: str, *options: str, command: str = "run", folder: Path
) -> Path:
    cluster, plan = files
    target = folder / "recipe"
    words = [kind, str(cluster), "-o", str(target), *options, "--", command, "--plan", str(plan)]
    assert main([*words, *(RUN if command == "run" else [])]) == 0
    return target


def used(plan: Path) -> Counter[str]:
    """The devices of a plan's stages by node and type."""
    stages = all_stages(Plan.load(plan).spec)
    return Counter(name.rpartition(":")[0] for stage in stages for name in stage.device_names)


def wait_for_starts(stubs: Stubs, count: int) -> list[Call]:
    deadline = time.monotonic() + LIMIT_S
    while len(stubs.calls("ray", "start")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return stubs.calls("ray", "start")


def words_of(pid: str) -> bytes:
    """The command of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def of_kinds(devices: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in devices.items():
        found[name.partition("/")[2]] += count
    return found


def test_slurm_asks_for_the_plans_devices(plain: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--partition", "gpu", "--gpu_label", "T4-16GB=tesla_t4", "--by_name"]
    text = written(plain, "slurm", *options, folder=tmp_path).read_text()
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    at = [index for index, line in enumerate(lines) if line == "hetjob"]
    assert len(at) == 1, "machines that are alike are one part"
    parts = [dict(word[2:].split("=", 1) for word in line.split() if "=" in word) for line in lines]
    old, new = parts[at[0] - 1], parts[at[0] + 1]
    assert (old["nodes"], old["gres"], old["nodelist"]) == ("2", "gpu:tesla_t4:4", "old,older")
    assert (new["nodes"], new["gres"], new["nodelist"]) == ("1", "gpu:v100:2", "middle")
    assert old["partition"] == new["partition"] == "gpu"
    assert "--requeue --signal=B:USR1@120" in text


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_the_slurm_script_runs_and_is_queued_again(
    mixed: tuple[Path, Path], tmp_path: Path, stubs: Stubs, sent: signal.Signals, code: int
) -> None:
    """Its programs are stubs, its shell and its processes are not; `scontrol` fails here, after
    which the script ends by itself.
    """
    script = written(mixed, "slurm", "--tls", "/etc/tls", folder=tmp_path)
    stubs.add("llmpq", JOB)
    stubs.add("scontrol", f"{NOTE}sys.exit(1)\n")
    process = subprocess.Popen(
        ["bash", str(script)], env=stubs.environment, cwd=tmp_path, start_new_session=True
    )
    deadline = time.monotonic() + LIMIT_S
    try:
        while not Path(f"{stubs.notes}.ready").exists() or len(stubs.calls("ray", "start")) < 4:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(sent)
        assert process.wait(LIMIT_S) == code
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the nodes, as Slurm does
    assert Path(f"{stubs.notes}.signals").read_text() == f"{sent.name[3:]}\n"
    queued = [call.words[1:] for call in stubs.calls("scontrol")]
    assert queued == ([["requeue", "7"]] if sent == signal.SIGUSR1 else [])
    starts = stubs.calls("ray", "start")
    assert sum((Counter(call.resources) for call in starts), Counter()) == of_kinds(used(mixed[1]))
    assert {call.variables["RAY_AUTH_MODE"] for call in starts} == {"token"}
    assert {call.variables["RAY_USE_TLS"] for call in starts} == {"1"}
    heads = [call for call in starts if "--head" in call.words]
    assert [call.resources for call in heads] == [{"T4-16GB": 4}]
    assert heads[0].option("node-ip-address") == "10.0.0.1"
    seen = {next(iter(call.resources)): call.variables["CUDA_VISIBLE_DEVICES"] for call in starts}
    assert seen["A100-SXM4-40GB"] == "GPU-2"
    assert seen["L4-24GB"] == "GPU-1"
    assert seen["T4-16GB"] is None


def test_the_ssh_script_starts_each_machine(
    mixed: tuple[Path, Path], tmp_path: Path, stubs: Stubs
) -> None:
    script = written(mixed, "ssh", "--port", "7000", "--tls", "/etc/tls", folder=tmp_path)

    def run(action: str) -> int:
        command = ["bash", str(script), action]
        return subprocess.run(command, env=stubs.environment, cwd=tmp_path, check=False).returncode

    assert run("start") == 0
    starts = wait_for_starts(stubs, 4)
    assert run("start") == 1, "it is started once"
    devices = {
        f"{call.variables['MACHINE']}/{kind}": count
        for call in starts
        for kind, count in call.resources.items()
    }
    assert devices == used(mixed[1])
    heads = [call for call in starts if "--head" in call.words]
    assert [call.variables["MACHINE"] for call in heads] == ["old"]
    assert heads[0].option("port") == "7000"
    assert {call.option("address") for call in starts} == {None, "old:7000"}
    seen = {next(iter(call.resources)): call.variables["CUDA_VISIBLE_DEVICES"] for call in starts}
    assert (seen["A100-SXM4-40GB"], seen["L4-24GB"]) == ("GPU-2", "GPU-1")
    (waited,) = stubs.calls("python")
    assert waited.words[-2:] == ["old:7000", "4"]
    tokens = list((tmp_path / "homes").glob("*/.ray/*.token"))
    assert len(tokens) == 3
    assert len({token.read_bytes() for token in tokens}) == 1
    assert {token.stat().st_mode & 0o777 for token in tokens} == {0o600}
    assert run("run") == 0
    (call,) = stubs.calls("llmpq", "run")
    assert call.variables["MACHINE"] == "old"
    given = run_parser("llmpq run").parse(call.words[2:])
    assert (given.input, given.address, given.transport) == (RUN[1:2], "old:7000", "ray")
    sent = tmp_path / "homes" / "old" / given.plan
    assert sent.read_bytes() == mixed[1].read_bytes()
    noted = [path.read_text().split() for path in (tmp_path / "homes").glob("*/.ray/*.pids")]
    pids = [pid for some in noted for pid in some]
    assert len(pids) == 4
    assert all(map(words_of, pids))
    assert run("stop") == 0
    assert not any(map(words_of, pids))
    assert not stubs.calls("ray", "stop"), "which would end the Rays of others"
    assert run("stop") == 0
    assert run("") == 2


def test_the_file_of_ray_up_is_rays(mixed: tuple[Path, Path], tmp_path: Path, stubs: Stubs) -> None:
    """By the schema in the package of Ray; each machine finds its own line."""
    values = yaml.safe_load(written(mixed, "ssh", "--ray_up", folder=tmp_path).read_text())
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema = json.loads((Path(spec.origin).parent / "autoscaler/ray-schema.json").read_text())
    assert values.pop("min_workers") == 2  # which Ray takes out for machines that are there
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"max_workers": "two"}, schema)
    assert values["provider"]["worker_ips"] == ["middle", "new"]
    for machine in ("old", "middle", "new", "other"):
        environment = stubs.environment | {"MACHINE": machine, "RAY_HEAD_IP": "10.0.0.1"}
        of = "head" if machine == "old" else "worker"
        start = values[f"{of}_start_ray_commands"][-1]
        done = subprocess.run(["bash", "-c", start], env=environment, check=False)
        assert done.returncode == (2 if machine == "other" else 0)
    starts = stubs.calls("ray", "start")
    devices = [(call.variables["MACHINE"], call.resources) for call in starts]
    assert devices == [
        ("old", {"T4-16GB": 4}),
        ("middle", {"V100-SXM2-32GB": 2}),
        ("new", {"A100-SXM4-40GB": 1}),
        ("new", {"L4-24GB": 1}),
    ]


def manifests(path: Path) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


def check_groups(cluster: dict[str, Any], plan: Path) -> None:
    devices: Counter[str] = Counter()
    for group in cluster["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        ((kind, count),) = json.loads(json.loads(group["rayStartParams"]["resources"])).items()
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == count
        assert group["rayStartParams"]["num-gpus"] == str(count)
        devices[kind] += count * group["replicas"]
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert len(set(names)) == len(names)
    assert devices == of_kinds(used(plan))
    assert cluster["authOptions"] == {"mode": "token"}


def mounted(pod: dict[str, Any], name: str) -> str:
    (container,) = pod["spec"]["containers"]
    (path,) = (each["mountPath"] for each in container["volumeMounts"] if each["name"] == name)
    return str(path)


def test_kuberays_job_has_the_plans_devices(plain: tuple[Path, Path], tmp_path: Path) -> None:
    found = manifests(written(plain, "kuberay", "--image", "r.io/l:1", folder=tmp_path))
    assert {each["metadata"]["name"] for each in found.values()} == {"llmpq-old-new"}
    data, job = found["ConfigMap"]["data"], found["RayJob"]["spec"]
    assert job["entrypoint"] == "bash /etc/llmpq/command.sh"
    assert data["plan.json"] == plain[1].read_text()
    command = shlex.split(data["command.sh"].splitlines()[0])
    assert command[:2] == ["llmpq", "run"]
    given = run_parser("llmpq run").parse(command[2:])
    assert (given.plan, given.address, given.dedupe) == ("/etc/llmpq/plan.json", "auto", True)
    cluster = job["rayClusterSpec"]
    check_groups(cluster, plain[1])
    groups = {each["groupName"]: each for each in cluster["workerGroupSpecs"]}
    selected = {
        name: group["template"]["spec"]["nodeSelector"]["nvidia.com/gpu.product"]
        for name, group in groups.items()
    }
    assert selected == {"t4-16gb": "Tesla-T4", "v100-sxm2-32gb": "Tesla-V100-SXM2-32GB"}
    (container,) = groups["t4-16gb"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"memory": f"{96 * 1024}Mi"}
    (container,) = groups["v100-sxm2-32gb"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "8"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert {mounted(each["template"], "command") for each in pods} == {"/etc/llmpq"}
    assert {mounted(each["template"], "data") for each in pods} == {"/data"}


def test_kuberays_server_joins_the_cluster(plain: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--image", "r.io/l:1", "--tls", "/etc/tls", "--name", "ours"]
    path = written(plain, "kuberay", *options, command="serve", folder=tmp_path)
    assert "&id" not in path.read_text()
    found = manifests(path)
    check_groups(found["RayCluster"]["spec"], plain[1])
    pod = found["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["bash", "/etc/llmpq/command.sh"]
    assert mounted(pod, "tls") == "/etc/tls"
    lines = found["ConfigMap"]["data"]["command.sh"].splitlines()
    assert "ray start --address=ours-head-svc:6379" in "\n".join(lines)
    command = shlex.split(lines[-1])
    assert command[:3] == ["exec", "llmpq", "serve"]
    given = serve_parser("llmpq serve").parse(command[3:])
    assert (given.host, given.transport) == ("0.0.0.0", "ray")
    assert given.batch_dir.startswith(mounted(pod, "data"))
    assert found["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    (port,) = found["Service"]["spec"]["ports"]
    assert port["port"] == container["ports"][0]["containerPort"] == 8000
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), text=True, check=False)
    assert done.returncode == 0


def test_devices_without_a_stage_are_left_out(plain: tuple[Path, Path]) -> None:
    cluster = ClusterSpec.from_yaml(plain[0])
    devices = {"old/T4-16GB:0", "old/T4-16GB:2", "middle/V100-SXM2-32GB:1"}
    machines = machines_of(cluster, devices)
    found = [(each.name, [node.resources for node in each.nodes]) for each in machines]
    assert found == [("old", [{"T4-16GB": 2}]), ("middle", [{"V100-SXM2-32GB": 1}])]


def test_cpus_are_those_of_cpu_devices() -> None:
    """A machine of GPUs offers none, which would draw another machine's stages to it."""
    nodes = [
        {"name": "a", "accelerators": {"CPU": 2}, "threads": 8, "memory_gib": 30},
        {"name": "b", "accelerators": {"T4": 1}},
    ]
    values = {"name": "two", "nodes": nodes, "network": {"internode_gbit_per_s": 1}}
    first, second = machines_of(ClusterSpec.from_dict(values))
    assert first.nodes[0].start_words == ("--num-cpus=16", "--num-gpus=0")
    assert first.memory_bytes == 60 * 2**30
    assert second.nodes[0].start_words[:2] == ("--num-cpus=0", "--num-gpus=1")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm", "CLUSTER"], "give the command behind --"),
        (["slurm", "CLUSTER", "--", "plan"], "give the command behind --"),
        (["slurm", "CLUSTER", "--", "serve", "--plan", "PLAN"], "give llmpq run"),
        (["slurm", "CLUSTER", "--", "RUN", "--address", "auto"], "--address is the recipe's"),
        (["slurm", "CLUSTER", "--", "RUN", "--retry"], "unknown option --retry"),
        (["slurm", "CLUSTER", "--time", "soon", "--", "RUN"], "give Slurm's form"),
        (["slurm", "CLUSTER", "--gpu_label", "A100=a", "--", "RUN"], "the plan uses T4-16GB"),
        (["slurm", "CLUSTER", "--gpu_label", "A100", "--", "RUN"], "TYPE=LABEL"),
        (["slurm", "OTHER", "--", "RUN"], "differs from"),
        (["ssh", "CLUSTER", "--bin", "a b", "--", "RUN"], "begins with /"),
        (["kuberay", "CLUSTER", "--", "RUN"], "--image"),
        (["kuberay", "CLUSTER", "--image", "i", "--mount", "/x", "--", "RUN"], "end with its pod"),
        (["kuberay", "MIXED", "--image", "i", "--", "MIXED_RUN"], "tell its devices apart"),
        (["ssh", "CLUSTER", "-o", "/nowhere/x", "--", "RUN"], "a folder that exists"),
    ],
)
def test_what_no_recipe_can_be_made_of_is_refused(
    plain: tuple[Path, Path],
    mixed: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    places = {
        "CLUSTER": [str(plain[0])],
        "PLAN": [str(plain[1])],
        "OTHER": [str(SPECS / "paper_03.yaml")],
        "MIXED": [str(mixed[0])],
        "RUN": ["run", "--plan", str(plain[1]), *RUN],
        "MIXED_RUN": ["run", "--plan", str(mixed[1]), *RUN],
    }
    arguments = [part for word in words for part in places.get(word, [word])]
    assert exit_code(main, arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert told in " ".join(error.split())
    assert "Traceback" not in error


def test_names_are_no_commands(tmp_path: Path, plain: tuple[Path, Path], capsys: Any) -> None:
    """Neither those of files, in the heading, nor those of nodes, which are refused."""
    folder = tmp_path / "a\nrm -rf b"
    folder.mkdir()
    (folder / "cluster.yaml").write_text(PLAIN)
    words = ["slurm", str(folder / "cluster.yaml"), "--", "run", "--plan", str(plain[1]), *RUN]
    assert main(words) == 0
    assert "\nrm" not in capsys.readouterr().out
    (folder / "cluster.yaml").write_text(PLAIN.replace("name: older", "name: $(reboot)"))
    words[1] = str(folder / "cluster.yaml")
    assert main(words) == 2
