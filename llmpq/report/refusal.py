"""The page of what does not fit: what is short, what was needed, and the remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmpq.report.formatting import plural
from llmpq.report.rendering import Making, making, render, write_page
from planner.cluster.device import Device
from planner.costs.memory import kv_cache_bytes_per_layer, layer_weight_bytes
from planner.options import kv_bits_of
from planner.search.request import PlanningRequest
from quant.common.errors import BoundNotMetError, InfeasibleError


@dataclass(frozen=True)
class Need:
    """Bytes of all layers at a bitwidth, without and with keys and values."""

    bits: int
    weights: int
    kv_cache: int


@dataclass(frozen=True)
class Offer:
    """A kind of device: how many there are, and the bytes of each that a plan may fill."""

    name: str
    devices: int
    usable: int


@dataclass(frozen=True)
class Refusal:
    """All that the page of a refused plan shows, under the names that its template uses.

    `memory_is_short`: else plans fit, but none keeps the bound that was given.
    """

    model: str
    cluster: str
    what: str
    problem: str
    remedies: Sequence[str]
    memory_is_short: bool
    needs: Sequence[Need]
    offers: Sequence[Offer]
    making: Making

    @property
    def offered(self) -> int:
        """Bytes of all devices together that a plan may fill."""
        return sum(each.devices * each.usable for each in self.offers)


def refusal_of(
    request: PlanningRequest,
    error: InfeasibleError,
    command: Sequence[str] = (),
    what: str | None = None,
) -> Refusal:
    """What was asked for (in words `what`, or the request's prompts), what it needs, and what the
    error says.
    """
    w, job = request.workload, request.job
    prompts = w.global_batch if job is None else job.prompts
    lengths = f"{plural(prompts, 'prompt')} of up to {w.prompt_length:,} tokens, {w.new_tokens} new"
    in_flight = "all in flight" if job is None else f"{w.global_batch:,} in flight at the least"
    return Refusal(
        model=request.shape.name,
        cluster=request.cluster.name,
        what=what or f"{lengths}, {in_flight}",
        problem=error.problem,
        remedies=error.remedies or _least_bound(error),
        memory_is_short=not isinstance(error, BoundNotMetError),
        needs=_needs(request),
        offers=_offers(request),
        making=making(None, command),
    )


def _least_bound(error: InfeasibleError) -> tuple[str, ...]:
    """The bound that was found feasible, where one was missed."""
    if not isinstance(error, BoundNotMetError):
        return ()
    return (f"--{error.option} {error.reachable:g}",)


def _needs(request: PlanningRequest) -> list[Need]:
    """The bytes of all layers by bitwidth, as the first device would hold them."""
    shape, device = request.shape, request.cluster.devices[0]
    dtype = device.compute_dtype(request.options.dtype)
    cache = kv_cache_bytes_per_layer(shape, request.workload, kv_bits_of(request.options), dtype)
    return [
        Need(
            bits,
            shape.layers * layer_weight_bytes(shape, bits, device, dtype),
            shape.layers * cache,
        )
        for bits in sorted(request.options.bits, reverse=True)
    ]


def _offers(request: PlanningRequest) -> list[Offer]:
    kinds: dict[tuple[str, str, int], list[Device]] = {}
    for device in request.cluster.devices:
        key = (device.node, device.accelerator.name, device.memory_bytes)
        kinds.setdefault(key, []).append(device)
    return [
        Offer(
            f"{accelerator} on {node}",
            len(devices),
            round(memory * (1 - request.options.memory_margin)) - devices[0].runtime_bytes,
        )
        for (node, accelerator, memory), devices in kinds.items()
    ]


def refusal_page(refusal: Refusal) -> str:
    """The refusal as an HTML document."""
    return render("refusal.html.j2", refusal=refusal, making=refusal.making)


def write_refusal(path: str | Path, refusal: Refusal) -> None:
    """Write `refusal_page`, whole or not at all; InputError where it cannot be written."""
    write_page(Path(path), refusal_page(refusal))
