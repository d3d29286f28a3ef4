"""`llmpq profile`: measure times of a decoder layer here or on a cluster, for `llmpq plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from llmpq.cli.common import (
    EXIT_DONE,
    Parser,
    command_line,
    console,
    print_notes,
    run_command,
    tell_written,
)
from llmpq.cli.parser import OptionGroup
from llmpq.cli.progress import TaskProgress
from llmpq.profile.layers import (
    DeviceProfile,
    Profile,
    ProfileOptions,
    devices_to_profile,
    points_left,
)
from llmpq.profile.tables import hop_table, loading_table
from llmpq.remote.session import ray_session
from llmpq.run.monitoring.log_times import about
from llmpq.tables import Fitting, new_table
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import ModelShape, model_config, model_shape
from planner.option_rules import Rule
from planner.options import AUTO
from planner.profiles.design import DesignSpace
from planner.profiles.fit_errors import FitError, all_together, held_out_errors
from quant.common.errors import InputError, SpecError
from quant.common.whole_file import names_a_file
from quant.scheme import BITWIDTHS, DTYPE_BYTES

_RULES = (
    Rule(
        ("threads",),
        "the file says how many threads a CPU has; leave it out",
        beside="cluster",
    ),
    Rule(
        ("threads",),
        "the cluster's devices are measured as they are; leave it out, or state threads in a "
        "--cluster file",
        beside="address",
    ),
)


PROG = "llmpq-profile"

_DESCRIPTION = """
Measure the times of a model's layers, of loading and of links, here or on a cluster, for llmpq plan
--profiles. The same command goes on with what is not measured yet.
"""
_EXAMPLES = (
    "%(prog)s --model /models/opt-30b -o times.csv",
    "%(prog)s --model opt-30b --cluster us.yaml --address auto -o times.csv",
)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = profile_parser(prog).parse(arguments)
    return run_command(prog, lambda: _profile(options))


def _profile(options: argparse.Namespace) -> int:
    target = Path(options.output)
    if not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
    chosen = _options(options)
    shape = model_shape(options.model)
    on_cluster = "cluster" in options or "address" in options
    cluster = _cluster(options)
    devices = devices_to_profile(cluster)
    config = model_config(options.model)
    profile = Profile(target, config, shape, chosen, cluster.own_accelerators)

    from llmpq.profile.links import profile_links  # slow to load, as they need torch and Ray
    from llmpq.profile.loading import LoadProfile

    loads = LoadProfile(target, config, shape, chosen.bits, chosen.dtype)
    with ray_session(getattr(options, "address", None) if on_cluster else "local"):
        done = [_measure(profile, device) for device in devices]
        beside = []
        if not options.layers_only:
            with TaskProgress("measuring loading and hops") as progress:
                loaded = [row for device in devices for row in loads.measure(device, progress.say)]
                hops = profile_links(target, cluster, progress.say)
            beside = [loading_table(loaded), hop_table(hops)]
    for each in done:
        _print(each, shape)
    for table in beside:
        if table.rows:
            console().print(table)
    left = points_left(done)
    if left:
        console().print(f"{left} points remain: the same command goes on with them")
    again = command_line("llmpq", "plan", "--model", options.model, "--profiles", target)
    tell_written(target, f"plan with it: {again} --cluster cluster.yaml")
    return EXIT_DONE


def _measure(profile: Profile, device: Device) -> DeviceProfile:
    """Measure layer times of a device; says before how long that takes."""
    name, points = device.accelerator.name, profile.points(device)
    with TaskProgress(f"{name}: layer times", "points") as progress:
        if points:
            progress.say(f"{name}: {points} points to measure, {about(profile.expected_s(device))}")
        return profile.measure(device, progress.report)


def _options(options: argparse.Namespace) -> ProfileOptions:
    names = ("batch_sizes", "max_length", "prefill_tokens", "decode_tokens")
    given = {name: getattr(options, name) for name in names if name in options}
    if "batch_sizes" in given:
        given["batch_sizes"] = tuple(given["batch_sizes"])
    if "max_length" in given:
        given["min_length"] = min(DesignSpace().min_length, given["max_length"])
    return ProfileOptions(
        bits=tuple(dict.fromkeys(options.bits)),
        dtype=options.dtype,
        points=options.points,
        rounds=options.rounds,
        budget_s=options.budget_s,
        seed=options.seed,
        space=DesignSpace(**given),
    )


def _cluster(options: argparse.Namespace) -> ClusterSpec:
    """The devices of the cluster file or of Ray's address; else those of this machine."""
    from llmpq.detect import detect_cluster, local_node

    if "cluster" in options:
        return print_notes(ClusterSpec.from_yaml(options.cluster))
    if "address" in options:
        return detect_cluster(options.address)
    node = local_node("localhost")
    if "threads" in options:
        if "threads" not in node:
            raise SpecError("--threads is for CPUs, and this machine has a GPU to measure")
        node["threads"] = options.threads
    return ClusterSpec.from_dict({"name": "this-machine", "nodes": [node]}, "--threads")


