"""The Ray resources that bring each stage to its kind of device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.processes.device import own_gpus
from planner.cluster.accelerators import Accelerator
from planner.cluster.device import Device
from planner.plan.spec import StagePlan
from quant.common.errors import DeviceError

ACCELERATOR_TYPE = "accelerator_type:"
CRUMB = 0.001  # Ray offers one unit of an accelerator type a node, for all that ask for the type


@dataclass(frozen=True)
class DeviceRequest:
    """A device for a measurement, asked for as a stage asks for its own: `emulated`, where a CPU
    stands in for it; `custom_resource`: the Ray resource that names it where Ray has no type for
    it; `degree`: the number of such devices, of one node, that what is placed is divided among.
    """

    index: int
    kind: Accelerator
    emulated: bool
    threads: int
    custom_resource: str | None
    degree: int = 1

    @classmethod
    def of(cls, device: Device) -> DeviceRequest:
        threads = device.threads or 1
        return cls(0, device.accelerator, device.emulated, threads, device.custom_resource)


Placed = StagePlan | DeviceRequest


@dataclass(frozen=True)
class Placement:
    """Resources and torch threads of a stage's actor, or of each of its `ranks`."""

    resources: Mapping[str, float]
    num_gpus: float
    num_cpus: float
    threads: int
    ranks: int = 1

    @property
    def bundle(self) -> dict[str, float]:
        """All ranks' resources as the bundle of a placement group; empty for a plain actor."""
        amounts = {"GPU": self.num_gpus, "CPU": self.num_cpus, **self.resources}
        return {name: self.ranks * amount for name, amount in amounts.items() if amount}


def place(stages: Sequence[Placed], offered: Mapping[str, float]) -> tuple[Placement, ...]:
    """Choose resources for every stage out of all that the Ray cluster `offered`.

    A stage asks for a custom resource with its GPU's name or an alias where a node has one: Ray's
    own `accelerator_type:` cannot tell a V100 of 16 GB from one of 32. Where no node has one, it
    asks for that type; CPU and emulated devices do without. Raises `DeviceError` naming what is
    missing.
    """
    placements = tuple(_place_one(stage, offered) for stage in stages)
    check_cpus(stages, offered.get("CPU", 0.0), "the Ray cluster")
    asked: Counter[str] = Counter()
    for placement in placements:
        asked.update(placement.bundle)
    for name, amount in asked.items():
        if amount > offered.get(name, 0.0) + 1e-9:
            raise DeviceError(
                f"the plan needs {amount:g} of Ray resource {name!r}, but the cluster offers "
                f"{offered.get(name, 0.0):g}; {_what_is_offered(offered)}. Plan for what is "
                "there, or add the nodes that are missing"
            )
    return placements


def check_cpus(stages: Sequence[Placed], offered: float, where: str) -> None:
    """Raise `DeviceError` where stages compute with more CPUs than are `offered` at `where`."""
    own = [stage.threads * stage.degree for stage in stages if _num_cpus(stage)]
    if sum(own) > offered + 1e-9:
        raise DeviceError(
            f"the plan needs {sum(own)} CPUs for {len(own)} stage{'s' * (len(own) > 1)}, but "
            f"{where} has {offered:g}; plan with a cluster file of fewer CPU devices, or of fewer "
            "threads each, or give the --address of a Ray cluster that has them"
        )


def _num_cpus(stage: Placed) -> float:
    """CPUs of each of its ranks."""
    return float(stage.threads) if stage.kind.is_cpu and not stage.emulated else 0.0


def _place_one(stage: Placed, offered: Mapping[str, float]) -> Placement:
    resources = _device_resource(stage, offered)
    name, on_host = stage.kind.name, stage.emulated or stage.kind.is_cpu
    if not on_host and not resources:
        raise DeviceError(
            f"stage {stage.index} needs a {name}, which no node of the Ray cluster "
            f"has; {_what_is_offered(offered)}. Start its node with `ray start --address=HEAD` "
            f"where Ray knows the GPU, else add --resources='{{\"{name}\": 1}}'"
        )
    num_gpus = 0.0 if on_host else 1.0
    # Emulated ranks compute as one, but take the named devices of all.
    return Placement(resources, num_gpus, _num_cpus(stage), stage.threads, stage.degree)


def _device_resource(stage: Placed, offered: Mapping[str, float]) -> dict[str, float]:
    accelerator = stage.kind
    if stage.custom_resource is not None and not stage.emulated:
        return {stage.custom_resource: 1.0}
    real = own_gpus() if stage.emulated else {}
    for name in (accelerator.name, *accelerator.aliases):
        if offered.get(name) and name != "CPU" and name not in real:
            return {name: 1.0}
    typed = f"{ACCELERATOR_TYPE}{accelerator.ray_type}"
    if accelerator.ray_type and offered.get(typed) and not stage.emulated:
        return {typed: CRUMB}
    return {}


def _what_is_offered(offered: Mapping[str, float]) -> str:
    hidden = ("node:", "memory", "object_store_memory")
    names = [
        f"{name} x {amount:g}"
        for name, amount in sorted(offered.items())
        if not name.startswith(hidden)
    ]
    return f"it offers {', '.join(names) or 'nothing'}"
