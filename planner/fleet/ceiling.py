"""A bound on the tokens per second of a cluster, however it is divided into pipelines.

Every layer of every token is computed somewhere. A device that computes the share f of a pipeline's
layers, in T seconds a token for all of them, lets at most 1 / (f T) tokens pass. So a pipeline
generates at most the sum of 1 / T over its devices, and a cluster the sum over all of them: with
the fastest bitwidth, the largest micro-batch that fits beside one layer, and hops, embedding and
head for nothing. A group of k ranks computes no more than k devices alone, as its sums only add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cluster.device import Device
from planner.costs.memory import layer_weight_bytes
from planner.costs.model import CostModel
from planner.model.tensor_parallel import DEGREES
from planner.workload import MAX_REQUESTS, Job


def ceiling_tokens_per_s(costs: CostModel, job: Job, devices: Sequence[Device]) -> float:
    """Tokens per second that no division of `devices` into pipelines exceeds."""
    kinds: dict[object, float] = {}
    total = 0.0
    for device in devices:
        if device.cost_kind not in kinds:
            kinds[device.cost_kind] = device_tokens_per_s(costs, job, device)
        total += kinds[device.cost_kind]
    return total


def device_tokens_per_s(costs: CostModel, job: Job, device: Device) -> float:
    """Generated tokens per second of one device that computes all layers, of which it need hold but
    one.
    """
    dtype, lengths, layer = costs.dtype(device), job.lengths, costs.latency
    most = _most_requests(costs, job, device)
    sizes = [*(1 << power for power in range(most.bit_length())), most]
    prompt, context = max(1, round(lengths.mean_prompt)), round(lengths.mean_context)
    best = min(
        min(layer.layer_prefill_s(device, bits, n, prompt, dtype) / n for n in sizes)
        + (lengths.mean_output - 1)
        * min(layer.layer_decode_s(device, bits, n, context, dtype) / n for n in sizes)
        for bits in costs.options.bits
    )
    return lengths.mean_output / (best * costs.shape.layers)


def _most_requests(costs: CostModel, job: Job, device: Device) -> int:
    """Requests whose keys and values of one layer fit beside that layer: in a group every rank has
    those of some heads only, so of as many more.
    """
    ranks = 1 if costs.options.tensor_parallel == 1 else DEGREES[-1]
    limit = costs.limit_bytes(device) - min(
        layer_weight_bytes(costs.shape, bits, device, costs.dtype(device))
        for bits in costs.options.bits
    )
    one = replace(costs, workload=costs.in_flight(job, 1)).kv_bytes_per_layer(device)
    return max(1, min(job.prompts, MAX_REQUESTS, int(ranks * limit // one)))
