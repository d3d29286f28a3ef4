"""Runs the demo model over two machines, which network namespaces play, and a wire between them.

    python -m benchmarks.stress.two_machines [--delay_ms 1] [--only hops jobs cut tls]

Each machine has a Ray node of its own (`/tmp/ray`, host name and address too), which is started
again when it ends, as a scheduler does. Told are hops as planned and as measured; jobs of two and
three stages, and whether their tokens are those of a run on one machine; what a lost wire costs,
for seconds and for longer than Ray waits for a node; and jobs with Ray's TLS. Exits with 1 where a
row is lost, doubled or has other tokens. Needs root, Linux's namespaces and TUN devices.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.lab import header, processor_name
from benchmarks.stress.emulated_link import ADDRESSES
from llmpq import Cluster, Plan, Workload
from planner.cluster.spec import ClusterSpec

MODEL = str(Path("examples/demo_model").absolute())
PORT = 6379
ROWS, PROMPT, TOKENS = 48, 8, 96
EXIT_FAILED = 1
STARTS_S, ENDS_S = 180.0, 600.0
TLS_FILES = {"SERVER_CERT": "tls.crt", "SERVER_KEY": "tls.key", "CA_CERT": "ca.crt"}
KINDS = ({"T4-16GB": 1}, {"V100-SXM2-16GB": 1, "P100-SXM2-16GB": 1})
"""Devices of either machine; a plan of two stages does without the last one."""

ROOM_GIB = {2: 0.013, 3: 0.009}
"""Of each device: so little that one fewer does not hold the model."""

# Sockets of Ray lie in its folder, and two machines share none.
ENTER = """
hostname {name}
mkdir -p {folder} /tmp/ray
mount --bind {folder} /tmp/ray
exec "$@"
"""
AGAIN = 'while sleep 1; do "$@"; done'


@dataclass(frozen=True)
class Machine:
    """A network namespace of its own name, with a folder for Ray."""

    name: str
    folder: Path
    environment: dict[str, str]

    def start(self, *words: str, log: str) -> subprocess.Popen[bytes]:
        entering = ENTER.format(name=self.name, folder=self.folder / "ray")
        command = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--mount", "--uts"]
        command += ["bash", "-c", entering, "bash", *words]
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=file, env=self.environment, start_new_session=True
            )

    def said(self, log: str) -> str:
        return (self.folder / log).read_text(errors="replace")


class Wire:
    """The process that plays the wire between both machines."""

    def __init__(self, names: Sequence[str], delay_ms: float, rate_mbit: float) -> None:
        command = [sys.executable, "-m", "benchmarks.stress.emulated_link", *names]
        command += ["--delay_ms", str(delay_ms), "--rate_mbit", str(rate_mbit)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise SystemExit("the wire did not come up; it needs root and TUN devices")

    def switch(self, on: bool) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"up\n" if on else b"down\n")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def machines(folder: Path, delay_ms: float, rate_mbit: float, tls: bool) -> Iterator[Lab]:
    """Two machines with Ray on both, which are gone afterwards with all of their processes."""
    names = [f"llmpq{os.getpid()}{letter}" for letter in "ab"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= certificates(folder) if tls else {}
    with ExitStack() as stack:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=True)
        wire = Wire(names, delay_ms, rate_mbit)
        stack.callback(wire.close)
        both = [Machine(name, folder / name, environment) for name in names]
        stack.callback(end_all, names)
        for machine, kinds, address in zip(both, KINDS, ADDRESSES, strict=True):
            machine.folder.mkdir()
            start = ["ray", "start", "--block", "--num-cpus=0", "--disable-usage-stats"]
            start += [f"--resources={json.dumps(kinds)}", f"--node-ip-address={address}"]
            if machine is both[0]:
                start += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            else:
                start += [f"--address={ADDRESSES[0]}:{PORT}"]
            machine.start("bash", "-c", AGAIN, "bash", *start, log="ray.log")
        lab = Lab(both[0], wire, folder)
        lab.wait_for_nodes()
        yield lab


def end_all(names: Sequence[str]) -> None:
    """End what runs in the namespaces, and nothing else."""
    for name in names:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=True)
        for pid in map(int, found.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def certificates(folder: Path) -> dict[str, str]:
    """Ray's variables for an authority and a certificate of both addresses."""
    names = ",".join(f"IP:{each}" for each in (*ADDRESSES, "127.0.0.1")) + ",DNS:localhost"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=llmpq"
    steps = (
        f"{made} -keyout ca.key -out ca.crt",
        f"{made} -keyout tls.key -out tls.crt -CA ca.crt -CAkey ca.key "
        f"-addext basicConstraints=critical,CA:FALSE -addext subjectAltName={names}",
    )
    for step in steps:
        subprocess.run(step.split(), cwd=folder, check=True, capture_output=True)
    paths = {f"RAY_TLS_{name}": str(folder / file) for name, file in TLS_FILES.items()}
    return {"RAY_USE_TLS": "1", **paths}


