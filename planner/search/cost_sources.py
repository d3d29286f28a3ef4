"""Where costs come from: layer times from profiles or datasheets, sensitivities from a file or
sizes.
"""

from __future__ import annotations

from pathlib import Path

from planner.cluster.spec import ClusterSpec
from planner.costs.eight_bit_kv import EightBitCacheLatency
from planner.costs.latency import LatencyModel
from planner.costs.roofline import RooflineLatency
from planner.model.finding import ModelShape
from planner.options import PlanOptions, kv_bits_of
from planner.profiles.fit import FittedLatency, ProfiledLatency
from planner.profiles.links import links_path
from planner.profiles.row_selection import refuse_estimates
from planner.profiles.rows import LayerTerms, read_profiles
from planner.quality.sensitivity import DEFAULT_SOURCE, Omega, default_sensitivity, load_omega
from quant.scheme import FULL_BITS


def latency_model_of(cluster: ClusterSpec, shape: ModelShape, options: PlanOptions) -> LatencyModel:
    """From the profiles that the options name, else from datasheets.

    SpecError where the options are strict and the profiles lack a layer's time that they could
    hold.
    """
    kv_bits = kv_bits_of(options)
    if options.profiles is None:
        return RooflineLatency(shape, kv_bits)
    rows = read_profiles(options.profiles)
    if options.strict_profiles:
        kinds = {device.time_kind: device for device in reversed(cluster.devices)}
        typed = [(each, each.compute_dtype(options.dtype)) for each in reversed(kinds.values())]
        layer = LayerTerms.of(shape)
        refuse_estimates(rows, layer, typed, options.bits, str(options.profiles))
    fitted = FittedLatency(rows, RooflineLatency(shape))
    latency = ProfiledLatency(fitted) if options.profile_use == "measured" else fitted
    return latency if kv_bits == FULL_BITS else EightBitCacheLatency(latency, kv_bits)


def omega_of(shape: ModelShape, options: PlanOptions) -> Omega:
    """From the omega file that the options name, else from the layers' sizes."""
    if options.omega_file is None:
        return Omega(default_sensitivity(shape, options.bits), DEFAULT_SOURCE)
    return load_omega(options.omega_file, shape, options.bits)


def files_of_costs(options: PlanOptions) -> tuple[Path, ...]:
    """All files that costs are read from where they exist."""
    profiles = [] if options.profiles is None else [options.profiles, links_path(options.profiles)]
    omega = [] if options.omega_file is None else [options.omega_file]
    return tuple(Path(path) for path in (*profiles, *omega))
