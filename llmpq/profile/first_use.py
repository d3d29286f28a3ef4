"""Times of this machine's CPU for plans without a profile: measured once by a short child process.

They lie in the user's cache folder, in a file that never changes, for each kind of layers, number
of threads, processor and version of the libraries that compute. Those that were taken while other
programs had the CPU say so in their name, and serve until they can be taken again.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from actors.processes.device import stage_environment
from llmpq.profile.layers import Profile, timed_kinds
from planner.cluster.device import CPU_TOKENS_AT_ONCE, Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import PROVENANCE
from planner.model.finding import model_config, shape_from_config
from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.profiles.design import DesignSpace, ProfileOptions
from planner.profiles.rows import read_profiles, write_profiles
from quant.common.errors import LlmpqError, SpecError
from quant.common.files import user_cache_folder
from quant.scheme import BITWIDTHS, HEAD_BITWIDTHS

_STAT = Path("/proc/stat")
_KINDS, _IDLE = 8, (3, 4)
"""Kinds of a CPU's ticks that do not overlap, and those in which it waits (proc(5))."""

_LOOK_S = 0.3
"""At ticks of 10 ms a CPU's share is known to 3 %."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the machine started, summed over the CPUs that this process may use: those in
    which they worked or another machine had them, and all. `own_s` are those of this process and of
    its children that have ended.
    """

    worked_s: float = 0.0
    passed_s: float = 0.0
    own_s: float = 0.0

    @classmethod
    def now(cls, stat: Path = _STAT) -> CpuTimes:
        """What `stat` says; all 0 on a system without it."""
        try:
            lines = stat.read_text(encoding="ascii").splitlines()
            names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        except (OSError, AttributeError):
            return cls()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        worked = passed = 0
        for name, *counts in map(str.split, lines):
            if name in names:
                ticks = [int(each) for each in counts[:_KINDS]]
                passed += sum(ticks)
                worked += sum(ticks) - sum(ticks[kind] for kind in _IDLE)
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        own_s = sum(each.ru_utime + each.ru_stime for each in used)
        return cls(worked * tick_s, passed * tick_s, own_s)

    def others_since(self, before: CpuTimes) -> float:
        """The share of the CPUs, from 0 to 1, that others had since `before`."""
        passed_s = self.passed_s - before.passed_s
        others_s = self.worked_s - before.worked_s - (self.own_s - before.own_s)
        return min(1.0, max(0.0, others_s / passed_s)) if passed_s > 0 else 0.0


def others_now() -> float:
    """The share of the CPUs that others have at this moment, in which this process waits."""
    before = CpuTimes.now()
    time.sleep(_LOOK_S)
    return CpuTimes.now().others_since(before)


OFF = "LLMPQ_NO_MEASURING"
"""The variable of the environment that stands for `no_measuring`, where it is not empty."""

_LARGEST_LAYER = 1 << 25
"""Weights of a layer that is measured itself: more take too long to be made and rounded."""

_STANDS_FOR_LARGER: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1536,
    "intermediate_size": 4224,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
"""A layer whose weights, 57 MB in 16 bit, lie outside of most caches, as those of larger ones."""

_DESIGN = ProfileOptions(
    points=5,
    rounds=3,
    space=DesignSpace((1, 8, 32), 16, 512, prefill_tokens=CPU_TOKENS_AT_ONCE, decode_tokens=4096),
)
"""Prompts of up to as many tokens as pass at once, as what one more token adds to a few hundred
says little of a thousand, and decode steps of few requests."""

_LONG_S, _LEAST_ROUNDS = 0.1, 2
"""Seconds after which a workload is passed no more, if it was so often: one pass alone may have met
a slow moment."""

_LIMIT_S = 120.0
"""A dozen seconds are the compiler's, which loops that are kept save; a busy machine takes more."""

_MOST_OTHERS = 0.1
"""Share of the CPUs that others may have while times are taken."""

