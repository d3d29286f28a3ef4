"""The errors for schedules that cannot be had: below all latencies, or without room."""

from __future__ import annotations

from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel
from planner.latency_bound.request import BOUND, BoundRequest
from planner.search.memory_fit import misfit
from planner.search.remedies import rounded_up
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError
from quant.common.units import GIB


class NoScheduleError(Exception):
    """No schedule keeps a bound, or none fits; the search catches it and says why."""


def bound_not_met(request: BoundRequest, least_s: float, kind: str) -> BoundNotMetError:
    """The error for a bound below `least_s`, the least latency that a schedule of `kind` has."""
    reachable = rounded_up(least_s)
    return BoundNotMetError(
        f"no schedule has {100 * request.quantile:g} % of requests done within "
        f"{request.limit_s:g} s; the least bound that was found feasible is {reachable:g} s "
        f"({kind}): --{BOUND} {reachable:g}",
        BOUND,
        reachable,
    )


def nothing_fits(costs: CostModel, request: BoundRequest) -> InfeasibleError:
    """The error where no schedule of the kinds that are asked for has room."""
    return misfit(costs) if "rra" in request.kinds else _two_copies(costs, request)


def _two_copies(costs: CostModel, request: BoundRequest) -> DoesNotFitError:
    """The error where devices have no room for all layers twice."""
    name, kinds = costs.shape.name, " and ".join(request.kinds)
    needs = f"{kinds} keep two copies of all layers, one where prompts are prefilled and one where "
    remedy = "use a schedule rra, which needs one"
    devices = costs.cluster.devices
    if len(devices) == 1:
        return DoesNotFitError(f"{needs}requests decode, but there is one device; {remedy}")
    bits = min(costs.options.bits)
    copy = costs.shape.layers * min(
        device.degree
        * layer_weight_bytes(costs.shape_on(device), bits, device, costs.dtype(device))
        for device in devices
    )
    offered = sum(device.degree * costs.limit_bytes(device) for device in devices)
    return DoesNotFitError(
        f"{needs}requests decode: two of {name} need {2 * copy / GIB:.1f} GiB at {bits} bit, and "
        f"room for keys and values, of {offered / GIB:.1f} GiB that the devices have, which cannot "
        f"be divided so that either side has enough; {remedy}"
    )
