"""Where costs come from: layer times from profiles or datasheets, sensitivities from a file or
sizes.
"""

from __future__ import annotations

from planner.kv_latency import EightBitCacheLatency
from planner.latency import LatencyModel
from planner.memory import FULL_BITS
from planner.model_shape import ModelShape
from planner.options import PlanOptions, kv_bits_of
from planner.profiles import latency_from_profiles
from planner.roofline import RooflineLatency
from planner.sensitivity import DEFAULT_SOURCE, Omega, default_sensitivity, load_omega


def latency_model_of(shape: ModelShape, options: PlanOptions) -> LatencyModel:
    """From the profiles that the options name, else from datasheets."""
    kv_bits = kv_bits_of(options)
    if options.profiles is None:
        return RooflineLatency(shape, kv_bits)
    measured = options.profile_use == "measured"
    latency = latency_from_profiles(options.profiles, RooflineLatency(shape), measured)
    return latency if kv_bits == FULL_BITS else EightBitCacheLatency(latency, kv_bits)


def omega_of(shape: ModelShape, options: PlanOptions) -> Omega:
    """From the omega file that the options name, else from the layers' sizes."""
    if options.omega_file is None:
        return Omega(default_sensitivity(shape, options.bits), DEFAULT_SOURCE)
    return load_omega(options.omega_file, shape, options.bits)
