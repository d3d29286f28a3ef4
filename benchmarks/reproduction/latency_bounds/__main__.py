"""Schedules under a bound on latency: ExeGPT's evaluation (section 7), and runs of our own.

python -m benchmarks.reproduction.latency_bounds PART [--help]

Parts of the paper's evaluation, simulated:

throughput         FT, DSI, ORCA, vLLM and ours on the paper's models and tasks (fig. 6 and 8)
claims             whether chosen schedules keep their bounds, event by event
existing           the rivals on OPT 13B, all tasks (fig. 7)
recorded           recorded lengths instead of normal ones (fig. 10)
monotonicity       points at which throughput or latency fall with a control (table 5)
memory             GPUs of FT and of WAA (fig. 9)
loading            loading models again (table 4)
degrees            layers at each tensor-parallel degree (section 3)
selected           the schedules of OPT 13B and task S (table 6)
groups             those of RRA where hosts take time and links are faster
scheduling_cost    evaluations and CPU seconds of finding a schedule (section 7.7)
changed_lengths    outputs unlike those that a schedule is for (fig. 11)
variance           seconds from turn to turn and from step to step (table 7)

and of our own:

chosen_degrees     plans with groups of devices beside those without
chosen_qualities   plans of each quality within bounds
search_cost        the same searches on random boxes
draws              the 99th percentile of simulations with other draws
promises           plans under bounds beside the runtime's schedulers in virtual time
timelines          random schedules beside simulations of their events
real               plans that run on two stages of this machine's CPU, again and again
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lab import run_part, table_part
from benchmarks.reproduction.latency_bounds import (
    choices,
    claims,
    deployment,
    promises,
    recorded,
    search_costs,
    tables,
    throughput,
    timelines,
)

PARTS = {
    "throughput": (throughput.add_arguments, throughput.run),
    "claims": (claims.add_arguments, claims.run),
    "chosen_degrees": (choices.degrees_arguments, choices.run_degrees),
    "chosen_qualities": (choices.qualities_arguments, choices.run_qualities),
    "draws": (timelines.draws_arguments, timelines.run_draws),
    "promises": (promises.add_arguments, promises.run),
    "existing": table_part("existing", tables.existing_table),
    "recorded": (recorded.add_arguments, recorded.run),
    "monotonicity": table_part("monotonicity", search_costs.monotonicity_table),
    "scheduling_cost": table_part("scheduling cost", search_costs.scheduling_cost_table),
    "search_cost": table_part("search cost", search_costs.search_cost_table),
    "memory": table_part("memory", deployment.memory_table),
    "loading": table_part("loading", deployment.loading_table),
    "degrees": table_part("degrees", deployment.degrees_table),
    "selected": table_part("selected", tables.selected_table),
    "groups": table_part("groups", tables.groups_table),
    "changed_lengths": (tables.changed_lengths_arguments, tables.run_changed_lengths),
    "variance": table_part("variance", tables.variance_table),
    "timelines": (timelines.add_arguments, timelines.run),
    "real": (claims.real_arguments, claims.run_real),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the part that is asked for."""
    run_part("benchmarks.reproduction.latency_bounds", __doc__, PARTS, arguments)


if __name__ == "__main__":
    main()
