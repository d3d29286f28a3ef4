"""The cluster file: its schema, and messages that name file, line and nearest key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from planner.cluster.accelerators import Accelerator, assumption, find_accelerator
from planner.cluster.described import (
    AcceleratorEntry,
    DescriptionError,
    Positive,
    described_accelerator,
)
from quant.common.errors import SpecError
from quant.common.files import MAX_DEPTH
from quant.common.host_memory import usable_memory_bytes
from quant.common.units import GIB

MOST_BYTES = 1 << 20
"""Largest file: a hundred bytes for each of ten thousand nodes, which take seconds to read."""

MOST_NODES = MOST_BYTES // 2
"""Most keys and values: no file of `MOST_BYTES` has more unless aliases multiply them."""

_IMPOSSIBLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""Errors that the library raises for malformed numbers, dates and truth values."""


class _Loader(yaml.SafeLoader):
    """Takes no deeper nesting than what reads and shows values has room for."""

    _levels = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._levels == MAX_DEPTH:
            raise yaml.YAMLError(f"it nests too deeply: {MAX_DEPTH} levels at most are read")
        self._levels += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._levels -= 1
        return node


def parse_yaml(text: str, label: str) -> tuple[object, yaml.Node | None]:
    """Parse to values and lined nodes; SpecError for invalid or huge YAML and repeated keys."""
    if len(text) > MOST_BYTES:
        raise SpecError(f"{label} has {len(text)} characters; a cluster takes at most {MOST_BYTES}")
    try:
        document: yaml.Node | None = _Loader(text).get_single_node()
        _check_nodes(document, label)
        values = document and yaml.SafeLoader("").construct_document(document)
        return values, document
    except (yaml.YAMLError, *_IMPOSSIBLE) as error:
        raise SpecError(f"{label} is not valid YAML: {error}") from error


def _check_nodes(document: yaml.Node | None, label: str) -> None:
    """Count keys and values with aliases written out, visiting each node once; refuse repeats."""
    if document is None:
        return
    sizes: dict[int, int] = {}
    waiting = [document]
    open_nodes: set[int] = set()
    while waiting:
        node = waiting[-1]
        missing = [child for child in _children(node) if id(child) not in sizes]
        if missing and id(node) not in open_nodes:
            open_nodes.add(id(node))
            waiting += missing
            continue
        waiting.pop()
        if isinstance(node, yaml.MappingNode):
            _refuse_repeats_of(node, label)
        # A node that is still open here contains itself: its expansion ends there.
        sizes[id(node)] = 1 + sum(sizes.get(id(child), 1) for child in _children(node))
        if sizes[id(node)] > MOST_NODES:
            line = node.start_mark.line + 1
            raise SpecError(
                f"{label}:{line}: with its aliases and merge keys (<<) written out this has "
                f"{sizes[id(node)]:.3g} keys and values; {MOST_NODES} are the most. Write out "
                "what you mean, without aliases"
            )


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _refuse_repeats_of(node: yaml.MappingNode, label: str) -> None:
    seen: set[str] = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise SpecError(f"{label}:{key.start_mark.line + 1}: key {key.value!r} stands twice")
        seen.add(key.value)


MOST_DESCRIBED = 256
"""Most accelerators that a file describes: more kinds than anyone has bought."""

MOST_DEVICES = 100_000
"""More devices than one operator has for one model; a count beyond is a typing error, and would
take the memory of this machine before a plan is looked for."""

_HOST_SHARE = 0.8
"""Share of this machine's memory that its CPUs are given."""

Count = Annotated[int, Field(ge=1)]

MOST_TIME_SCALE = 1e3
"""An emulated second then takes a quarter of an hour; more is a typing error."""

