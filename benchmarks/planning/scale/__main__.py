"""Plans for large models and large fleets.

python -m benchmarks.planning.scale PART [--help]

groups     # the costs of tensor-parallel groups beside measured ones
planner    # seconds, gap and memory of planning as clusters grow
fleets     # one pipeline and several that share a job, on mixed clusters
core       # one problem of the optimiser beside HiGHS
groupings  # plans of LLM-PQ's clusters with and without groups
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab import run_part
from benchmarks.planning.scale import core, fleets, groupings, groups, planner

PARTS = {
    "groups": (groups.add_arguments, groups.run),
    "planner": (planner.add_arguments, planner.run),
    "fleets": (fleets.add_arguments, fleets.run),
    "core": (core.add_arguments, core.run),
    "groupings": (groupings.add_arguments, groupings.run),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    run_part("benchmarks.planning.scale", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