@dataclass(frozen=True)
class Lab:
    """The machine of the head, from which jobs are started."""

    head: Machine
    wire: Wire
    folder: Path

    def wait_for_nodes(self) -> None:
        count = str(len(ADDRESSES))
        words = [sys.executable, "-m", "benchmarks.stress.two_machines", "--count_to", count]
        if self.head.start(*words, log="nodes.log").wait(STARTS_S):
            raise SystemExit(f"no Ray on two machines: {self.head.said('nodes.log')[-2000:]}")

    def job(self, plan: Path, name: str, *more: str) -> Job:
        output = self.folder / f"{name}.jsonl"
        words = [sys.executable, "-m", "llmpq", "run", "--plan", str(plan), *JOB_OPTIONS]
        words += ["--input", str(self.folder / "rows.jsonl"), "--output", str(output), *more]
        words += ["--address", f"{ADDRESSES[0]}:{PORT}"]
        return Job(self.head.start(*words, log=f"{name}.log"), output, self.head, f"{name}.log")


JOB_OPTIONS = ("--shard_rows", "1", "--ignore_eos", "--no_cache", "--deterministic")


@dataclass(frozen=True)
class Job:
    process: subprocess.Popen[bytes]
    output: Path
    head: Machine
    log: str

    def wait_for_rows(self, count: int) -> None:
        until = time.monotonic() + STARTS_S
        shards = self.output.with_name(f"{self.output.name}.job")
        while len(list(shards.glob("part-*.jsonl"))) < count:
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the job did not come so far: {self.words()}")
            time.sleep(0.05)

    def wait(self) -> int:
        return self.process.wait(ENDS_S)

    def words(self) -> str:
        return self.head.said(self.log)[-3000:]

    def events(self) -> list[str]:
        """What the run told of faults."""
        lines = self.head.said(self.log).splitlines()
        kinds = ("going on after", "gone; planned again", "waiting for", "failed:")
        return [line for line in lines if any(kind in line for kind in kinds)]


def answers(path: Path) -> dict[str, list[int]]:
    rows = [json.loads(line) for line in path.open()]
    if len({row["custom_id"] for row in rows}) != len(rows):
        raise SystemExit(f"{path} has rows twice")
    return {row["custom_id"]: row["token_ids"] for row in rows}


