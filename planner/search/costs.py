"""The cost model that a request asks for: layer times and sensitivities from files or estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.cluster.spec import ClusterSpec
from planner.costs.eight_bit_kv import EightBitCacheLatency
from planner.costs.group_latency import GroupLatency
from planner.costs.latency_model import LatencyModel, RememberedLatency
from planner.costs.model import CostModel
from planner.costs.roofline import RooflineLatency
from planner.costs.slowed_latency import SlowedLatency
from planner.model.finding import ModelShape
from planner.optimiser.problem import FloatArray
from planner.options import PlanOptions, kv_bits_of
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.links import links_beside, links_path
from planner.profiles.row_selection import refuse_estimates
from planner.profiles.rows import LayerTerms, read_profiles
from planner.profiles.sums import sums_beside, sums_path
from planner.quality.perplexity_fit import omega_bound
from planner.quality.sensitivity import DEFAULT_SOURCE, Omega, default_sensitivity, load_omega
from planner.stored_bits import with_stored_bits
from planner.workload import Job, Workload, check_length
from quant.scheme import FULL_BITS


def planning_costs(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload,
    options: PlanOptions,
    job: Job | None = None,
) -> tuple[CostModel, Omega]:
    """The cost model that the options ask for, and the sensitivities it was made with.

    A bound of perplexity has become one of summed sensitivity. The costs are of `job`, where one
    is given.
    """
    options = with_stored_bits(options, shape)
    omega = omega_of(shape, options)
    if options.max_ppl_delta is not None:
        bound = omega_bound(omega, options.max_ppl_delta)
        options = replace(options, max_ppl_delta=None, max_omega=bound)
    costs = cost_model(cluster, shape, workload, options, omega.matrix)
    return replace(costs, job=job), omega


def cost_model(
    cluster: ClusterSpec,
    shape: ModelShape,
    workload: Workload,
    options: PlanOptions,
    sensitivity: FloatArray,
) -> CostModel:
    """The cost model of given sensitivities; SpecError for requests beyond the model's context."""
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
    """Layer times from the profiles that the options name, else from datasheets.

    SpecError where the options are strict and the profiles lack a layer's time that they could
    hold.
    """
    kv_bits = kv_bits_of(options)
    if options.profiles is None:
        return RooflineLatency(shape, kv_bits)
    rows = read_profiles(options.profiles, own=cluster.own_accelerators)
    if options.strict_profiles:
        kinds = {device.time_kind: device for device in reversed(cluster.devices)}
        typed = [(each, each.compute_dtype(options.dtype)) for each in reversed(kinds.values())]
        layer = LayerTerms.of(shape)
        refuse_estimates(rows, layer, typed, options.bits, str(options.profiles))
    fitted = FittedLatency(rows, RooflineLatency(shape))
    latency = ProfiledLatency(fitted) if options.profile_use == "measured" else fitted
    return latency if kv_bits == FULL_BITS else EightBitCacheLatency(latency, kv_bits)


def omega_of(shape: ModelShape, options: PlanOptions) -> Omega:
    """Sensitivities from the omega file that the options name, else from the layers' sizes."""
    if options.omega_file is None:
        return Omega(default_sensitivity(shape, options.bits), DEFAULT_SOURCE)
    return load_omega(options.omega_file, shape, options.bits)


def files_of_costs(options: PlanOptions) -> tuple[Path, ...]:
    """The files that costs are read from, where they exist."""
    times = options.profiles
    profiles = [] if times is None else [times, links_path(times), sums_path(times)]
    omega = [] if options.omega_file is None else [options.omega_file]
    return tuple(Path(path) for path in (*profiles, *omega))
