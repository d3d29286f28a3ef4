"""Gives every parser of outside input 1.7 million spoiled inputs in all: it must accept or refuse.

    python -m benchmarks.stress.fuzz [--inputs 1730000] [--seed 1] [--crashes FOLDER]

Each parser runs in a process of its own, guided by coverage where atheris is installed, else with
mutations alone. A failure is an error that is not llmpq's own or does not say where, a file opened
outside the parser's folder, an input of more than `SLOW_S`, and memory beyond `ROOM_BYTES`; its
input is kept in FOLDER, and `python -m benchmarks.stress.fuzz --again FILE...` shows what it does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.lab import header

SHARES = {
    "result line": 14, "text lines": 8, "quantize_config.json": 10, "job manifest": 7,
    "config.json": 10, "generation_config.json": 4, "model folder": 13, "profile CSV": 10,
    "prompt line": 30, "safetensors": 8, "shard index": 5,
    "prompt file": 2, "prompt Parquet": 1, "packed layer": 3, "omega file": 5, "plan JSON": 10,
    "cluster YAML": 3, "prompt CSV": 4, "packed prompts": 2, "result CSV": 4,
    "chat templates": 10, "tokenizer files": 10,
}  # fmt: skip
"""The share of all inputs that a parser gets; smaller for slow ones."""

PER_SHARE = 10_000

SLOW_S = 5.0
ROOM_BYTES = 1 << 30
"""Address space that a parser may take beyond what it has when it starts."""

LONGEST = 1 << 16
_KEPT = 400
"""Inputs in the pool of the unguided run."""


@dataclass
class Tally:
    """Counts of what became of the inputs of one parser."""

    parser: str
    guide: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    failures: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    memory_bytes: int = 0
    kinds: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Print a Markdown table; 1 where anything failed."""
    options = _options()
    if options.again:
        return _again([Path(path) for path in options.again])
    if options.parser:
        _fuzz(options)
        return 0
    print(header("parser | inputs | inputs/s | accepted | refused | failures | slowest | memory"))
    tallies = []
    for name in SHARES:
        if not options.only or name in options.only:
            tallies.append(_run(name, options))
            print(_row(tallies[-1]), flush=True)
    guides = sorted({tally.guide for tally in tallies})
    print(
        f"\n{sum(t.inputs for t in tallies):,} inputs, seed {options.seed}, guided by "
        f"{' and '.join(guides)}, one process at a time, {os.cpu_count()} cores"
    )
    for t in tallies:
        for kind, name in t.kinds.items():
            print(f"\n- {t.parser}: {kind} ({name})")
    return int(any(t.failures for t in tallies))


