"""Changes that would make a refused plan possible; each one is tried before it is named."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from planner.cluster.spec import grown, kinds_of_devices
from planner.costs.model import CostModel
from planner.optimiser.names import BASELINE_METHODS
from planner.options import AUTO, PlanOptions
from planner.profiles.perplexity_fit import perplexity_bound
from planner.scheduling import BOUNDED
from planner.search.baselines import baseline_fits
from planner.search.candidates import Candidates
from planner.search.fitting import first_sets, unexplained
from planner.search.pareto import within_bounds
from planner.search.request import (
    PlanningRequest,
    bits_of_format,
    costs_of,
    has_free_experts,
    omega_of,
)
from quant.checkpoint.formats.readers import VLLM
from quant.common.errors import BoundNotMetError, DoesNotFitError, InfeasibleError, SpecError
from quant.common.units import GIB
from quant.scheme import HEAD_BITWIDTHS, KV_BITWIDTHS

MOST_MORE_DEVICES = 32
DIGITS = 4  # of a bound that is named
HOST_GIB = tuple(2**power for power in range(4, 12))  # what machines are sold with, up to 2 TiB


@dataclass(frozen=True)
class Remedy:
    text: str
    request: PlanningRequest


@contextmanager
def naming_remedies(request: PlanningRequest) -> Iterator[None]:
    try:
        yield
    except BoundNotMetError as refused:
        error = _in_perplexity(request, refused)
        remedies = remedies_of_bound(request, error)
        text = _sentence(error, "A plan is found with", remedies)
        parts = str(error), tuple(remedy.text for remedy in remedies)
        raise BoundNotMetError(text, error.option, error.reachable, *parts) from refused
    except DoesNotFitError as error:
        remedies = remedies_of_memory(request)
        text = _sentence(error, "It would fit with", remedies)
        parts = str(error), tuple(remedy.text for remedy in remedies)
        raise DoesNotFitError(text, *parts) from error


def _in_perplexity(request: PlanningRequest, error: BoundNotMetError) -> BoundNotMetError:
    """The error in the unit of the bound that was asked for, where its sum has one."""
    asked = request.options.max_ppl_delta
    if asked is None or error.option != "max_omega":
        return error
    fit = perplexity_bound(omega_of(request.shape, request.options))
    most = fit.bound_for(error.reachable)
    if math.isinf(most):
        return error
    nats = math.log1p(fit.forecast(error.reachable)[0] / fit.baseline)
    return BoundNotMetError(
        f"no plan was found{error.in_time} whose perplexity is sure to rise by at most {asked:g}; "
        f"the best one's may rise by {most:.4g} over {fit.baseline:.4g} at 16 bit (a KL divergence "
        f"of {nats:.2g} nats a token is expected)",
        "max_ppl_delta",
        most,
    )


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
    return _succeeds(request, lambda costs: bool(next(first_sets(costs, unexplained))))


def _plans(request: PlanningRequest) -> bool:
    def plan(costs: CostModel) -> bool:
        if costs.options.max_omega is None and costs.options.max_latency_s is None:
            return any(Candidates(costs.on(devices)).count for devices in first_sets(costs))
        return bool(within_bounds(costs))

    return _succeeds(request, plan)


def _succeeds(request: PlanningRequest, attempt: Callable[[CostModel], bool]) -> bool:
    bits = KV_BITWIDTHS if request.options.kv_bits == AUTO else (request.options.kv_bits,)
    ends = request.options.head_bits or HEAD_BITWIDTHS  # the fewest fit most, the most lose least
    for each, end in product(bits, ends):
        with suppress(InfeasibleError, SpecError):
            costs, _ = costs_of(request.with_options(kv_bits=each, head_bits=(end,)))
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
        workload = request.job.in_flight(size, options.scheduling.name)
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
    known = bits_of_format(request.cluster, request.options.format)
    for bits in reversed([each for each in known if each < min(present)]):
        changed = request.with_options(bits=(bits, *present))
        if _fits(changed):
            listed = " ".join(map(str, changed.options.bits))
            yield Remedy(f"{bits} bit allowed (--bits {listed})", changed)
            return


def _narrower_ends(request: PlanningRequest) -> Iterator[Remedy]:
    fewest = min(request.options.head_bits or HEAD_BITWIDTHS)
    if request.options.format == VLLM:
        return
    for bits in reversed([each for each in HEAD_BITWIDTHS if each < fewest]):
        changed = request.with_options(head_bits=(bits,))
        if _fits(changed):
            text = f"embedding and LM head in {bits} bit (--head_bits {bits})"
            yield Remedy(text, changed)
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


def more_host_memory(request: PlanningRequest) -> Iterator[Remedy]:
    """The least memory of one host, else of every one, in which experts of layers may lie."""
    if not has_free_experts(request.shape) or request.options.policy == BOUNDED:
        return
    alike = dict[object, str]()
    for name in request.cluster.nodes:
        kinds = (each.cost_kind for each in request.cluster.devices if each.node == name)
        alike.setdefault(tuple(kinds), name)

    def of(names: Collection[str], gib: int) -> PlanningRequest:
        cluster = request.cluster
        devices = tuple(
            replace(each, host_memory_bytes=max(gib * GIB, each.host_memory_bytes or 0))
            if each.node in names
            else each
            for each in cluster.devices
        )
        return replace(request, cluster=replace(cluster, devices=devices))

    def least(names: Collection[str]) -> int:
        """The place in `HOST_GIB` of what suffices; behind its end where nothing does."""
        return bisect_left(HOST_GIB, True, key=lambda gib: _fits(of(names, gib)))

    places = {name: least([name]) for name in alike.values()}
    name = min(places, key=places.__getitem__)
    single = places[name] < len(HOST_GIB)
    names, place = ([name], places[name]) if single else (request.cluster.nodes, 0)
    if not single and (place := least(names)) == len(HOST_GIB):
        return
    gib, where = HOST_GIB[place], f"node {name}" if single else "every node with GPUs"
    text = f"host_memory_gib: {gib} of {where} (in the cluster file), where experts may lie"
    yield Remedy(text, of(names, gib))


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
    _narrower_ends,
    _smaller_batch,
    _fewer_bits,
    more_host_memory,
    _other_value("memory_margin", 0.0, "nothing kept free (--memory_margin 0)", bool),
    _more_devices,
)
