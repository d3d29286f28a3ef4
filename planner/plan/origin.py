"""The origin of a plan, by which it can explain itself and be made again for fewer devices."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from planner.assumed_predictor import STUDIES
from planner.cluster.device import AS_MODELLED, Slowdown
from planner.cluster.file import parse_yaml
from planner.cluster.spec import ClusterSpec
from planner.options import PlanOptions
from quant.common.errors import InfeasibleError, SpecError

FILE_OPTIONS = ("omega_file", "profiles", "importance")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PlanOrigin:
    """`cluster` is the text of its file, `lost` its devices that were gone; `files` are SHA-256 by
    absolute path (None: no file), `slowdowns` measured by a run.
    """

    cluster: str
    options: PlanOptions
    lost: tuple[str, ...] = ()
    files: dict[str, str | None] = field(default_factory=dict)
    slowdowns: dict[str, Slowdown] = field(default_factory=dict)

    def cluster_spec(self) -> ClusterSpec:
        """The cluster without lost devices; InfeasibleError where none is left."""
        where = "the plan's origin.cluster"
        values, _ = parse_yaml(self.cluster, where)
        if not isinstance(values, dict):
            raise SpecError(f"{where} is no mapping; plan again with llmpq plan")
        whole = ClusterSpec.from_dict(values, where)
        left = tuple(
            replace(device, slowdown=self.slowdowns.get(device.name, AS_MODELLED))
            for device in whole.devices
            if device.name not in self.lost
        )
        if not left:
            raise InfeasibleError(f"no device of cluster {whole.name} is left")
        return replace(whole, devices=left)

    def changed_files(self) -> Iterator[str]:
        return (path for path, digest in self.files.items() if _digest(Path(path)) != digest)

    def without(self, devices: Collection[str]) -> PlanOrigin:
        return replace(self, lost=tuple(dict.fromkeys((*self.lost, *devices))))

    def slowed(self, slowdowns: Mapping[str, Slowdown]) -> PlanOrigin:
        found = dict(self.slowdowns)
        for device, now in slowdowns.items():
            before = found.get(device, AS_MODELLED)
            found[device] = Slowdown(before.prefill * now.prefill, before.decode * now.decode)
        return replace(self, slowdowns=found)


def origin_of(
    cluster: ClusterSpec, options: PlanOptions, files: Collection[str | Path] = ()
) -> PlanOrigin | None:
    """Origin of a plan with costs from `files`; None if no cluster file describes the cluster."""
    try:
        text = cluster.to_yaml()
        same = ClusterSpec.from_dict(yaml.safe_load(text)) == cluster
    except SpecError:
        return None
    if not same:
        return None
    paths: dict[str, Any] = {name: _absolute(getattr(options, name)) for name in FILE_OPTIONS}
    digests = {path: _digest(Path(path)) for path in map(_absolute, files) if path is not None}
    predictor = options.predictor
    if predictor not in STUDIES:
        predictor = _absolute(predictor)
    named = replace(options, **paths, predictor=predictor)
    return PlanOrigin(text, named, files=digests)


def with_planned(options: PlanOptions, planned: Collection[int]) -> PlanOptions:
    """`options` whose bits, if they name any, have those of their plan too: earlier versions wrote
    3, 4, 8 and 16 where nothing was said, without others that the checkpoint was stored with.
    """
    return replace(options, bits=(*options.bits, *planned)) if options.bits else options


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
