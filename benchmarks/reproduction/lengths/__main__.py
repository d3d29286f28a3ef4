"""Scheduling by predicted output lengths (S³) against what else reserves KV memory.

    python -m benchmarks.reproduction.lengths PART [--help]

papers      the paper's models and GPUs, in virtual time
mixed       mixed clusters, on the stages of llmpq's plans
memory      KV memory from scarce to ample
accuracy    predictions from all right to chance
real        a job of the demo model on this machine's CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.reproduction.lengths import accuracy, memory, mixed, papers, real

PARTS = {
    "papers": papers,
    "mixed": mixed,
    "memory": memory,
    "accuracy": accuracy,
    "real": real,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reproduction.lengths", description=__doc__
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        module.add_arguments(parts.add_parser(name, description=module.__doc__))
    options = parser.parse_args(arguments)
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
