"""Schedules under a bound on latency: ExeGPT's evaluation (section 7), and runs of our own.

python -m benchmarks.latency_bounds throughput   # FT, DSI, ORCA, vLLM and ours, on its models
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.latency_bounds.paper.tables import (
    existing,
    monotonicity,
    scheduling_cost,
    selected,
    throughput,
)

PARTS = {
    "throughput": throughput,
    "existing": existing,
    "selected": selected,
    "monotonicity": monotonicity,
    "scheduling_cost": scheduling_cost,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency_bounds")
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(parts.add_parser(name, help=summary, description=summary))
    options = parser.parse_args(arguments)
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
