"""Measuring in a Ray task that is placed and started as a stage on the device would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError

from actors.processes.answers import get_answer, get_streamed
from actors.processes.device import device_here, stage_environment
from actors.processes.placement import DeviceRequest, place
from actors.profiling.beside import others_busy
from actors.profiling.loading import LoadTask, MeasuredLoad, time_loading
from actors.profiling.task import ProfileState, ProfileTask, measure
from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from quant.common.errors import DeviceError, LlmpqError


def measure_on_cluster(task: ProfileTask, device: Device) -> Iterator[ProfileState]:
    """Run `measure` on a node that has `device`; needs an initialised Ray.

    Raises `DeviceError` where no node offers the device.
    """
    remote = _as_stage(_measure_there, device, num_returns="streaming")
    with bare_errors():
        for reference in get_streamed(remote.remote(task, device.accelerator)):
            yield get_answer(reference)


def time_loading_on_cluster(task: LoadTask, device: Device) -> tuple[MeasuredLoad, ...]:
    """Run `time_loading` on a node that has `device`; needs an initialised Ray.

    Raises `DeviceError` where no node offers the device.
    """
    remote = _as_stage(time_loading, device)
    with bare_errors():
        found: tuple[MeasuredLoad, ...] = get_answer(remote.remote(task))
    return found


def _as_stage(function: Callable[..., Any], device: Device, **options: Any) -> Any:
    """`function` as a Ray task with the resources and the environment of a stage on `device`."""
    (placement,) = place([DeviceRequest.of(device)], ray.cluster_resources())
    remote: Any = ray.remote(function)
    return remote.options(
        num_cpus=placement.num_cpus,
        num_gpus=placement.num_gpus,
        resources=dict(placement.resources),
        runtime_env={"env_vars": stage_environment(placement.threads)},
        max_retries=0,
        **options,
    )


@contextmanager
def bare_errors() -> Iterator[None]:
    """Raise the project's own errors as they were inside the task."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, LlmpqError):
            raise error.cause from None
        raise


def _measure_there(task: ProfileTask, accelerator: Accelerator) -> Iterator[ProfileState]:
    """Check the GPU of this process, then measure."""
    if device_here(task.device).type == "cuda":
        name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
        if name == "no GPU" or not accelerator.is_reported_as(name):
            raise DeviceError(
                f"the task was to measure a {accelerator.name}, but its node has {name}"
            )
    with others_busy(task):
        yield from measure(task)
