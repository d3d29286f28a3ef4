"""`llmpq devices`: the accelerators that are built in, and what else a name stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import (
    EXIT_DONE,
    facts_table,
    plain_table,
    print_json,
    print_table,
    run_command,
    tell_notes,
    with_notes,
)
from llmpq.cli.parser import Parser, made
from planner.cluster.accelerators import Accelerator, assumption, find_accelerator, registry
from planner.option_rules import argument, flag, option
from quant.backends.table import backend_name
from quant.common.units import GIB
from quant.scheme import BITWIDTHS

if TYPE_CHECKING:
    from rich.console import RenderableType

DEVICES = "llmpq devices"

_DEVICES_DESCRIPTION = (
    "List the accelerators that plans can be made for, with the figures of their data sheets, or "
    "show one in full: its names, its kernels and the source of its figures."
)
_DEVICES_EXAMPLES = (
    "%(prog)s",
    "%(prog)s T4",
    "%(prog)s --here",
    "%(prog)s --cluster lab.yaml --json",
)

_DEVICE_HEADS = ("accelerator", "GiB", "GB/s", "fp16", "int8", "capability", "kernels")

_DEVICE_NOTES = (
    "Figures are those of data sheets, so times that follow from them are marked `estimated` in "
    "plans until `llmpq profile` has measured them. fp16 TFLOP/s and int8 TOP/s are dense.",
    "`llmpq devices NAME` shows one in full. A cluster file can describe others under "
    "`accelerators` (docs/clusters.md).",
)


@dataclass(frozen=True)
class DevicesCommand:
    name: str | None = argument(
        "NAME", "an accelerator, by name, alias or driver's name", more={"nargs": "?"}
    )
    here: bool = flag("only those that this machine has")
    cluster: str | None = option("FILE", "a cluster file; what it describes is listed too")
    json: bool = flag("as JSON, with the keys of cluster files")


def devices_main(arguments: Sequence[str] | None = None, prog: str = DEVICES) -> int:
    options = made(DevicesCommand, devices_parser(prog).parse(arguments))
    return run_command(prog, partial(_show_devices, options))


def devices_parser(prog: str | None = DEVICES) -> Parser:
    parser = Parser(prog, _DEVICES_DESCRIPTION, _DEVICES_EXAMPLES)
    parser.declare({"what is shown": "name|here cluster json"}, DevicesCommand)
    return parser


def _show_devices(options: DevicesCommand) -> int:
    from llmpq.detect import local_node
    from planner.cluster.spec import ClusterSpec

    own = () if options.cluster is None else ClusterSpec.from_yaml(options.cluster).described
    name = options.name
    if name is not None:
        note = assumption(name, own)
        if note is not None:
            tell_notes([note])
        chosen = find_accelerator(name, own)
        if options.json:
            print_json(_device_json(chosen))
        else:
            print_table(facts_table(_device_facts(chosen)))
        return EXIT_DONE
    here: dict[str, int] = local_node("here")["accelerators"] if options.here else {}
    kinds = tuple(map(find_accelerator, here)) or (*own, *registry())
    if options.json:
        count = {name: {"count": here[name]} for name in here}
        print_json([_device_json(each) | count.get(each.name, {}) for each in kinds])
    else:
        found = ", ".join(f"{count} x {name}" for name, count in here.items())
        print_table(_device_table(kinds, *([f"This machine has {found}."] if here else [])))
    return EXIT_DONE


def kernels_of(accelerator: Accelerator) -> dict[int, str]:
    """The kernel that multiplies with weights of each bitwidth, in the type it computes in."""
    processor, dtype = accelerator.processor, accelerator.default_dtype
    return {bits: backend_name(processor, bits, dtype) for bits in reversed(BITWIDTHS)}


def _device_json(accelerator: Accelerator) -> dict[str, Any]:
    from planner.cluster.described import entry_of

    return {
        "name": accelerator.name,
        "aliases": list(accelerator.aliases),
        **(entry_of(accelerator).stated() if not accelerator.is_cpu else _rates(accelerator)),
        "compute_type": accelerator.default_dtype,
        "kernels": {str(bits): name for bits, name in kernels_of(accelerator).items()},
    }


def _rates(accelerator: Accelerator) -> dict[str, Any]:
    """The figures of one core; its memory is what a cluster file gives it."""
    return {
        "memory_gbyte_per_s": accelerator.memory_bytes_per_s / 1e9,
        "fp32_tflops": accelerator.fp32_flops / 1e12,
        "fp16_tflops": accelerator.fp16_flops / 1e12,
        "int8_tops": None if accelerator.int8_ops is None else accelerator.int8_ops / 1e12,
        "source": accelerator.source,
    }


def _device_table(kinds: Sequence[Accelerator], *found: str) -> RenderableType:
    """A row for each accelerator, and below the kernels that the letters stand for."""
    sets = list(dict.fromkeys(tuple(kernels_of(each).items()) for each in kinds))
    letters = dict(zip(sets, ascii_uppercase, strict=False))
    table = plain_table(_DEVICE_HEADS, left=("accelerator", "kernels"), gap=2)
    for each in kinds:
        memory, int8 = each.nominal_memory_bytes / GIB, each.int8_ops
        table.add_row(
            each.name,
            "a core" if each.is_cpu else f"{memory:g}",
            f"{each.memory_bytes_per_s / 1e9:.0f}",
            f"{each.fp16_flops / 1e12:.4g}",
            "-" if int8 is None else f"{int8 / 1e12:.4g}",
            _capability(each),
            letters[tuple(kernels_of(each).items())],
        )
    legend = (
        f"  {letter}: {', '.join(f'{bits} {name}' for bits, name in kernels)}"
        for kernels, letter in letters.items()
    )
    return with_notes(table, *found, "\n".join(["kernels by bits", *legend]), *_DEVICE_NOTES)


def _capability(accelerator: Accelerator) -> str:
    if accelerator.compute_capability is not None:
        return "{}.{}".format(*accelerator.compute_capability)
    return accelerator.rocm_architecture or "-"


def _device_facts(each: Accelerator) -> Iterable[tuple[str, str]]:
    per_core = " a core" if each.is_cpu else ""
    yield "name", each.name
    yield "also called", ", ".join((*each.aliases, *each.reported_as))
    yield "Ray's type", each.ray_type or "none: give its nodes a resource of its name"
    yield "compute", f"{_capability_in_words(each)}, {each.default_dtype}"
    yield "torch", _wheels(each)
    if each.is_cpu:
        yield "memory", "what its node states (memory_gib)"
    else:
        nominal, usable = each.nominal_memory_bytes / GIB, each.usable_memory_bytes / GIB
        yield "memory", f"{nominal:g} GiB, of which {usable:.1f} can be used"
    yield "bandwidth", f"{each.memory_bytes_per_s / 1e9:g} GB/s{per_core}"
    rates = f"{each.fp32_flops / 1e12:.4g} fp32, {each.fp16_flops / 1e12:.4g} fp16 (dense)"
    yield "TFLOP/s", f"{rates}{per_core}"
    yield "int8 TOP/s", "" if each.int8_ops is None else f"{each.int8_ops / 1e12:.4g}{per_core}"
    link, host = each.link_bytes_per_s / 1e9, each.host_link_bytes_per_s / 1e9
    yield "links", f"{link:g} GB/s to its like on the node, {host:g} to the host (one direction)"
    for bits, kernel in kernels_of(each).items():
        yield f"{bits} bit", kernel
    yield "figures", "estimates, until llmpq profile measures layers on it"
    yield "source", each.source


def _capability_in_words(each: Accelerator) -> str:
    if each.is_cpu:
        return "the host's processor"
    vendor = "ROCm architecture" if each.rocm_architecture else "CUDA compute capability"
    return f"{vendor} {_capability(each)}"


def _wheels(each: Accelerator) -> str:
    """The builds of torch that run on it; see the installation page for versions."""
    if each.rocm_architecture is not None:
        return "ROCm wheels; weights below 16 bit by kernels in plain torch"
    if each.compute_capability is None:
        return "any wheels"
    if each.compute_capability < (7, 5):
        return "CUDA 12.6 wheels; newer CUDA has dropped it"
    return "CUDA 12.8 wheels or newer" if each.compute_capability >= (10, 0) else "any CUDA wheels"
