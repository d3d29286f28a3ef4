"""The job that `benchmarks.stress.chaos` disturbs: `llmpq run` as a process, on local Ray nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import ray
from ray.cluster_utils import Cluster as RayCluster

DEVICES = ("T4", "V100", "A100")
LOOKS = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
STUCK_S = 120.0  # without any commit: the job hangs
END_S = 30.0
TMPFS_KIB = 16384
_ROWS = re.compile(r"part-\d+-\d+-(\d+)-[0-9a-f]{16}\.jsonl")

# Stacks of all threads on SIGUSR1, for the diagnosis of one that hangs.
_DRIVER = (
    "import faulthandler, signal, sys; faulthandler.register(signal.SIGUSR1); "
    "faulthandler.enable(); from llmpq.cli.run import main; sys.exit(main(sys.argv[1:]))"
)


class ChaosError(Exception):
    """A job that went wrong in a way that no fault explains."""


class Nodes:
    """A head without devices, and a Ray node for each device; one that dies is noticed within two
    seconds.
    """

    def __init__(self) -> None:
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": LOOKS}
        self._cluster = RayCluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        for name in DEVICES:
            self.add(name)
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        """To join."""
        return str(self._cluster.address)

    @property
    def present(self) -> list[str]:
        """Devices that have a node."""
        return sorted(self._nodes)

    def add(self, name: str) -> None:
        """Start a node for a device."""
        self._nodes[name] = self._cluster.add_node(num_cpus=1, resources={name: 1})

    def remove(self, name: str) -> None:
        """Kill all processes of the node."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def stage_pids(self) -> list[int]:
        """The process ids of all stages that live, in no order."""
        return sorted(int(actor["Pid"]) for actor in self._stages())

    def in_use(self) -> list[str]:
        """Devices whose nodes have a stage."""
        used = {actor["Address"]["NodeID"] for actor in self._stages()}
        return sorted(name for name, node in self._nodes.items() if node.node_id in used)

    def _stages(self) -> list[Any]:
        actors = ray._private.state.actors().values()
        return [a for a in actors if a["State"] == "ALIVE" and "Actor" in a["ActorClassName"]]

    def __enter__(self) -> Self:
        """This."""
        return self

    def __exit__(self, *error: object) -> None:
        """End all of it."""
        ray.shutdown()
        self._cluster.shutdown()


class Disk:
    """A small file system of its own for the output, that can be filled; where none may be mounted
    (`is_mounted` False) a plain folder.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llmpq-chaos-"))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_KIB}k", "tmpfs", str(self.folder)]
        self.is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._ballast = self.folder / "ballast"

    def fill(self) -> None:
        """Fill the file system, so that every further write fails with ENOSPC."""
        with self._ballast.open("wb", buffering=0) as file, suppress(OSError):
            for size in (2**16, 2**12):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def free(self) -> None:
        """There is room again."""
        self._ballast.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """This."""
        return self

    def __exit__(self, *error: object) -> None:
        """Unmount and remove."""
        if self.is_mounted:
            subprocess.run(["umount", str(self.folder)], check=True)
        else:
            for path in sorted(self.folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()


@dataclass
class DistJob:
    """`llmpq run` with `arguments`, started again and again until all rows are done."""

    arguments: list[str]
    output: Path
    log: Path
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Begin, or go on."""
        command = [sys.executable, "-c", _DRIVER, *self.arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.starts += 1

    def __enter__(self) -> Self:
        """This."""
        return self

    def __exit__(self, *error: object) -> None:
        """Leave no driver behind."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def send(self, what: int) -> None:
        """Send a signal to the driver."""
        assert self.process is not None
        self.process.send_signal(what)

    def ended(self) -> int | None:
        """The exit code."""
        assert self.process is not None
        return self.process.poll()

    def wait_for_end(self) -> int:
        """The exit code; raises `ChaosError` when the driver does not end."""
        assert self.process is not None
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired as error:
            raise ChaosError(
                f"the driver did not end in {END_S:g} s: {self.diagnosis()}"
            ) from error
        self.codes.append(code)
        return code

    def committed(self) -> int:
        """Rows on disk so far."""
        folder = self.output.with_name(self.output.name + ".job")
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        found = (_ROWS.fullmatch(name) for name in names)
        return sum(int(match[1]) for match in found if match)

    def told(self) -> str:
        """Everything that the driver wrote."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def diagnosis(self) -> str:
        """Return the stacks of a driver that hangs, and kill it."""
        assert self.process is not None
        if self.process.poll() is None:
            self.send(signal.SIGUSR1)
            time.sleep(2.0)
            self.send(signal.SIGKILL)
            self.process.wait()
        return (
            f"driver {self.process.pid} stopped by the benchmark; it wrote\n{self.told()[-6000:]}"
        )
