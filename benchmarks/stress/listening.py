"""Lists what a local run listens on, and what answers there without Ray's token.

    python -m benchmarks.stress.listening

The demo model runs on three stages in a Ray of its own, linked by gloo. While it generates, every
listening TCP socket of this process and those below it is told, as `ss -ltnp` does, with what a
plain HTTP request without token gets there. Exits with 1 where one is not on loopback.
"""

from __future__ import annotations

import http.client
import ipaddress
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ray  # noqa: F401  (brings psutil)

from benchmarks.lab import header

# isort: split
import psutil

from actors.messages import Request, Sampling
from actors.stage_group import GroupOptions, StageGroup
from benchmarks.stress.local_head import CLUSTER, MODEL, name_of
from llmpq import Cluster, Workload
from llmpq.remote.session import ray_session

ROWS = 64
PATHS = ("/metrics", "/api/local_raylet_healthz")
LIMIT_S = 2.0
KNOWN = {
    "raylet": "raylet",
    "gcs_server": "GCS",
    "monitor.py": "autoscaler's monitor",
    "log_monitor.py": "log monitor",
    "ray::DashboardAgent": "dashboard agent",
    "ray::RuntimeEnvAgent": "runtime environment agent",
    "ray::StageActor": "stage",
    "ray::IDLE": "idle worker",
    "dashboard.py": "dashboard",
}


@dataclass(frozen=True)
class Listening:
    """One socket of a process, and the paths that answer with 200 to who brings no token."""

    process: str
    address: str
    port: int
    open_paths: tuple[str, ...]

    @property
    def on_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listening_below(process: psutil.Process) -> list[Listening]:
    """The sockets of `process` and of those it has started, by name."""
    sockets: list[tuple[str, str, int]] = []
    for each in (process, *process.children(recursive=True)):
        try:
            name = "driver" if each == process else _known(name_of(each))
            connections = each.net_connections("tcp")
        except (psutil.Error, IndexError):  # it has ended
            continue
        listening = (each for each in connections if each.status == psutil.CONN_LISTEN)
        sockets += ((name, *connection.laddr) for connection in listening)
    with ThreadPoolExecutor(len(sockets) or 1) as pool:  # most answer nothing until time is up
        paths = pool.map(_open_paths, (each[1] for each in sockets), (each[2] for each in sockets))
        found = [Listening(*each, open_) for each, open_ in zip(sockets, paths, strict=True)]
    return sorted(found, key=lambda socket: (socket.process, socket.port))


def _known(name: str) -> str:
    return KNOWN.get(name, name)


def _open_paths(address: str, port: int) -> tuple[str, ...]:
    """The paths that a plain HTTP request reads there."""
    return tuple(path for path in PATHS if _answers(address, port, path))


def _answers(address: str, port: int, path: str) -> bool:
    host = address.replace("0.0.0.0", "127.0.0.1") if address != "::" else "127.0.0.1"
    connection = http.client.HTTPConnection(host.removeprefix("::ffff:"), port, timeout=LIMIT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def of_a_run() -> list[Listening]:
    """While the demo runs."""
    workload = Workload(64, 16, 32)  # which needs all three
    plan = Cluster.from_yaml(CLUSTER).plan(MODEL, workload, keep_all_devices=True)
    requests = [Request(str(i), (5 + i % 90,) * 8, 32, Sampling()) for i in range(ROWS)]
    with (
        ray_session("local"),
        StageGroup(plan.spec, str(Path(MODEL).absolute()), GroupOptions(transport="gloo")) as group,
    ):
        results = group.generate(requests)
        next(results)
        found = listening_below(psutil.Process())
        for _ in results:
            pass
    return found


def main() -> int:
    """Print the table; 1 where something is open to other machines."""
    found = of_a_run()
    print(header("process | listens on | open without token"))
    for socket in found:
        paths = ", ".join(socket.open_paths) or "-"
        print(f"| {socket.process} | {socket.address}:{socket.port} | {paths} |")
    strangers = [socket for socket in found if not socket.on_loopback]
    print(f"\n{len(found)} sockets, {len(strangers)} of them open to other machines")
    return 1 if strangers else 0


if __name__ == "__main__":
    sys.exit(main())
