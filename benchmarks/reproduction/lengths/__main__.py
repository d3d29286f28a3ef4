"""Scheduling by predicted output lengths (S³) against what else reserves KV memory.

    python -m benchmarks.reproduction.lengths PART [--help]

papers      the paper's models and GPUs, in virtual time
mixed       mixed clusters, on the stages of llmpq's plans
memory      KV memory from scarce to ample
accuracy    predictions from all right to chance
prompts     short jobs of long prompts and answers of some words
objective   throughput where every token has a time (fig. 4d)
breakdown   seconds of generating, of preempting, and of predicting and scheduling (fig. 6)
predictors  predictors of four sizes (table 5)
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab import run_part, table_part
from benchmarks.reproduction.lengths import figures, tables

PARTS = {
    "papers": (tables.papers_arguments, tables.run_papers),
    "mixed": (tables.mixed_arguments, tables.run_mixed),
    "memory": (tables.memory_arguments, tables.run_memory),
    "accuracy": (tables.accuracy_arguments, tables.run_accuracy),
    "prompts": (tables.prompts_arguments, tables.run_prompts),
    "objective": table_part("objective", figures.objective_table),
    "breakdown": table_part("breakdown", figures.breakdown_table),
    "predictors": table_part("predictors", figures.predictors_table),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    run_part("benchmarks.reproduction.lengths", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
