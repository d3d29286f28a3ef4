"""Changes that would make a refused plan possible; each one is tried before it is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from planner.cluster.spec import grown, kinds_of_devices
from planner.costs.model import CostModel
from planner.optimiser.names import BASELINE_METHODS
from planner.options import AUTO, PlanOptions
from planner.search.baselines import baseline_fits
from planner.search.candidates import Candidates
from planner.search.fitting import first_sets
from planner.search.pareto import within_bounds
from planner.search.request import PlanningRequest, costs_of
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError, SpecError
from quant.scheme import BITWIDTHS, KV_BITWIDTHS

MOST_MORE_DEVICES = 32
DIGITS = 4  # of a bound that is named


@dataclass(frozen=True)
class Remedy:
    text: str
    request: PlanningRequest


@contextmanager
def naming_remedies(request: PlanningRequest) -> Iterator[None]:
    try:
        yield
    except BoundNotMetError as error:
        remedies = remedies_of_bound(request, error)
        text = _sentence(error, "A plan is found with", remedies)
        parts = str(error), tuple(remedy.text for remedy in remedies)
        raise BoundNotMetError(text, error.option, error.reachable, *parts) from error
    except DoesNotFitError as error:
        remedies = remedies_of_memory(request)
        text = _sentence(error, "It would fit with", remedies)
        parts = str(error), tuple(remedy.text for remedy in remedies)
        raise DoesNotFitError(text, *parts) from error


def remedies_of_memory(request: PlanningRequest) -> list[Remedy]:
    found = (remedy for kind in _KINDS for remedy in kind(request))
    return [remedy for remedy in found if _plans(remedy.request)]


def remedies_of_bound(request: PlanningRequest, error: BoundNotMetError) -> list[Remedy]:
    """The bound that is reachable, and the objective that follows the prediction closest."""
    reachable = rounded_up(error.reachable)
    bounds: dict[str, float | None] = {"max_ppl_delta": None, error.option: reachable}
    tried = [Remedy(f"--{error.option} {reachable:g}", request.with_options(**bounds))]
    default = PlanOptions().objective
    if error.option == "max_latency_s" and request.options.objective != default:
        other = request.with_options(objective=default)
        tried.append(Remedy(f"--objective {default}", other))
    return [remedy for remedy in tried if _plans(remedy.request)]


def _sentence(error: InfeasibleError, start: str, remedies: list[Remedy]) -> str:
    if not remedies:
        return f"{error}. Nothing simple helps: use a smaller model or more GPUs with more memory"
    return f"{error}. {start} {', or '.join(remedy.text for remedy in remedies)}"


def rounded_up(value: float) -> float:
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) + 1 - DIGITS)
    return float(f"{math.ceil(value / step * (1 + 1e-9)) * step:.{DIGITS}g}")


def _fits(request: PlanningRequest) -> bool:
    return _succeeds(request, lambda costs: bool(first_sets(costs)))


def _plans(request: PlanningRequest) -> bool:
    def plan(costs: CostModel) -> bool:
        if costs.options.max_omega is None and costs.options.max_latency_s is None:
            return any(Candidates(costs.on(devices)).count for devices in first_sets(costs))
        return bool(within_bounds(costs))

    return _succeeds(request, plan)


def _succeeds(request: PlanningRequest, attempt: Callable[[CostModel], bool]) -> bool:
    bits = KV_BITWIDTHS if request.options.kv_bits == AUTO else (request.options.kv_bits,)
    for each in bits:
        with suppress(InfeasibleError, SpecError):
            costs, _ = costs_of(request.with_options(kv_bits=each))
            runs = baseline_fits if costs.options.method in BASELINE_METHODS else attempt
            if runs(costs):
                return True
    return False


def _free_sizes(request: PlanningRequest) -> Iterator[Remedy]:
    names = ("prefill_micro_batch", "decode_micro_batch")
    fixed = [name for name in names if getattr(request.options, name) is not None]
    changed = request.with_options(**dict.fromkeys(fixed))
    if fixed and _fits(changed):
        yield Remedy(" and ".join(f"no --{name}" for name in fixed), changed)


def _other_value(
    name: str, value: object, text: str, helps: Callable[[Any], bool]
) -> Callable[[PlanningRequest], Iterator[Remedy]]:
    """The remedy of another `value` of the option `name`, where that of the request `helps`."""

    def remedy(request: PlanningRequest) -> Iterator[Remedy]:
        changed = request.with_options(**{name: value})
        if helps(getattr(request.options, name)) and _fits(changed):
            yield Remedy(text, changed)

    return remedy


def _smaller_batch(request: PlanningRequest) -> Iterator[Remedy]:
    batch, options = request.workload.global_batch, request.options
    option = "global_bz" if request.job is None else "in_flight"

    def of(size: int) -> PlanningRequest:
        if request.job is None:
            return replace(request, workload=replace(request.workload, global_batch=size))
        workload = request.job.in_flight(size, options.policy)
        return replace(request, workload=workload).with_options(in_flight=size)

    low = max(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)
    if low >= batch or not _fits(of(low)):
        return
    high = batch
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(of(middle)) else (low, middle)
    yield Remedy(f"--{option} {low} instead of {batch}", of(low))


def _fewer_bits(request: PlanningRequest) -> Iterator[Remedy]:
    present = request.options.bits
    for bits in reversed([each for each in BITWIDTHS if each < min(present)]):
        changed = request.with_options(bits=(bits, *present))
        if _fits(changed):
            listed = " ".join(map(str, changed.options.bits))
            yield Remedy(f"{bits} bit allowed (--bits {listed})", changed)
            return


def _more_devices(request: PlanningRequest) -> Iterator[Remedy]:
    kinds = kinds_of_devices(request.cluster)
    nodes_of_type: dict[str, set[str]] = {}
    for kind in kinds:
        nodes_of_type.setdefault(kind.accelerator.name, set()).add(kind.node)
    best: Remedy | None = None
    most = MOST_MORE_DEVICES
    for kind in kinds:
        for count in range(1, most + 1):
            changed = replace(request, cluster=grown(request.cluster, kind, count))
            if _fits(changed):
                name, most = kind.accelerator.name, count - 1
                where = f" on {kind.node}" if len(nodes_of_type[name]) > 1 else ""
                best = Remedy(f"{count} more {name}{where}", changed)
                break
    if best is not None:
        yield best


_METHOD, _KV_BITS = PlanOptions.method, min(KV_BITWIDTHS)
_KINDS: tuple[Callable[[PlanningRequest], Iterator[Remedy]], ...] = (
    _other_value("method", _METHOD, f"--method {_METHOD}", _METHOD.__ne__),
    _free_sizes,
    _other_value("keep_all_devices", False, "no --keep_all_devices", bool),
    _other_value(
        "tensor_parallel",
        AUTO,
        f"groups of any degree, and none (--tensor_parallel {AUTO})",
        lambda degree: degree not in (1, AUTO),
    ),
    _other_value(
        "kv_bits",
        _KV_BITS,
        f"keys and values in {_KV_BITS} bit (--kv_bits {_KV_BITS})",
        lambda bits: isinstance(bits, int) and bits > _KV_BITS,
    ),
    _smaller_batch,
    _fewer_bits,
    _other_value("memory_margin", 0.0, "nothing kept free (--memory_margin 0)", bool),
    _more_devices,
)