_LIBRARIES = ("llmpq", "torch", "numba", "transformers")


def with_own_times(cluster: ClusterSpec, model: str | Path, options: PlanOptions) -> PlanOptions:
    """`options` with a profile of this machine's CPU, where the cluster has it as a device and
    nothing else is asked for. Warns where it cannot be measured.
    """
    asked = options.profiles is None and not options.no_measuring and not os.environ.get(OFF)
    device = _own_cpu(cluster) if asked else None
    if device is None:
        return options
    try:
        return replace(options, profiles=_times(device, str(model), options))
    except (OSError, RuntimeError, subprocess.SubprocessError, LlmpqError) as error:
        _warn(str(error), 4)
        return options


def _warn(problem: str, level: int) -> None:
    warnings.warn(
        f"this CPU's kernels cannot be measured ({problem}); times are {PROVENANCE}",
        stacklevel=level,
    )


def _own_cpu(cluster: ClusterSpec) -> Device | None:
    """A CPU of the cluster where all of these are this machine's, of one number of threads: those
    of nodes of its name, or of the only node if it has so many cores.
    """
    cpus = [each for each in cluster.devices if each.accelerator.is_cpu and not each.emulated]
    nodes = {each.node for each in cluster.devices}
    threads = sum(each.threads or 1 for each in cpus)
    is_only = (
        len(nodes) == 1 and threads <= (os.cpu_count() or 1) and "RAY_ADDRESS" not in os.environ
    )
    is_named = {each.node for each in cpus} <= {platform.node(), "localhost"}
    if not cpus or len({each.threads for each in cpus}) > 1 or not (is_only or is_named):
        return None
    return cpus[0]


def _times(device: Device, model: str, options: PlanOptions) -> str:
    """The file of the times, which are measured if it is not there."""
    config, dtype = model_config(model), device.compute_dtype(options.dtype)
    shape = shape_from_config(model, config)
    if max(each.layer_parameters for each in shape.plain.kind_shapes) > _LARGEST_LAYER:
        config, model = _STANDS_FOR_LARGER, "LLaMA layer"
        shape = shape_from_config(model, config)
    task: dict[str, Any] = {
        "name": Path(model).name,
        "config": dict(config),
        "dtype": dtype,
        "bits": BITWIDTHS,
        "head_bits": HEAD_BITWIDTHS,
        "threads": device.threads or 1,
        "beside": device.neighbours,
    }
    folder, name = user_cache_folder() / "cpu_times", f"cpu-{_digest(task, shape)}"
    percent, path = _kept(folder, name)
    if path is None or percent:
        percent, path = _measured(folder, name, task)
    if percent:
        warnings.warn(
            f"this CPU's kernels were measured while other programs had {percent} % of it, and "
            "seem slow; the next plan that finds it idle measures them again",
            stacklevel=5,
        )
    return str(path)


def _kept(folder: Path, name: str) -> tuple[int, Path | None]:
    """The times in `folder` that others disturbed least, and how many % of the CPUs these had."""
    quiet = folder / f"{name}.csv"
    if quiet.exists():
        return 0, quiet
    busy = ((int(each.stem.rpartition("-")[2]), each) for each in folder.glob(f"{name}-busy-*.csv"))
    return min(busy, default=(0, None))


