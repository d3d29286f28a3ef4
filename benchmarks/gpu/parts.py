"""The parts of a GPU report, each with a time limit of its own, and how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIME_LIMIT_S = 35 * 60
"""For all parts together."""

_PACKAGE = "benchmarks.gpu.measurements"


@dataclass(frozen=True)
class Part:
    """`module.run(findings, place, argument)` in a process of its own, which sees so many `gpus`,
    for `limit_s` at most.
    """

    name: str
    title: str
    limit_s: float
    module: str
    argument: str = ""
    gpus: int = 1


def _kernel_part(backend: str, limit_s: float = 75) -> Part:
    title = f"Products with backend {backend}"
    return Part(f"kernels.{backend}", title, limit_s, f"{_PACKAGE}.kernels", backend)


def _graph_part(bits: int) -> Part:
    title = f"A decode step at {bits} bit, with CUDA graphs on and off"
    return Part(f"graphs.{bits}bit", title, 75, f"{_PACKAGE}.graphs", str(bits))


PARTS: tuple[Part, ...] = (
    Part("tests", "Tests that need a GPU", 180, f"{_PACKAGE}.gpu_tests"),
    _kernel_part("cuda_3bit"),
    _kernel_part("cuda_4bit"),
    _kernel_part("cuda_8bit"),
    _kernel_part("cuda_w8a8"),
    Part("attention", "Decode attention by lengths", 75, f"{_PACKAGE}.attention"),
    Part("stages", "Two stages on one GPU, in one process", 120, f"{_PACKAGE}.stages"),
    _graph_part(16),
    _graph_part(4),
    Part("layers", "Decoder layers: estimated and measured", 165, f"{_PACKAGE}.layers"),
    Part("plan", "A plan for this GPU, and its run", 225, f"{_PACKAGE}.planned_run"),
    Part("memory", "Memory: planned and held", 105, f"{_PACKAGE}.memory"),
    Part("actors", "Two actors on one GPU, through Ray", 135, f"{_PACKAGE}.ray_actors"),
    Part("nccl", "Two actors on two GPUs, through Ray", 120, f"{_PACKAGE}.ray_actors", "2", 2),
    _graph_part(3),
    _graph_part(8),
    _kernel_part("bnb_nf4"),
    _kernel_part("cuda_6bit", 60),
    _kernel_part("cuda_5bit", 60),
    _kernel_part("torch_8bit", 35),
    _kernel_part("marlin_4bit", 40),
    Part("loading", "Loading", 105, f"{_PACKAGE}.loading"),
)
"""In the order of what would be wrong first, and is to be known: a run that is cut short has
those."""


def choose(names: Sequence[str]) -> list[Part]:
    """Parts by name, or by the part of it before the dot; all where no name is given.

    ValueError for a name that none has.
    """
    for name in names:
        if not any(_is_meant(part, name) for part in PARTS):
            known = ", ".join(dict.fromkeys(part.name.split(".")[0] for part in PARTS))
            raise ValueError(f"no part {name!r}; choose among {known}, or {PARTS[1].name}")
    return [part for part in PARTS if not names or any(_is_meant(part, name) for name in names)]


def part_named(name: str) -> Part:
    """The part of exactly that name."""
    return next(part for part in PARTS if part.name == name)


def _is_meant(part: Part, name: str) -> bool:
    return name in (part.name, part.name.split(".")[0])
