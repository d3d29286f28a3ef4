"""Plans for large models and large fleets.

python -m benchmarks.planning.scale PART [--help]

groups     # the costs of tensor-parallel groups beside measured ones
planner    # seconds, gap and memory of planning as clusters grow
fleets     # one pipeline and several that share a job, on mixed clusters
core       # one problem of the optimiser beside HiGHS
groupings  # plans of LLM-PQ's clusters with and without groups
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.planning.scale import core, fleets, groupings, groups, planner

PARTS = {
    "groups": groups,
    "planner": planner,
    "fleets": fleets,
    "core": core,
    "groupings": groupings,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning.scale", description=__doc__
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        module.add_arguments(parts.add_parser(name, description=module.__doc__))
    options = parser.parse_args(arguments)
    PARTS[options.part].run(options)


if __name__ == "__main__":
    main()
