"""Whether decode groups should step while the first fill of the KV slots is still prefilled.

    python -m benchmarks.early_decode [--cases 3 qwen2.5-7b] [--tries 20] [--update docs/planner.md]

The policy `static` prefills the first global batch whole before a group steps. Here groups whose
requests all have their first token may step earlier, as other orders of passes have it, and every
order is simulated on the plan of the present one. An order is a number for each prefill: how many
steps of ready groups may come between it and the next one. So it needs no clock, and a runtime
could follow it.

- turns: one step after every prefill;
- decode first: as many as are ready;
- best start: the better of both, begun after the prefill for which it takes least (of a job, one of
  eight);
- best tried: the best of all these and of `--tries` random changes, kept where they do not harm.

Figures are more seconds than under the present order. "No order" is a bound from below on those of
any order of these passes: no stage can compute for less than all of its passes take together, and
the group that is prefilled last takes all of its steps, each once round all stages, after the last
prefill.

Clusters and models are those of `benchmarks.job_plan` which have several stages, costs rooflines;
with `--published_times` the paper's clusters and the authors' layer times of 2023 from `--data`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.job_cases import ALIKE, LOGNORMAL, PROMPTS, RowLengths, Setting, settings
from benchmarks.paper_tables import DATA
from benchmarks.planner import update_page
from benchmarks.profiles_2023 import profile_rows
from planner.costs.unlike_prompts import near_length
from planner.explanation.planned_assignment import planned_assignment
from planner.micro_batches import MicroBatches
from planner.options import PlanOptions
from planner.plan.spec import PlanSpec
from planner.profiles.rows import write_profiles
from planner.schedule.static import JobRows, JobSchedule, Pass
from planner.search.search import PricedPlan, find_priced_plan
from planner.simulation.simulation import (
    PassSeconds,
    PipelineClock,
    assignment_timing,
    occupied_stages,
)
from planner.workload import Job, Workload
from quant.common.errors import InfeasibleError

BATCHES = (Workload(32, 512, 100), Workload(32, 128, 200), Workload(32, 512, 20))
FILLS = 4
"""How often the slots of a job are filled."""
STARTS = 8
SECTION = "early decode"

SecondsOf = Callable[[Pass], PassSeconds]
Order = Sequence[int]


class EarlySchedule(JobSchedule):
    """The present order, but for `order[i]` decode steps at most between prefill i of the first
    fill and the next one, as far as groups are ready.
    """

    def __init__(
        self, rows: JobRows, slots: int, sizes: MicroBatches, stages: int, order: Order
    ) -> None:
        super().__init__(rows, slots, sizes, stages)
        self._order = iter(order)
        self._steps = 0

    def _following(self) -> Any:
        filling = self._unused > 0 and self._largest_prefill() > 0
        if filling and self._steps:
            for group in self._ready:
                if not (group.fills and (group.prefilling or group.free)):
                    self._steps -= 1
                    return self._step(group)
        if filling:
            self._steps = next(self._order)
        return super()._following()


@dataclass(frozen=True, eq=False)
class Orders:
    """The orders of passes of `rows` over a plan's slots and stages."""

    rows: JobRows
    slots: int
    sizes: MicroBatches
    stages: int
    seconds_of: SecondsOf

    @property
    def prefills(self) -> int:
        """Prefills of the first fill."""
        return -(-min(self.slots, len(self.rows.prompts)) // self.sizes.prefill)

    @property
    def present(self) -> Order:
        """The order of the policy `static`."""
        return [0] * self.prefills

    def rule(self, steps: int, start: int = 0) -> Order:
        """So many steps after each prefill from number `start` on."""
        return [0] * start + [steps] * (self.prefills - start)

    @property
    def all_ready(self) -> int:
        """More steps than can be ready at a time."""
        return -(-self.slots // self.sizes.decode)

    def passes(self, order: Order) -> Iterator[Pass]:
        """The passes of an order."""
        yield from EarlySchedule(self.rows, self.slots, self.sizes, self.stages, order).passes()

    def seconds(self, order: Order) -> float:
        """The seconds of an order, simulated."""
        clock = PipelineClock(self.stages)
        for each in self.passes(order):
            clock.run(each, self.seconds_of(each))
        return clock.returned_s[-1]

    def best_start(self, most: int) -> tuple[float, Order]:
        """The best rule that begins at one of `most` prefills, evenly spaced."""
        starts = sorted({i * self.prefills // most for i in range(most)})
        rules = [self.rule(steps, i) for steps in (1, self.all_ready) for i in starts]
        return min((self.seconds(each), each) for each in rules)

    def searched(self, begin: Sequence[tuple[float, Order]], tries: int) -> float:
        """The least seconds found by random changes to each of these orders."""
        draw, least = random.Random(0), min(begin)[0]
        for seconds, order in begin:
            best_s, best = seconds, list(order)
            for _ in range(tries):
                changed = list(best)
                for i in draw.choices(range(len(changed)), k=draw.randint(1, 3)):
                    changed[i] = max(0, changed[i] + draw.choice((-1, 1, 2)))
                changed_s = self.seconds(changed)
                if changed_s <= best_s:
                    best_s, best = changed_s, changed
            least = min(least, best_s)
        return least


def least_seconds(passes: Sequence[Pass], seconds_of: SecondsOf) -> float:
    """A bound from below on the seconds of one batch, whatever the order of its passes."""
    taken = [(each, seconds_of(each)) for each in passes]
    compute = np.array([seconds.compute for _, seconds in taken])
    prefills = [seconds for each, seconds in taken if each.phase == "prefill"]
    prefill_s = np.array([each.compute for each in prefills])
    hop_s = np.array([each.transfer for each in prefills])
    quickest = (prefill_s + hop_s).min(axis=0)
    # One prefill is the last on a stage: all others and their ways there and back lie around it.
    prefilled = max(
        quickest[:j].sum() + prefill_s[:, j].sum() + hop_s[:, j].min() + quickest[j + 1 :].sum()
        for j in range(len(quickest))
    )
    steps: dict[int, float] = {}
    for each, seconds in taken:
        if each.phase == "decode":
            round_s = sum(seconds.compute) + sum(seconds.transfer)
            steps[each.index] = steps.get(each.index, 0.0) + round_s
    last = prefilled + min(steps.values(), default=0.0)
    return float(max(compute.sum(axis=0).max(), last))


def orders_of(priced: PricedPlan, rows: JobRows) -> Orders:
    """The orders of `rows` under a plan, timed by its cost model."""
    placed = planned_assignment(priced.plan, priced.costs)
    stages = occupied_stages(placed.devices, placed.first_layer)
    timing = assignment_timing(placed.costs, stages, placed.bitwidth)

    def seconds(each: Pass) -> PassSeconds:
        if each.phase == "decode" and priced.plan.job is not None:
            each = replace(each, context_length=near_length(each.context_length))
        return timing.seconds(each)

    plan = priced.plan
    slots = plan.workload.global_batch
    return Orders(rows, slots, plan.micro_batches, len(plan.stages), seconds)


def plans(
    names: Sequence[str], workload: Callable[[Setting], Workload | Job], options: PlanOptions
) -> Iterator[tuple[Setting, PricedPlan]]:
    """The plans of several stages; `options` get the setting's theta for a batch."""
    for setting in settings(names):
        if options.profiles is not None and not setting.name.startswith("paper"):
            continue
        wanted = workload(setting)
        own = options
        if isinstance(wanted, Workload):
            own = replace(options, theta=setting.theta)
        try:
            found = find_priced_plan(setting.cluster, setting.shape, setting.model, wanted, own)
        except InfeasibleError:
            continue
        if len(found.plan.stages) > 1:
            yield setting, found


def batch_table(
    names: Sequence[str], workload: Workload, options: PlanOptions, tries: int
) -> Iterator[str]:
    """Markdown rows: what each order adds to the seconds of one batch."""
    heads = "seconds", "turns", "decode first", "best start", "best tried", "no order below"
    yield from _head(heads)
    least = 0.0
    for setting, priced in plans(names, lambda _: workload, options):
        orders = orders_of(priced, JobRows.alike(workload))
        now_s = orders.seconds(orders.present)
        best = orders.best_start(orders.prefills)
        tried_s = orders.searched([(now_s, orders.present), best], tries)
        bound_s = least_seconds(tuple(orders.passes(orders.present)), orders.seconds_of)
        rules = orders.rule(1), orders.rule(orders.all_ready)
        found = *map(orders.seconds, rules), best[0], tried_s, bound_s
        least = min(least, tried_s / now_s - 1)
        yield _row(setting, priced.plan, now_s, found)
    yield ""
    yield f"The best order that was tried gains {-100 * least:.2f} % at most."


def job_table(names: Sequence[str], kind: str, options: PlanOptions) -> Iterator[str]:
    """Markdown rows: what each order of the first fill adds to a job of `FILLS` fills."""
    yield from _head(("seconds", "turns", "decode first", "best start"))
    lengths = RowLengths(kind, DATA)
    for setting, priced in plans(names, lambda _: lengths.job(PROMPTS), options):
        assert priced.plan.job is not None, "a job was planned"
        count = min(PROMPTS, FILLS * priced.plan.workload.global_batch)
        rows = JobRows(*(each.tolist() for each in priced.plan.job.job.lengths.rows(count)))
        orders = orders_of(priced, rows)
        now_s = orders.seconds(orders.present)
        rules = orders.rule(1), orders.rule(orders.all_ready)
        found = *map(orders.seconds, rules), orders.best_start(STARTS)[0]
        yield _row(setting, priced.plan, now_s, found)


def _head(heads: Sequence[str]) -> Iterator[str]:
    cells = "cluster", "model", "stages", "slots", "micro-batches", *heads
    yield f"| {' | '.join(cells)} |"
    yield "|---" * len(cells) + "|"


def _row(setting: Setting, plan: PlanSpec, now_s: float, found: Sequence[float]) -> str:
    sizes = plan.micro_batches
    cells = (
        setting.name,
        setting.model,
        str(len(plan.stages)),
        str(plan.workload.global_batch),
        f"{sizes.prefill}/{sizes.decode}",
        f"{now_s:.2f}",
        *(f"{100 * (each / now_s - 1):+.2f} %" for each in found),
    )
    return f"| {' | '.join(cells)} |"


def _lines(chosen: argparse.Namespace, options: PlanOptions) -> Iterator[str]:
    for each in BATCHES:
        yield ""
        yield (
            f"A batch of {each.global_batch} prompts of {each.prompt_length} tokens with "
            f"{each.new_tokens} new ones:"
        )
        yield ""
        yield from batch_table(chosen.cases, each, options, chosen.tries)
    for kind in (ALIKE, LOGNORMAL):
        yield ""
        yield f"Jobs that fill their slots {FILLS} times, lengths {kind}:"
        yield ""
        yield from job_table(chosen.cases, kind, options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and update a page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=[], help="numbers of clusters, and models")
    parser.add_argument("--tries", type=int, default=20, help="random changes to an order")
    parser.add_argument("--published_times", action="store_true", help="the authors' layer times")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the reference data")
    parser.add_argument("--update", type=Path, help="page whose section is replaced")
    chosen = parser.parse_args(arguments)
    options, lines = PlanOptions(), []
    with ExitStack() as stack:
        if chosen.published_times:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            profiles = folder / "profiles_2023.csv"
            write_profiles(profiles, profile_rows(chosen.data / "llmpq_layer_latency_2023.csv"))
            options = PlanOptions(profiles=profiles, dtype="float16", memory_margin=0.0)
        for line in _lines(chosen, options):
            lines.append(line)
            print(line, flush=True)
    if chosen.update is not None:
        update_page(chosen.update, SECTION, lines)


if __name__ == "__main__":
    main()
