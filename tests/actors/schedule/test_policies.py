"""The table of scheduling policies."""

from __future__ import annotations

from actors.schedule.scheduler import QueueSizes
from actors.schedule.static import StaticScheduler
from actors.schedule.table import make_scheduler


def test_a_plans_policy_makes_the_scheduler() -> None:
    assert isinstance(make_scheduler(QueueSizes(4, 2, 2, 64, policy="static"), 2), StaticScheduler)
