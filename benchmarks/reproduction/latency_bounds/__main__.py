"""Schedules under a bound on latency: ExeGPT's evaluation (section 7), and runs of our own.

python -m benchmarks.reproduction.latency_bounds PART [--help]

Parts of the paper's evaluation, simulated:

throughput         FT, DSI, ORCA, vLLM and ours on the paper's models and tasks (fig. 6 and 8)
claims             whether chosen schedules keep their bounds, event by event
existing           the rivals on OPT 13B, all tasks (fig. 7)
selected           the schedules of OPT 13B and task S (table 6)
monotonicity       where throughput and latency fall as a control rises (table 5)
changed_lengths    outputs unlike those that a schedule is for (fig. 11)
recorded           recorded lengths (fig. 10)
scheduling_cost    evaluations and CPU seconds beside exhaustive search (section 7.7)
variance           seconds from turn to turn and from step to step (table 7)

and of our own:

timelines          random schedules beside simulations of their events
search_cost        what branch and bound evaluates of random functions
emulated           two mixed clusters played by actors: as run beside as planned
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.reproduction.latency_bounds import (
    changed_lengths,
    claims,
    emulated,
    existing,
    monotonicity,
    recorded,
    scheduling_cost,
    search_cost,
    selected,
    throughput,
    timelines,
    variance,
)

PARTS = {
    "throughput": throughput,
    "claims": claims,
    "existing": existing,
    "selected": selected,
    "monotonicity": monotonicity,
    "changed_lengths": changed_lengths,
    "recorded": recorded,
    "scheduling_cost": scheduling_cost,
    "variance": variance,
    "timelines": timelines,
    "search_cost": search_cost,
    "emulated": emulated,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduction.latency_bounds")
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(parts.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
