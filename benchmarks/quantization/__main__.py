"""What rounding weights costs SmolLM2 and the demo model, llmpq's ways beside other libraries'.

    pip install 'llmpq[bench-quantization]'
    python -m benchmarks.quantization [--models smollm2 demo] [--quick] [--kept FOLDER]
        [--interpreter hqq=/venv/bin/python gptqmodel=/other/bin/python …]

Each library rounds the linears of the decoder layers in a process of its own, in the interpreter
that has it (`--interpreter`; default: this one), and leaves dequantized weights; all are judged by
one forward pass in float32. Bits a weight are those of codes, scales and zeros; embedding, norms
and head keep 16 bit for all. Errors are standard errors over windows of the text, and "above 16
bit" compares window by window. SmolLM2's weights come from a GGUF of blocks of 32, whose grids a
type with such blocks finds again: `--change shuffled` has the same model without them. With
`--kept` what has been rounded is found again by a later call.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.lab import header, processor_name
from benchmarks.quantization.contestants.exchange import read_outcome
from benchmarks.quantization.judge import Judge
from benchmarks.quantization.models import (
    MODELS,
    with_linears,
    with_outliers,
    with_shuffled_channels,
)
from benchmarks.quantization.texts import Texts, add_arguments, texts_for
from llmpq.quality.perplexity import Perplexity

REPOSITORY = Path(__file__).resolve().parents[2]
CHANGES = {"outliers": with_outliers, "shuffled": with_shuffled_channels}
PARTS = {
    "ours": "ours",
    "bitsandbytes": "bitsandbytes_library",
    "hqq": "hqq_library",
    "torchao": "torchao_library",
    "ggml": "ggml_library",
    "gptqmodel": "gptqmodel_library",
}
QUICK_PARTS = ("ours", "bitsandbytes")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table a model."""
    options = read_options(arguments)
    torch.set_num_threads(1)
    print(f"{processor_name()}, 1 thread, torch {torch.__version__}")
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            kept = (options.kept or Path(scratch)) / name
            kept.mkdir(parents=True, exist_ok=True)
            source = MODELS[name]()
            texts = texts_for(source, options)
            model = source
            if options.change:
                model, kept = Path(scratch) / "changed", kept / options.change
                CHANGES[options.change](source, model)
                kept.mkdir(exist_ok=True)
            run_contestants(model, texts, kept, options)
            print_table(name, Judge(model, texts.held_out), kept)


def run_contestants(model: Path, texts: Texts, kept: Path, options: argparse.Namespace) -> None:
    """Let each library round in its own process; tell of those that could not."""
    calibration = kept / "calibration.npy"
    np.save(calibration, texts.calibration.token_ids)
    interpreters = dict(each.split("=", 1) for each in options.interpreter)
    for part in options.parts:
        module = f"benchmarks.quantization.contestants.{PARTS[part]}"
        command = [interpreters.get(part, sys.executable), "-m", module]
        command += [str(model), str(calibration), str(kept)]
        command += ["--only", *options.only] if options.only else []
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with (kept / f"{part}.log").open("w+") as log:
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            log.seek(0)
            last = log.read().strip().splitlines()[-1:]
        if done.returncode:
            print(f"\n{part}: {' '.join(last) or done.returncode}")


def print_table(name: str, judge: Judge, kept: Path) -> None:
    """One row for each outcome in `kept`, by its bits and divergence."""
    full = judge.reference
    print(
        f"\n{name}, {full.tokens} tokens in {full.windows} windows, 16 bit {full.perplexity:.3f}:\n"
    )
    print(header("rounded by | bits a weight | perplexity | above 16 bit | divergence, nats"))
    rows = sorted(scored(judge, kept), key=lambda row: (int(row[0]), row[1].divergence or 0.0))
    for bits, found in rows:
        above, error = found.above(full)
        print(
            f"| {found.name} | {bits:.2f} | {found.perplexity:.3f} | {above:+.3f} ± {error:.3f} "
            f"| {found.divergence:.4f} ± {found.divergence_error:.4f} |"
        )


def scored(judge: Judge, kept: Path) -> Iterator[tuple[float, Perplexity]]:
    """Bits a weight and score of each outcome."""
    for file in sorted(kept.glob("*.safetensors")):
        outcome = read_outcome(file)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "rounded"
            with_linears(judge.model, target, outcome.weights)
            yield outcome.bits, judge.score(file.stem, target)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--quick` is for few tokens, and what needs no other library."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", "--part", nargs="+", choices=list(PARTS), help="default: all")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows of the parts")
    parser.add_argument("--change", choices=list(CHANGES), help="the models so, function kept")
    parser.add_argument("--quick", action="store_true", help="few tokens, few parts")
    parser.add_argument("--kept", type=Path, help="folder of what is rounded, for later calls")
    parser.add_argument(
        "--interpreter", nargs="+", default=[], metavar="PART=PYTHON", help="of other environments"
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(QUICK_PARTS if options.quick else PARTS)
    return options


if __name__ == "__main__":
    main()