def plan_of(folder: Path, stages: int, rate_mbit: float) -> Path:
    """A plan of the demo model for two or three of the devices."""
    nodes = [
        {"name": name, "accelerators": kinds, "usable_memory_gib": ROOM_GIB[stages]}
        for name, kinds in zip(
            "ab", (KINDS[0], dict([*KINDS[1].items()][: stages - 1])), strict=True
        )
    ]
    network = {"internode_gbit_per_s": rate_mbit / 1e3}
    values = {"name": "two", "nodes": nodes, "network": network, "emulate": {"time_scale": 0}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    plan = Cluster.from_yaml(folder / "cluster.yaml").plan(
        MODEL, Workload(8, PROMPT, TOKENS), keep_all_devices=True, bits=[16], dtype="float32"
    )
    if len(plan.stages) != stages:
        raise SystemExit(f"{len(plan.stages)} stages where {stages} were meant")
    plan.save(folder / f"plan{stages}.json")
    return folder / f"plan{stages}.json"


def on_one_machine(folder: Path, plan: Path) -> dict[str, list[int]]:
    output = folder / "alone.jsonl"
    words = [sys.executable, "-m", "llmpq", "run", "--plan", str(plan), *JOB_OPTIONS]
    words += ["--input", str(folder / "rows.jsonl"), "--output", str(output)]
    with (folder / "alone.log").open("wb") as log:
        if subprocess.run(words, stdout=log, stderr=log, check=False).returncode:
            raise SystemExit((folder / "alone.log").read_text()[-2000:])
    return answers(output)


@dataclass
class Trial:
    """What is tried, with the tokens that every job must have."""

    folder: Path
    delay_ms: float
    rate_mbit: float
    wanted: dict[str, list[int]]
    amiss: list[str]

    def check(self, name: str, job: Job, code: int) -> str:
        """What to say of a job's end."""
        if code:
            self.amiss.append(f"{name}: exit code {code}: {job.words()}")
            return f"exit code {code}"
        found = answers(job.output)
        right = sum(found.get(key) == tokens for key, tokens in self.wanted.items())
        if right != len(self.wanted) or len(found) != len(self.wanted):
            self.amiss.append(f"{name}: {right} of {len(self.wanted)} rows have the tokens")
        return f"{right} of {len(self.wanted)} rows as on one machine"

    def jobs(self, lab: Lab, *more: str) -> None:
        print(header("stages | seconds | outcome"))
        for stages in (2, 3):
            began = time.monotonic()
            job = lab.job(self.folder / f"plan{stages}.json", f"stages{stages}{len(more)}", *more)
            outcome = self.check(f"{stages} stages", job, job.wait())
            print(f"| {stages} | {time.monotonic() - began:.1f} | {outcome} |", flush=True)

    def hops(self, lab: Lab) -> None:
        words = [sys.executable, "-m", "benchmarks.stress.two_machines", "--measure_hops"]
        lab.head.start(*words, log="hops.log").wait(STARTS_S)
        print(header("way | bytes | planned ms | measured ms"))
        rate = self.rate_mbit * 1e6 / 8
        latency = plan_latency_s(self.folder / "plan2.json")
        for line in lab.head.said("hops.log").splitlines():
            if line.startswith("{"):
                hop = json.loads(line)
                planned = latency + hop["bytes"] / rate
                seen = 1e3 * hop["seconds"]
                print(f"| {hop['way']} | {hop['bytes']} | {1e3 * planned:.2f} | {seen:.2f} |")
        print(flush=True)

    def cuts(self, lab: Lab, seconds: Sequence[float]) -> None:
        print(header("wire lost for s | whole job s | outcome | what was told"))
        for cut in seconds:
            began = time.monotonic()
            job = lab.job(self.folder / "plan2.json", f"cut{cut:g}")
            job.wait_for_rows(ROWS // 8)
            lab.wire.switch(False)
            time.sleep(cut)
            lab.wire.switch(True)
            code, ended = job.wait(), time.monotonic() - began
            told = "; ".join(job.events()) or "nothing"
            lab.wait_for_nodes()
            outcome = ""
            if code == EXIT_FAILED:  # the device was given up
                job = lab.job(self.folder / "plan2.json", f"cut{cut:g}")
                code, outcome = job.wait(), "exit code 1; the same command: "
            outcome += self.check(f"a wire lost for {cut:g} s", job, code)
            print(f"| {cut:g} | {ended:.1f} | {outcome} | {told} |", flush=True)


def plan_latency_s(plan: Path) -> float:
    """Seconds of a hop beside its bytes, as plans between two nodes have them."""
    origin = Plan.load(plan).spec.origin
    assert origin is not None
    cluster = ClusterSpec.from_dict(yaml.safe_load(origin.cluster))
    first, last = cluster.devices[0], cluster.devices[-1]
    return cluster.link_latency_s(first, last)


def count_to(count: int) -> int:
    """In a namespace: wait until Ray has so many nodes."""
    import ray

    until = time.monotonic() + STARTS_S
    while time.monotonic() < until:
        try:
            ray.init(address=f"{ADDRESSES[0]}:{PORT}", logging_level="error", log_to_driver=False)
            alive = sum(node["Alive"] for node in ray.nodes())
            ray.shutdown()
            if alive == count:
                return 0
        except (ConnectionError, RuntimeError, OSError) as error:
            print(error, flush=True)
        time.sleep(1)
    return 1


def measure() -> int:
    """In a namespace: print hops from one machine to the other."""
    import ray

    from actors.processes.placement import place
    from actors.profiling.links import measure_hops

    ray.init(address=f"{ADDRESSES[0]}:{PORT}", logging_level="error", log_to_driver=False)
    requests = [stage for stage in Plan.load(os.environ["HOPS_OF"]).spec.stages]
    ends = place(requests, ray.cluster_resources())
    for hop in measure_hops(ends, "network", turns=20, ways=("gloo", "ray")):
        values = {"way": hop.way, "bytes": hop.payload_bytes, "seconds": hop.seconds}
        print(json.dumps(values), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--delay_ms", type=float, default=1.0, help="of the wire, in one direction")
    parser.add_argument("--rate_mbit", type=float, default=1000.0)
    parser.add_argument("--only", nargs="+", choices=("hops", "jobs", "cut", "tls"))
    parser.add_argument("--cut_s", nargs="+", type=float, default=[5.0, 60.0, 150.0])
    parser.add_argument("--count_to", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure_hops", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.count_to:
        return count_to(given.count_to)
    if given.measure_hops:
        return measure()
    only = given.only or ("hops", "jobs", "cut", "tls")
    print(f"{processor_name()}; a wire of {given.delay_ms:g} ms and {given.rate_mbit:g} Mbit/s\n")
    with tempfile.TemporaryDirectory(prefix="two-", dir="/tmp") as name:
        folder = Path(name)
        plan, _ = (plan_of(folder, stages, given.rate_mbit) for stages in (2, 3))
        os.environ["HOPS_OF"] = str(plan)
        rows = [{"custom_id": f"q{i}", "prompt": [5 + i] * PROMPT} for i in range(ROWS)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        wanted = on_one_machine(folder, plan)
        trial = Trial(folder, given.delay_ms, given.rate_mbit, wanted, [])
        wire = (given.delay_ms, given.rate_mbit)
        if set(only) - {"tls"}:
            with machines(folder, *wire, tls=False) as lab:
                for part, run in (
                    ("hops", lambda: trial.hops(lab)),
                    ("jobs", lambda: trial.jobs(lab)),
                    ("cut", lambda: trial.cuts(lab, given.cut_s)),
                ):
                    if part in only:
                        run()
                        print()
        if "tls" in only:
            (folder / "tls").mkdir()
            with machines(folder / "tls", *wire, tls=True) as lab:
                (folder / "tls" / "rows.jsonl").write_text((folder / "rows.jsonl").read_text())
                print("With RAY_USE_TLS and --transport ray:\n")
                trial.jobs(lab, "--transport", "ray")
    print("\n".join(trial.amiss))
    return 1 if trial.amiss else 0


if __name__ == "__main__":
    sys.exit(main())
