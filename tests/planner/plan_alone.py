"""Finding plans without the baselines and the plans beside them, which take as long as the search:
for tests that look at the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from planner.plan.parts import PlansBeside
from planner.search import find


@contextmanager
def alone() -> Iterator[None]:
    """Have all plans that are found meanwhile stand alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "baselines", lambda *_: ())
        patch.setattr(find, "plans_beside", lambda *_: PlansBeside())
        yield


find_plan = alone()(find.find_plan)
