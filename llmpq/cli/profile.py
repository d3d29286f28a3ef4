"""`llmpq profile`: measure times of a decoder layer here or on a cluster, for `llmpq plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from llmpq.cli.common import (
    EXIT_DONE,
    command_line,
    console,
    print_notes,
    run_command,
    tell_written,
)
from llmpq.cli.measure_options import PROFILE, ProfileCommand, profile_parser
from llmpq.cli.parser import made, taken
from llmpq.cli.terminal import TaskProgress
from llmpq.profile.layers import (
    DeviceProfile,
    Profile,
    devices_to_profile,
    points_left,
)
from llmpq.profile.tables import hop_table, loading_table, parts_table, sum_table
from llmpq.remote.session import ray_session
from llmpq.report.layout import Fitting, new_table
from llmpq.run.run_progress import about
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_config, model_shape
from planner.model.shape import ModelShape
from planner.profiles.design import DesignSpace, ProfileOptions
from planner.profiles.fit import FitError, all_together, held_out_errors
from quant.common.errors import InputError, SpecError
from quant.common.files import names_a_file


def main(arguments: Sequence[str] | None = None, prog: str = PROFILE) -> int:
    """Entry point; returns the exit code."""
    given = profile_parser(prog).parse(arguments)
    return run_command(prog, lambda: _profile(made(ProfileCommand, given), _options(given)))


def _profile(options: ProfileCommand, chosen: ProfileOptions) -> int:
    target = Path(options.output)
    if not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
    shape = model_shape(options.model)
    on_cluster = options.cluster is not None or options.address is not None
    cluster = _cluster(options)
    devices = devices_to_profile(cluster)
    config = model_config(options.model)
    profile = Profile(target, config, shape, chosen, cluster.own_accelerators)

    # slow to load, as they need torch and Ray
    from llmpq.profile.transfers import profile_links, profile_loading, profile_sums

    with ray_session(options.address if on_cluster else "local"):
        done = [_measure(profile, device) for device in devices]
        beside = []
        if not options.layers_only:
            with TaskProgress("measuring loading, hops and sums") as progress:
                loaded = [
                    row
                    for device in devices
                    for row in profile_loading(target, config, shape, chosen, device, progress.say)
                ]
                hops = profile_links(target, cluster, progress.say)
                sums = profile_sums(target, cluster, progress.say)
            beside = [loading_table(loaded), hop_table(hops), sum_table(sums)]
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


def _options(given: argparse.Namespace) -> ProfileOptions:
    space = taken(DesignSpace, given)
    if "batch_sizes" in space:
        space["batch_sizes"] = tuple(space["batch_sizes"])
    if "max_length" in space:
        space["min_length"] = min(DesignSpace.min_length, space["max_length"])
    chosen = taken(ProfileOptions, given)
    if "bits" in chosen:
        chosen["bits"] = tuple(dict.fromkeys(chosen["bits"]))
    return ProfileOptions(**chosen, space=DesignSpace(**space))


def _cluster(options: ProfileCommand) -> ClusterSpec:
    """The devices of the cluster file or of Ray's address; else those of this machine."""
    from llmpq.detect import detect_cluster, local_node

    if options.cluster is not None:
        return print_notes(ClusterSpec.from_yaml(options.cluster))
    if options.address is not None:
        return detect_cluster(options.address)
    node = local_node("localhost")
    if options.threads is not None:
        if "threads" not in node:
            raise SpecError("--threads is for CPUs, and this machine has a GPU to measure")
        node["threads"] = options.threads
    return ClusterSpec.from_dict({"name": "this-machine", "nodes": [node]}, "--threads")


def _print(profile: DeviceProfile, shape: ModelShape) -> None:
    """Print the fit's error on held-out points, attention beside the rest of layers, and how much
    the machine's speed varied.
    """
    errors = held_out_errors(profile.rows, RooflineLatency(shape), profile.device, profile.dtype)
    threads = profile.device.threads
    title = (
        f"{shape.name} on {profile.device.accelerator.name}, {profile.dtype}"
        + (f", {threads} threads" if threads else "")
        + ": error of the fit on points left out of it"
    )
    console().print(Fitting(title, [lambda: _error_table(errors)]))
    parts = parts_table(profile.rows)
    if parts.rows:
        console().print(parts)
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


if __name__ == "__main__":
    raise SystemExit(main())
