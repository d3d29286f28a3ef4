"""The command that a recipe runs, its plan, and the devices that the plan uses."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from planner.fleet.fleet_spec import Runnable, plans_of
from planner.plan.spec import all_stages


@dataclass(frozen=True)
class RecipeCommand:
    """`llmpq run` or `llmpq serve` (`name`) of a plan, with its other `words` as they were given.
    `output` is a run's, the rest a server's.
    """

    name: str
    plan_file: str
    words: tuple[str, ...]
    plan: Runnable
    output: str | None = None
    port: int | None = None
    has_batch_dir: bool = False

    @property
    def devices(self) -> frozenset[str]:
        plans = plans_of(self.plan)
        longer = [plan.long_rows for plan in plans if plan.long_rows is not None]
        stages = [stage for plan in (*plans, *longer) for stage in all_stages(plan)]
        return frozenset(name for stage in stages for name in stage.device_names)

    def text(self, plan_file: str | None = None, more: Sequence[str] = ()) -> str:
        """The command for a shell, with its plan at `plan_file`."""
        words = ["llmpq", self.name, "--plan", plan_file or self.plan_file]
        return shlex.join([*words, *self.words, *more])