def _row(t: Tally) -> str:
    return (
        f"| {t.parser} | {t.inputs:,} | {t.inputs / max(t.seconds, 1e-9):,.0f} | "
        f"{t.accepted:,} | {t.refused:,} | {t.failures:,} | {t.slowest_s * 1e3:.0f} ms | "
        f"+{t.memory_bytes / 2**20:.0f} MiB |"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=PER_SHARE * sum(SHARES.values()), help="in all"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guide", choices=("auto", "atheris", "mutation"), default="auto")
    parser.add_argument("--only", nargs="+", help="names of parsers")
    parser.add_argument("--crashes", type=Path, default=Path("fuzz-crashes"))
    parser.add_argument("--again", nargs="+", metavar="FILE", help="inputs that failed")
    parser.add_argument("--parser", help=argparse.SUPPRESS)
    parser.add_argument("--tally", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(name: str, options: argparse.Namespace) -> Tally:
    """One parser in a process of its own; a process that dies is a failure."""
    inputs = -(-options.inputs * SHARES[name] // sum(SHARES.values()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tally.json"
        command = [
            sys.executable, "-m", "benchmarks.stress.fuzz", "--parser", name, "--tally", str(path),
            "--inputs", str(inputs), "--seed", str(options.seed), "--guide", options.guide,
            "--crashes", str(options.crashes.absolute()),
        ]  # fmt: skip
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        tally = Tally(name, "none")
        if path.exists():
            tally = Tally(**json.loads(path.read_text()))
        if done.returncode or tally.inputs < inputs:
            tally.failures += 1
            tally.kinds[f"the process ended with {done.returncode}: {done.stderr[-600:]}"] = "-"
    return tally


def _fuzz(options: argparse.Namespace) -> None:
    guided = options.guide != "mutation" and find_spec("atheris") is not None
    if options.guide == "atheris" and not guided:
        raise SystemExit("atheris is not installed: pip install atheris")
    atheris: Any = None
    if guided:
        import atheris as found

        atheris = found
    watched = ["planner", "quant", "llmpq", "actors"]
    with atheris.instrument_imports(include=watched) if guided else nullcontext():
        from tests.properties.parsers import parsers
    warnings.simplefilter("ignore")
    parser = parsers()[options.parser]
    seeds = parser.seeds()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_quick_folder()))
    trial = Trial(parser, folder, options, Tally(parser.name, "atheris" if guided else "mutation"))
    for seed in seeds:  # imports what is imported late, and must be accepted
        assert parser.check(seed, folder), f"{parser.name} refuses a seed: {seed[:200]!r}"
    trial.begin()
    if guided:
        _guided(atheris, trial, seeds, options)
    else:
        _unguided(trial, seeds, options)
        trial.finish()


def _guided(
    atheris: Any, trial: Trial, seeds: Sequence[bytes], options: argparse.Namespace
) -> None:
    """Does not return: libFuzzer ends the process, or `Trial.finish` does."""
    corpus = trial.folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        # Half of the time a seed: libFuzzer's own corpus drifts towards what is refused.
        begin = bytes(data) if rng.random() < 0.5 else rng.choice(seeds)
        spoiled = trial.parser.mutate(begin, rng)
        return (atheris.Mutate(spoiled, most) if rng.random() < 0.05 else spoiled)[:most]

    flags = [
        "fuzz", f"-seed={options.seed}", f"-max_len={LONGEST}", "-timeout=30", "-verbosity=0",
        "-rss_limit_mb=0", "-reduce_inputs=0", f"-artifact_prefix={options.crashes}/", str(corpus),
    ]  # fmt: skip
    options.crashes.mkdir(parents=True, exist_ok=True)
    atheris.Setup(flags, trial.one, custom_mutator=mutator)
    atheris.Fuzz()


def _unguided(trial: Trial, seeds: Sequence[bytes], options: argparse.Namespace) -> None:
    """Mutations of the seeds and of what was accepted."""
    rng = random.Random(options.seed)
    pool = list(seeds)
    while trial.tally.inputs < options.inputs:
        data = trial.parser.mutate(rng.choice(pool), rng)[:LONGEST]
        before = trial.tally.accepted
        trial.one(data)
        if trial.tally.accepted > before and len(data) < LONGEST // 4:
            if len(pool) < _KEPT:
                pool.append(data)
            else:
                pool[rng.randrange(len(seeds), _KEPT)] = data


class Trial:
    """Runs inputs through one parser and counts."""

    def __init__(self, parser: Any, folder: Path, options: argparse.Namespace, tally: Tally):
        self.parser, self.folder, self.tally = parser, folder, tally
        self._options = options
        self._outside: list[str] = []
        self._is_inside = False
        self._home = self.folder

    def begin(self) -> None:
        """From here on files and memory are watched."""
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ROOM_BYTES,) * 2)
        self._memory_bytes = _peak_bytes()
        sys.addaudithook(self._watch)
        self._began = time.perf_counter()

    def one(self, data: bytes) -> None:
        """One input."""
        tally = self.tally
        began = time.perf_counter()
        kind = self._kind_of(data)
        spent_s = time.perf_counter() - began
        if kind is not None:
            self._fail(data, kind)
        if self._outside:
            self._fail(data, f"outside: {self._outside[0]}")
            self._outside.clear()
        if spent_s > SLOW_S:
            self._fail(data, f"slow: {spent_s:.1f} s")
        tally.slowest_s = max(tally.slowest_s, spent_s)
        tally.inputs += 1
        if tally.inputs == self._options.inputs:
            self.finish()

    def _kind_of(self, data: bytes) -> str | None:
        """Check one input and return the kind of its failure, None where there is none."""
        self._is_inside = self.parser.watched
        try:
            taken = self.parser.check(bytes(data), self.folder)
        except Exception as error:  # whatever it is, it is the finding
            return _kind(error)
        finally:
            self._is_inside = False
        self.tally.accepted += taken
        self.tally.refused += not taken
        return None

    def finish(self) -> None:
        """Write the tally and leave, past libFuzzer."""
        self.tally.seconds = time.perf_counter() - self._began
        self.parser.close()
        self.tally.memory_bytes = _peak_bytes() - self._memory_bytes
        self._options.tally.write_text(json.dumps(asdict(self.tally)))
        subprocess.run(["rm", "-rf", str(self.folder)], check=False)
        os._exit(0)

    def _fail(self, data: bytes, kind: str) -> None:
        self.tally.failures += 1
        if kind in self.tally.kinds:
            return
        digest = hashlib.sha256(data).hexdigest()[:12]
        name = f"{self.parser.name.replace(' ', '_')}-{digest}"
        self._options.crashes.mkdir(parents=True, exist_ok=True)
        (self._options.crashes / name).write_bytes(data)
        self.tally.kinds[kind] = name

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: what a parser must not do."""
        if not self._is_inside:
            return
        if event in _NEVER:
            self._outside.append(f"{event} {arguments!r:.200}")
        elif event in _ON_PATHS and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if not path.startswith((str(self._home), *_READ_BY_PYTHON)):
                self._outside.append(f"{event} {path!r:.200}")


_ON_PATHS = frozenset({"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir"})
_NEVER = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
                    "socket.connect", "exec.shell", "ctypes.dlopen"})  # fmt: skip
_READ_BY_PYTHON = (sys.prefix, sys.base_prefix, *(p for p in sys.path if p), "/proc/self")


def _kind(error: Exception) -> str:
    """Type and place: failures of one kind are listed once."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    own = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    last = own[-1] if own else frame
    where = f"{Path(last.filename).name}:{last.lineno}"
    text = re.sub("[0-9]+|(.)\\1{9,}", "#", str(error))
    return f"{type(error).__name__} at {where}: {text[:100]!a}"


def _peak_bytes() -> int:
    """Peak memory of this process and of the largest one that it started and that has ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(each).ru_maxrss for each in who) * 1024


def _quick_folder() -> str | None:
    """Files in memory where the system has such a folder."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _again(paths: Sequence[Path]) -> int:
    from tests.properties.parsers import parsers

    named: dict[str, Callable[[bytes, Path], bool]] = {
        name.replace(" ", "_"): parser.check for name, parser in parsers().items()
    }
    failed = 0
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            try:
                taken = named[path.name.rpartition("-")[0]](path.read_bytes(), Path(folder))
                print(f"{path}: {'accepted' if taken else 'refused'}")
            except Exception:  # whatever it is, it is what is looked for
                failed = 1
                print(f"{path}:\n{traceback.format_exc(limit=-6)}")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
