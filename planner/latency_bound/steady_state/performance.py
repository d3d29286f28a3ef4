"""How fast a schedule is: what is bounded, and what is maximised."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Performance:
    """Requests per second in the steady state, and the latency of a request in seconds at the
    quantile that is bounded: from when its prefill begins to its last token.
    """

    requests_per_s: float
    latency_s: float

    def keeps(self, bound_s: float) -> bool:
        """Whether latency is within the bound; what has no room keeps none."""
        return self.latency_s <= bound_s and self.latency_s < math.inf


DOES_NOT_FIT = Performance(0.0, math.inf)
"""A schedule whose requests have no room in memory."""