def _measured(folder: Path, name: str, task: Mapping[str, Any]) -> tuple[int, Path]:
    """The times after they were measured, unless the CPU is busy and there are some."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as own:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that measure at once would slow each other down
        percent, path = _kept(folder, name)
        if path is not None and (not percent or others_now() > _MOST_OTHERS):
            return percent, path
        _tell(task, percent)
        made, before = Path(own) / f"{name}.csv", CpuTimes.now()
        try:
            _measure_in_child({**task, "path": str(made)}, task["threads"])
        except subprocess.TimeoutExpired:  # as it would the next time
            write_profiles(made, read_profiles(made) if made.exists() else ())
            _warn(f"not all within {_LIMIT_S:.0f} s; {folder} keeps the others", 6)
        others = CpuTimes.now().others_since(before)
        busy = f"-busy-{100 * others:.0f}" if others > _MOST_OTHERS else ""
        target = folder / f"{name}{busy}.csv"
        if not target.exists():
            made.rename(target)
        percent, path = _kept(folder, name)
        return percent, path or target


def _digest(task: Mapping[str, Any], shape: ModelShape) -> str:
    layers = [asdict(kind.layer) for kind in timed_kinds(shape)]
    known = {name: each for name, each in task.items() if name not in ("name", "config")}
    text = json.dumps([known, layers, _processor(), _versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """The model and the instruction sets of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    told = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    found = {name.strip(): value.strip() for name, value in told.items()}
    return [found.get(name, "") for name in ("model name", "flags", "Features")]


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(name)
    return found


def _tell(task: Mapping[str, Any], percent: int) -> None:
    """Say what is measured, and that others had so much of the CPU when it was before."""
    turn = f"again, as others had {percent} % of it" if percent else "once"
    beside = f" beside {task['beside']} more" if task["beside"] else ""
    print(
        f"measuring this CPU's kernels, {turn}: layers of {task['name']} at {task['threads']} "
        f"threads{beside} (--no_measuring plans by typical figures)",
        file=sys.stderr,
        flush=True,
    )


def _measure_in_child(task: Mapping[str, Any], threads: int) -> None:
    """Measure in a process that starts as a stage's, apart from this one, which needs no torch."""
    path = os.pathsep.join(filter(None, sys.path))
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,  # open as long as this process lives
            stdout=subprocess.DEVNULL,
            stderr=told,
            env={**os.environ, **stage_environment(threads), "PYTHONPATH": path},
            text=True,
        ) as child,
    ):
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(task) + "\n")
            child.stdin.flush()
            importlib.import_module("scipy.optimize")  # planning needs it, and waits here anyway
            child.wait(_LIMIT_S)
        finally:
            child.kill()
        if child.returncode:
            told.seek(0)
            said = told.read().strip().splitlines() or [f"exit code {child.returncode}"]
            raise SpecError(said[-1])


def main() -> None:
    """Measure what stands in the input's first line, as long as that stays open."""
    task = json.loads(sys.stdin.readline())
    gc.disable()  # nothing of what is imported is garbage, and to look for it takes a sixth
    import torch

    from actors.profiling.loops import compiled_beside

    with compiled_beside(getattr(torch, task["dtype"])):
        from actors.profiling.beside import end_with_parent

        gc.freeze()
        gc.enable()
        threading.Thread(target=end_with_parent, daemon=True).start()
        measure_here(task)
    os._exit(0)  # to take all of that apart takes a second


def measure_here(task: Mapping[str, Any]) -> None:
    """Write the times of `task` with what this process computes."""
    cpus = {"CPU": 1 + task["beside"]}
    node = {"accelerators": cpus, "memory_gib": 1, "threads": task["threads"]}
    device, *_ = ClusterSpec.from_dict({"name": "here", "nodes": [node]}).devices
    options = replace(_DESIGN, dtype=task["dtype"], bits=tuple(task["bits"]))
    shape = shape_from_config(task["name"], task["config"])
    profile = Profile(Path(task["path"]), task["config"], shape, options)
    with ExitStack() as stack:
        profile.measure(device, lambda *_: None, partial(_here, stack))


def _here(stack: ExitStack, task: Any, _: Device) -> Any:
    """Measure in this process; those beside it stay at the first kind of layers."""
    from actors.profiling.beside import others_busy
    from actors.profiling.task import measure

    quick = replace(task, least_rounds=_LEAST_ROUNDS, long_s=_LONG_S)
    if not task.usual_reference_s:
        stack.enter_context(others_busy(quick))
    yield from measure(quick)


if __name__ == "__main__":
    main()
