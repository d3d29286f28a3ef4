"""What a plan was made from, kept with it so that it can be made again for fewer devices."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from planner.cluster.safe_yaml import parse_yaml
from planner.cluster.spec import ClusterSpec
from planner.options import PlanOptions
from quant.common.errors import InfeasibleError, SpecError

FILE_OPTIONS = ("omega_file", "profiles")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PlanOrigin:
    """`cluster` is the text of its file; `options` name files by absolute path; `lost` are the
    cluster's devices that were gone when the plan was made.
    """

    cluster: str
    options: PlanOptions
    lost: tuple[str, ...] = ()

    def cluster_spec(self) -> ClusterSpec:
        """What is left of the cluster; raises `InfeasibleError` where that is nothing, `SpecError`
        for a text that is no cluster.
        """
        where = "the plan's origin.cluster"
        values, _ = parse_yaml(self.cluster, where)
        if not isinstance(values, dict):
            raise SpecError(f"{where} is no mapping; plan again with llmpq-algo")
        whole = ClusterSpec.from_dict(values, where)
        left = tuple(device for device in whole.devices if device.name not in self.lost)
        if not left:
            raise InfeasibleError(f"no device of cluster {whole.name} is left")
        return replace(whole, devices=left)

    def without(self, devices: Collection[str]) -> PlanOrigin:
        """The same after `devices` are gone too."""
        return replace(self, lost=tuple(dict.fromkeys((*self.lost, *devices))))


def origin_of(cluster: ClusterSpec, options: PlanOptions) -> PlanOrigin | None:
    """The origin of a plan; None for a cluster that no file can say."""
    try:
        text = cluster.to_yaml()
        same = ClusterSpec.from_dict(yaml.safe_load(text)) == cluster
    except SpecError:
        return None
    if not same:
        return None
    omega_file, profiles = _absolute(options.omega_file), _absolute(options.profiles)
    return PlanOrigin(text, replace(options, omega_file=omega_file, profiles=profiles))


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
