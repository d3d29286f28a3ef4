"""Schedules under a bound on latency: ExeGPT's evaluation (section 7), and runs of our own.

python -m benchmarks.reproduction.latency_bounds PART [--help]

Parts of the paper's evaluation, simulated:

throughput         FT, DSI, ORCA, vLLM and ours on the paper's models and tasks (fig. 6 and 8)
claims             whether chosen schedules keep their bounds, event by event
existing           the rivals on OPT 13B, all tasks (fig. 7)
selected           the schedules of OPT 13B and task S (table 6)
changed_lengths    outputs unlike those that a schedule is for (fig. 11)
variance           seconds from turn to turn and from step to step (table 7)

and of our own:

timelines          random schedules beside simulations of their events
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab import run_part, table_part
from benchmarks.reproduction.latency_bounds import (
    claims,
    tables,
    throughput,
    timelines,
)

PARTS = {
    "throughput": (throughput.add_arguments, throughput.run),
    "claims": (claims.add_arguments, claims.run),
    "existing": table_part("existing", tables.existing_table),
    "selected": table_part("selected", tables.selected_table),
    "changed_lengths": (tables.changed_lengths_arguments, tables.run_changed_lengths),
    "variance": table_part("variance", tables.variance_table),
    "timelines": (timelines.add_arguments, timelines.run),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    run_part("benchmarks.reproduction.latency_bounds", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