Price = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Above the price of any machine in any currency; more is a typing error."""

TimeScale = Annotated[float, Field(ge=0, le=MOST_TIME_SCALE, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NodeEntry(_Strict):
    """A machine; `accelerators` is `{T4: 3}`, `T4:3` or `T4`. `threads` and `memory_gib` are of
    each CPU, `host_threads` and `host_memory_gib` of the machine; `usable_memory_gib` is for each
    accelerator or by type; links are 10^9 bytes/s in one direction.
    """

    name: Annotated[str, Field(min_length=1)] | None = None
    accelerators: Annotated[dict[str, Count], Field(min_length=1)]
    usable_memory_gib: Positive | dict[str, Positive] | None = None
    host_memory_gib: Positive | None = None
    host_threads: Annotated[int, Field(ge=1, le=2**16)] | None = None
    link_gbyte_per_s: Positive | None = None
    host_link_gbyte_per_s: Positive | None = None
    threads: Annotated[int, Field(ge=1, le=2**16)] | None = None
    memory_gib: Positive | None = None
    price_per_hour: Price | None = None

    @field_validator("accelerators", mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        name, _, count = value.partition(":")
        if count and not count.strip().isdigit():
            raise ValueError(f"{value!r} is not of the form TYPE:COUNT")
        return {name.strip(): int(count) if count else 1}


class NetworkEntry(_Strict):
    """The network between the machines; rates are in 10^9 bits per second."""

    internode_gbit_per_s: Positive


class Emulation(_Strict):
    """Times are multiplied by `time_scale` (0: none); `stand_in` is the path of a small model."""

    time_scale: TimeScale = 1.0
    stand_in: Annotated[str, Field(min_length=1)] | None = None


class ClusterEntry(_Strict):
    name: Annotated[str, Field(min_length=1)]
    accelerators: Annotated[dict[str, AcceleratorEntry], Field(max_length=MOST_DESCRIBED)] = {}
    nodes: Annotated[list[NodeEntry], Field(min_length=1)]
    network: NetworkEntry | None = None
    emulate: Emulation | None = None


@dataclass(frozen=True)
class Source:
    label: str
    document: yaml.Node | None = None

    def at(self, location: Sequence[str | int]) -> str:
        """The place as `file:line: nodes.0.name`, as far down as the file goes."""
        node, line = self.document, None
        for step in location:
            found = _child(node, step)
            if found is None:
                break
            node, line = found
        mark = f"{self.label}:{line}" if line is not None else self.label
        return f"{mark}: {'.'.join(map(str, location)) or 'the document'}"

    def error(self, location: Sequence[str | int], problem: str) -> SpecError:
        return SpecError(f"{self.at(location)}: {problem}")


@dataclass(frozen=True)
class ClusterFile:
    entry: ClusterEntry
    own: tuple[Accelerator, ...]
    source: Source

    def find(self, name: str) -> Accelerator:
        return find_accelerator(name, self.own)

    def assumptions(self) -> tuple[str, ...]:
        """Note what is assumed where a name fits several accelerators, once for each name."""
        found: dict[str, str] = {}
        for index, node in enumerate(self.entry.nodes):
            for name in node.accelerators:
                text = assumption(name, self.own)
                if text is not None and name not in found:
                    where = self.source.at(["nodes", index, "accelerators", name])
                    found[name] = text if self.source.document is None else f"{where}: {text}"
        return tuple(found.values())


def read_yaml(path: Path) -> tuple[object, Source]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SpecError(
                f"cluster file {path} has {path.stat().st_size} bytes; a cluster takes at most "
                f"{MOST_BYTES}"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"cluster file {path} cannot be read: {error}") from error
    values, document = parse_yaml(text, f"cluster file {path}")
    return values, Source(str(path), document)


def local_cpus(count: int) -> dict[str, Any]:
    """Make the entry of a node of `count` CPUs that share this machine's cores, and the memory that
    may be used here.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory_gib = usable_memory_bytes() / GIB
    each = max(1, count)
    return {
        "accelerators": {"CPU": count},
        "threads": max(1, cores // each),
        "memory_gib": round(memory_gib * _HOST_SHARE / each, 1),
    }


def parse_cluster(values: object, source: Source) -> ClusterFile:
    if not isinstance(values, Mapping):
        raise SpecError(f"{source.label}: a cluster is a mapping with the keys name and nodes")
    try:
        entry = ClusterEntry.model_validate(dict(values))
    except ValidationError as error:
        raise _first_problem(error, source) from error
    devices = sum(count for node in entry.nodes for count in node.accelerators.values())
    if devices > MOST_DEVICES:
        raise source.error(
            ["nodes"], f"{devices} devices; at most {MOST_DEVICES} can be, is a count mistyped?"
        )
    file = ClusterFile(entry, _described(entry.accelerators, source), source)
    for index in range(len(entry.nodes)):
        _check_node(file, index)
    _check_prices(entry, source)
    return file


def _described(entries: Mapping[str, AcceleratorEntry], source: Source) -> tuple[Accelerator, ...]:
    found: list[Accelerator] = []
    for name, entry in entries.items():
        try:
            found.append(described_accelerator(name, entry, found))
        except DescriptionError as error:
            where = ["accelerators", name] + ([] if error.field is None else [error.field])
            raise source.error(where, str(error)) from error
    return tuple(found)


def _check_node(file: ClusterFile, index: int) -> None:
    node, source = file.entry.nodes[index], file.source
    here: list[str | int] = ["nodes", index]
    kinds = [_known(name, [*here, "accelerators", name], file) for name in node.accelerators]
    for kind in {kind for kind in kinds if kinds.count(kind) > 1}:
        raise source.error([*here, "accelerators"], f"{kind} is listed under two names; use one")
    limits = node.usable_memory_gib if isinstance(node.usable_memory_gib, dict) else {}
    for name in limits:
        if _known(name, [*here, "usable_memory_gib", name], file) not in kinds:
            raise source.error(
                [*here, "usable_memory_gib", name], "this node has no such accelerator"
            )
    _check_limits(node, here, file)
    if "CPU" in kinds:
        given = node.memory_gib or "CPU" in {file.find(name).name for name in limits}
        if not given and not isinstance(node.usable_memory_gib, float):
            raise source.error(here, "a CPU needs a budget; add memory_gib, the GiB each may use")
        return
    for key in ("threads", "memory_gib"):
        if getattr(node, key) is not None:
            raise source.error([*here, key], "only CPU accelerators take it; this node has none")


def _check_prices(entry: ClusterEntry, source: Source) -> None:
    """Check that all nodes have a price, or none: a part of the cost would be taken for all."""
    priced = [node.price_per_hour is not None for node in entry.nodes]
    if any(priced) and not all(priced):
        index = priced.index(False)
        name = entry.nodes[index].name or f"node{index}"
        raise source.error(
            ["nodes", index],
            f"{name} has no price_per_hour, while {priced.count(True)} of {len(priced)} nodes have "
            "one; give every node its price (0 where it costs nothing), or none",
        )


def _check_limits(node: NodeEntry, here: list[str | int], file: ClusterFile) -> None:
    stated, field = node.usable_memory_gib, [*here, "usable_memory_gib"]
    if stated is None:
        return
    by_type = isinstance(stated, dict)
    limits = stated if isinstance(stated, dict) else dict.fromkeys(node.accelerators, stated)
    for name, limit in limits.items():
        accelerator = file.find(name)
        has = accelerator.nominal_memory_bytes / GIB
        if not accelerator.is_cpu and limit > has:
            raise file.source.error(
                [*field, name] if by_type else field,
                f"{limit:g} GiB, but a {accelerator.name} has {has:g}; give at most what it "
                "offers, or name the GPU that has more",
            )


def _known(name: str, location: Sequence[str | int], file: ClusterFile) -> str:
    try:
        return file.find(name).name
    except SpecError as error:
        raise file.source.error(location, str(error)) from error


def _first_problem(error: ValidationError, source: Source) -> SpecError:
    """Report the deepest problem that pydantic found; unknown keys come first."""
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    problem = max(unknown or problems, key=lambda each: len(each["loc"]))
    location = [step for step in problem["loc"] if not _is_pydantic_step(step)]
    if not unknown:
        found = problem.get("input")
        shown = "" if isinstance(found, dict | list) else f" (found {found!r})"
        return source.error(location, f"{problem['msg']}{shown}")
    *parent, key = location
    keys = _keys_at(parent)
    near = get_close_matches(str(key), keys, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
    return source.error(location, f"unknown key; {hint}")


def _is_pydantic_step(step: str | int) -> bool:
    """Whether pydantic added this step: a branch of a union, such as `dict[...]`, or `[key]`."""
    return isinstance(step, str) and step.startswith(("float", "dict[", "constrained", "[key]"))


def _keys_at(parent: Sequence[str | int]) -> list[str]:
    tables: dict[str, type[BaseModel]] = {
        "accelerators": AcceleratorEntry,
        "nodes": NodeEntry,
        "network": NetworkEntry,
        "emulate": Emulation,
    }
    model = tables[str(parent[0])] if parent else ClusterEntry
    return list(model.model_fields)


def _child(node: yaml.Node | None, step: str | int) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step].start_mark.line + 1
    return None
