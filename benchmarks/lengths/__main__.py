"""Scheduling by predicted output lengths (S³) against what else reserves KV memory.

python -m benchmarks.lengths papers      # the paper's models and GPUs, in virtual time
python -m benchmarks.lengths mixed       # mixed clusters, on the stages of llmpq's plans
python -m benchmarks.lengths memory      # KV memory from scarce to ample
python -m benchmarks.lengths accuracy    # predictions from all right to chance
python -m benchmarks.lengths plans       # plans for s3 beside those for orca
python -m benchmarks.lengths real        # a job of the demo model on this machine's CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.lengths import accuracy, memory, mixed, papers, plans, real

PARTS = {
    "papers": papers,
    "mixed": mixed,
    "memory": memory,
    "accuracy": accuracy,
    "plans": plans,
    "real": real,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        module.add_arguments(parts.add_parser(name, description=module.__doc__))
    options = parser.parse_args(arguments)
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
