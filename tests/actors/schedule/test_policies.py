"""The table of scheduling policies."""

from __future__ import annotations

from typing import get_args

from actors.schedule.scheduler import Policy, QueueSizes
from actors.schedule.static import StaticScheduler
from actors.schedule.table import POLICIES, make_scheduler


def test_every_policy_has_an_entry() -> None:
    assert set(POLICIES) == set(get_args(Policy))


def test_a_plans_policy_makes_the_scheduler() -> None:
    assert isinstance(make_scheduler(QueueSizes(4, 2, 2, policy="static"), 2), StaticScheduler)
