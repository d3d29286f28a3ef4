"""Scheduling by predicted output lengths (S³) against what else reserves KV memory.

    python -m benchmarks.reproduction.lengths PART [--help]

papers      the paper's models and GPUs, in virtual time
mixed       mixed clusters, on the stages of llmpq's plans
memory      KV memory from scarce to ample
accuracy    predictions from all right to chance
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab import run_part
from benchmarks.reproduction.lengths import tables

PARTS = {
    "papers": (tables.papers_arguments, tables.run_papers),
    "mixed": (tables.mixed_arguments, tables.run_mixed),
    "memory": (tables.memory_arguments, tables.run_memory),
    "accuracy": (tables.accuracy_arguments, tables.run_accuracy),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    run_part("benchmarks.reproduction.lengths", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
