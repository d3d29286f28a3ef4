"""How many copies of a plan the server starts: as many as were asked for, or as have devices."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plan.spec import StagePlan
from quant.common.errors import DeviceError, SpecError

AUTO = "auto"

MOST_REPLICAS = 64
"""One server makes text of the tokens of them all."""


def parse_replicas(text: str) -> int | None:
    """The number of copies that `text` asks for; None for as many as have devices."""
    if text == AUTO:
        return None
    count = int(text) if text.isdecimal() else 0
    if not 1 <= count <= MOST_REPLICAS:
        raise SpecError(f"--replicas is {text!r}; give 1 to {MOST_REPLICAS}, or {AUTO}")
    return count


def count_replicas(stages: Sequence[StagePlan], wanted: int | None) -> int:
    """Copies of `stages` to start; needs an initialised Ray.

    Raises `DeviceError` where devices for as many are not free, saying for how many they are. A
    single copy waits for its devices when it starts, and is not looked at here.
    """
    if wanted == 1:
        return 1
    import ray

    from actors.processes.placement import place
    from actors.processes.reservation import copies_granted

    placements = place(stages, ray.cluster_resources())
    if wanted is None and not any(each.bundle for each in placements):
        raise SpecError(
            f"--replicas {AUTO} counts devices that Ray knows, and this plan's are all emulated; "
            "give a number"
        )
    granted = copies_granted(placements, MOST_REPLICAS if wanted is None else wanted)
    if granted == 0 or (wanted is not None and granted < wanted):
        remedy = f"give --replicas {granted}, " if granted else ""
        raise DeviceError(
            f"--replicas {wanted or AUTO}: there are free devices for {granted} copies of the "
            f"plan, {len(stages)} each; {remedy}add nodes to the Ray cluster, or end what uses its "
            "devices"
        )
    return granted