def _print(profile: DeviceProfile, shape: ModelShape) -> None:
    """Print the fit's error on held-out points, and how much the machine's speed varied."""
    errors = held_out_errors(profile.rows, RooflineLatency(shape), profile.device, profile.dtype)
    threads = profile.device.threads
    title = (
        f"{shape.name} on {profile.device.accelerator.name}, {profile.dtype}"
        + (f", {threads} threads" if threads else "")
        + ": error of the fit on points left out of it"
    )
    console().print(Fitting(title, [lambda: _error_table(errors)]))
    state = profile.state
    if state.measured:
        console().print(
            f"the machine's speed varied by {state.speed_spread:.1%} (interquartile); times are "
            "corrected by it",
            highlight=False,
        )
    if state.too_large:
        console().print(f"{state.too_large} points did not fit into the device's memory")


def _error_table(errors: Sequence[FitError]) -> Table:
    heads = ("bits", "phase", "fitted", "left out", "mean", "95th percentile", "most")
    table = new_table(heads, (1,))
    for each in (*errors, all_together(errors)) if errors else ():
        table.add_row(
            "all" if each.bits is None else str(each.bits),
            each.phase or "",
            str(each.fitted),
            str(len(each.errors)),
            f"{each.mean:.1%}",
            f"{each.percentile_95:.1%}",
            f"{each.most:.1%}",
        )
    return table


def profile_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES, _RULES)
    _add_subject(parser.group("model and devices"))
    _add_output(parser.group("output"))
    _add_points(parser.group("what is measured"))
    _add_effort(parser.group("effort"))
    return parser


def _add_subject(group: OptionGroup) -> None:
    add = group.option
    add(
        "--model",
        required=True,
        metavar="MODEL",
        help="folder, config.json, built-in name (opt-30b) or hub id",
    )
    add("--cluster", metavar="FILE", help="cluster YAML: one Ray task for each kind of device")
    add(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to measure on (default: this machine is measured)",
    )
    add(
        "--threads",
        type=int,
        metavar="COUNT",
        help="threads of a CPU (default: all that this process may use)",
    )


def _add_output(group: OptionGroup) -> None:
    group.option(
        "-o",
        "--output",
        dest="output",
        required=True,
        metavar="FILE",
        help="CSV of layer times to write, with one of loading and one of links beside it; what "
        "the files have already is not measured again",
    )


def _add_points(group: OptionGroup) -> None:
    add, space = group.option, DesignSpace()
    add("--bits", nargs="+", type=int, choices=BITWIDTHS, default=BITWIDTHS, help="bitwidths")
    add("--dtype", choices=(AUTO, *DTYPE_BYTES), default=AUTO, help="type to compute in")
    add(
        "--batch_sizes",
        nargs="+",
        type=int,
        metavar="COUNT",
        help=f"requests of a micro-batch (default: {' '.join(map(str, space.batch_sizes))})",
    )
    add(
        "--max_length",
        type=int,
        metavar="TOKENS",
        help=f"longest prompt and context (default: {space.max_length})",
    )
    add(
        "--prefill_tokens",
        type=int,
        metavar="COUNT",
        help=f"most tokens of a prefill micro-batch (default: {space.prefill_tokens})",
    )
    add(
        "--decode_tokens",
        type=int,
        metavar="COUNT",
        help=f"most tokens a decode micro-batch attends to (default: {space.decode_tokens})",
    )
    add(
        "--layers_only",
        action="store_true",
        help="measure neither loading nor hops between stages",
    )


def _add_effort(group: OptionGroup) -> None:
    add = group.option
    add(
        "--points",
        type=int,
        metavar="COUNT",
        default=16,
        help="workloads for each bitwidth and phase",
    )
    add(
        "--rounds",
        type=int,
        metavar="COUNT",
        default=100,
        help="most passes of each workload; long ones, and those whose times agree, take fewer",
    )
    add(
        "--budget_s",
        type=float,
        metavar="SECONDS",
        default=600.0,
        help="to spend on each device",
    )
    add(
        "--seed",
        type=int,
        metavar="SEED",
        default=0,
        help="of the order, the weights and the inputs",
    )


if __name__ == "__main__":
    raise SystemExit(main())
