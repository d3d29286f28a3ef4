"""What is asked of the planner, and the cost model that it asks for: from files or estimates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from planner.adapters import adapter_folders, ranks_of, with_adapters
from planner.assumed_predictor import LONGEST, AssumedPredictor
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.adjusted_latency import EightBitCacheLatency, GroupLatency, SlowedLatency
from planner.costs.hosting import can_host
from planner.costs.latency_model import LatencyModel, RememberedLatency
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.lengths import PlannedHeads, RequestLengths
from planner.model.shape import ModelShape
from planner.optimiser.problem import FloatArray
from planner.options import AUTO, PlanOptions, kv_bits_of
from planner.profiles.calibration import scale_of
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.layer_terms import LayerTerms
from planner.profiles.links import links_beside, links_path, sums_beside, sums_path
from planner.profiles.perplexity_fit import perplexity_bound
from planner.profiles.rows import read_profiles
from planner.profiles.selection import measured_bits, refuse_estimates
from planner.profiles.sensitivity import (
    DEFAULT_SOURCE,
    Omega,
    assumed_head,
    default_sensitivity,
    load_omega,
)
from planner.scheduling import BOUNDED, PREDICTING
from planner.workload import Job, Workload, check_length
from quant.checkpoint.formats.readers import VLLM, held_bits
from quant.checkpoint.formats.writing import METHODS
from quant.common.errors import InfeasibleError, SpecError
from quant.scheme import (
    FULL_BITS,
    GPTQ,
    HEAD_BITWIDTHS,
    KV_BITWIDTHS,
    NEAR_FULL_BITS,
)

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class PlanningRequest:
    """The inputs of a plan; of a `job`, `workload` has the fewest in flight that are allowed."""

    cluster: ClusterSpec
    shape: ModelShape
    workload: Workload
    options: PlanOptions
    job: Job | None = None

    def __post_init__(self) -> None:
        """Have the shape hold the adapters that options name, and embedding and head the bits;
        where no bits are named, name all that are known. SpecError for some that the format lacks.
        """
        options = _of_format(self.cluster, self.options)
        if not options.bits:
            options = replace(options, bits=_known_bits(self.cluster, self.shape, options))
        object.__setattr__(self, "options", options)
        bits = max(options.head_bits or HEAD_BITWIDTHS)
        if self.shape.head_bits != bits:
            object.__setattr__(self, "shape", self.shape.with_all(head_bits=bits))
        if self.options.adapters:
            ranks = ranks_of(adapter_folders(self.options.adapters), self.shape)
            object.__setattr__(self, "shape", with_adapters(self.shape, ranks))

    @classmethod
    def of(
        cls,
        cluster: ClusterSpec,
        shape: ModelShape,
        workload: Workload | Job,
        options: PlanOptions,
    ) -> PlanningRequest:
        """The request for a batch or a job; SpecError for options that belong to the other one."""
        if isinstance(workload, Job):
            workload = with_heads(workload, options)
            if options.objective != PlanOptions().objective:
                raise SpecError(
                    f"objective {options.objective} is of one batch, not of a job; fix the batch "
                    "(--global_bz), or leave it out"
                )
            least = _least_in_flight(workload, options)
            workload = with_predictor(workload, options)
            slots = workload.in_flight(least, options.scheduling.name)
            return cls(cluster, shape, slots, options, workload)
        if options.in_flight != AUTO:
            raise SpecError(
                f"in_flight is {options.in_flight} beside a batch of {workload.global_batch}, all "
                "of which is in flight; give a job (--input or --prompts), or leave it out"
            )
        if options.predictor is not None:
            raise SpecError(
                f"predictor is {options.predictor} beside a batch of {workload.global_batch}, all "
                "of whose answers are of one length; give a job (--input or --prompts), or leave "
                "it out"
            )
        return cls(cluster, shape, with_heads(workload, options), options)

    def with_options(self, **changed: Any) -> PlanningRequest:
        return replace(self, options=replace(self.options, **changed))


_Sharing = TypeVar("_Sharing", bound=Workload | Job | RequestLengths)


def with_heads(workload: _Sharing, options: PlanOptions) -> _Sharing:
    """A batch, a job or lengths of requests with the heads that options say, if they do."""
    if options.shared_tokens is None:
        return workload
    return replace(workload, heads=PlannedHeads(options.shared_tokens))


def with_predictor(job: Job, options: PlanOptions) -> Job:
    """The job with the predictor of options, unless it has one, whose folder may be gone by now."""
    if options.policy not in PREDICTING or job.predictor is not None:
        return job
    named = options.predictor or LONGEST
    return replace(job, predictor=AssumedPredictor.named(named, job.lengths))


def _least_in_flight(job: Job, options: PlanOptions) -> int:
    """The fewest in flight: what the user fixed, or its micro-batches; SpecError above the job."""
    for name in ("prefill_micro_batch", "decode_micro_batch"):
        fixed = getattr(options, name)
        if fixed is not None and fixed > job.prompts:
            raise SpecError(f"{name} is {fixed}, more than the {job.prompts} prompts; lower it")
    if options.in_flight != AUTO:
        return min(int(options.in_flight), job.prompts)
    return max(options.prefill_micro_batch or 1, options.decode_micro_batch or 1)


def calibrated(shape: ModelShape, options: PlanOptions) -> ModelShape:
    """The shape as of 16 bit where weights are to be calibrated, of a GGUF file once its codes are
    decoded; SpecError for other quantized weights.
    """
    if options.rounding != GPTQ and options.format not in METHODS:
        return shape
    if not shape.is_original:
        option = f"format {options.format}" if options.format in METHODS else f"rounding {GPTQ}"
        raise SpecError(
            f"{option} is calibrated on weights that are not quantized, as {shape.name} is "
            "already; choose another one, or plan for the original 16-bit checkpoint"
        )
    return shape.plain if shape.stored is not None else shape


def with_fitting_cache(
    request: PlanningRequest, find: Callable[[PlanningRequest], _Found]
) -> _Found:
    """Call `find`, where `kv_bits` is auto with the most bits for which it succeeds."""
    if request.options.kv_bits != AUTO:
        return find(request)
    fewest, *more = KV_BITWIDTHS
    for bits in reversed(more):
        with suppress(InfeasibleError):
            return find(request.with_options(kv_bits=bits))
    return find(request.with_options(kv_bits=fewest))


def with_fitting_ends(
    request: PlanningRequest, find: Callable[[PlanningRequest], _Found]
) -> _Found:
    """As `with_fitting_cache`, and with the most of `head_bits`, of all where none are named, for
    which it succeeds.
    """

    def with_most(asked: PlanningRequest) -> _Found:
        fewest, *more = asked.options.head_bits or HEAD_BITWIDTHS
        for bits in reversed(more):
            with suppress(InfeasibleError):
                return find(asked.with_options(head_bits=(bits,)))
        return find(asked.with_options(head_bits=(fewest,)))

    return with_fitting_cache(request, with_most)


def costs_of(request: PlanningRequest) -> tuple[CostModel, Omega]:
    """The costs that options ask for, and the sensitivities; perplexity's bound becomes
    max_omega.
    """
    shape, options = request.shape, request.options
    omega = omega_of(shape, options).with_head(shape.head_bits)
    if options.max_ppl_delta is not None:
        bound = perplexity_bound(omega).omega_within(options.max_ppl_delta)
        options = replace(options, max_ppl_delta=None, max_omega=bound)
    costs = cost_model(request.cluster, shape, request.workload, options, omega.matrix)
    apart = has_free_experts(shape) and options.policy != BOUNDED and options.format != VLLM
    hosting = apart and any(map(can_host, request.cluster.devices))
    costs = replace(costs, expert_sensitivity=omega.experts, experts_apart=apart, hosting=hosting)
    return replace(costs, job=request.job), omega


def has_free_experts(shape: ModelShape) -> bool:
    """Whether experts may have bits and a place of their own; quantized checkpoints say theirs."""
    return shape.is_original and any(each.experts is not None for each in shape.kind_shapes)


def cost_model(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload,
    options: PlanOptions,
    sensitivity: FloatArray,
) -> CostModel:
    check_length(shape, workload)
    if options.profiles is not None:
        own = cluster.own_accelerators
        cluster = replace(
            cluster,
            measured_links=links_beside(options.profiles, own),
            measured_sums=sums_beside(options.profiles, own),
        )
    single = latency_model_of(cluster, shape, options)
    grouped = GroupLatency(single, kv_bits_of(options), cluster.measured_sums)
    latency = RememberedLatency(SlowedLatency(grouped))
    theta = options.theta or 0.0
    return CostModel(cluster, shape, workload, options, latency, sensitivity, theta)


def latency_model_of(cluster: ClusterSpec, shape: ModelShape, options: PlanOptions) -> LatencyModel:
    """Times from profiles, else datasheets; SpecError where strict profiles lack one."""
    kv_bits = kv_bits_of(options)
    if options.profiles is None:
        return RooflineLatency(shape, kv_bits)
    hosts = tuple(each for each in cluster.measured_links if each.place == "host")
    rows = read_profiles(options.profiles, own=cluster.own_accelerators)
    if options.strict_profiles:
        typed = _typed_devices(cluster, options)
        for kind in shape.kind_shapes:
            layer = LayerTerms.of(kind)
            refuse_estimates(rows, layer, typed, options.bits, str(options.profiles))
    fitted = FittedLatency(rows, RooflineLatency(shape, host_links=hosts))
    latency = ProfiledLatency(fitted) if options.profile_use == "measured" else fitted
    return latency if kv_bits == FULL_BITS else EightBitCacheLatency(latency, kv_bits)


def _typed_devices(cluster: ClusterSpec, options: PlanOptions) -> list[tuple[Device, str]]:
    """A device of each kind that has times of its own, with the type that it computes in."""
    kinds = {device.time_kind: device for device in reversed(cluster.devices)}
    return [(each, each.compute_dtype(options.dtype)) for each in reversed(kinds.values())]


def _known_bits(cluster: ClusterSpec, shape: ModelShape, options: PlanOptions) -> tuple[int, ...]:
    """The bitwidths that a plan chooses from where none are named (`PlanOptions.bits`)."""
    held = bits_of_format(cluster, options.format)
    if options.profiles is None:
        return held
    rows = read_profiles(options.profiles, own=cluster.own_accelerators)
    known, typed = set(held), _typed_devices(cluster, options)
    for kind, (device, dtype) in product(shape.kind_shapes, typed):
        known &= measured_bits(rows, device, dtype, LayerTerms.of(kind)) or known
    stored = {each.stored.bits for each in shape.kind_shapes if each.stored}
    return tuple(sorted(known | stored.intersection(held))) if known else held


def bits_of_format(cluster: ClusterSpec, format: str | None) -> tuple[int, ...]:
    return held_bits(format, [each.accelerator.processor for each in cluster.devices])


def _of_format(cluster: ClusterSpec, options: PlanOptions) -> PlanOptions:
    """The options, of vLLM with embedding and head as it has them; SpecError for named bits that
    the format lacks.
    """
    held = bits_of_format(cluster, options.format)
    lacking = sorted({*options.bits}.difference(held))
    if lacking:
        raise SpecError(
            f"bits has {' and '.join(map(str, lacking))}, and format {options.format} holds "
            f"{' and '.join(map(str, held))} here; leave bits out for these"
        )
    keeps_ends = options.format == VLLM and not options.head_bits
    return replace(options, head_bits=(FULL_BITS,)) if keeps_ends else options


def omega_of(shape: ModelShape, options: PlanOptions) -> Omega:
    if options.omega_file is None:
        matrix = default_sensitivity(shape, (NEAR_FULL_BITS,))
        head = assumed_head(matrix, (NEAR_FULL_BITS,))
        found = Omega(default_sensitivity(shape, options.bits), DEFAULT_SOURCE, head=head)
    else:
        found = load_omega(options.omega_file, shape, options.bits)
    scale = scale_of(found, shape, options.rounding, options.bits)
    found = replace(found, scale=scale)
    return found if shape.stored is None else found.beside_stored(shape, options.bits)


def files_of_costs(options: PlanOptions) -> tuple[Path, ...]:
    times = options.profiles
    profiles = [] if times is None else [times, links_path(times), sums_path(times)]
    omega = [] if options.omega_file is None else [options.omega_file]
    return tuple(Path(path) for path in (*profiles, *omega))
