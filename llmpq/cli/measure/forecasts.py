"""`llmpq profile` and `llmpq lengths`: layer times and output lengths, as plans forecast them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from llmpq.cli.common import (
    EXIT_DONE,
    command_line,
    console,
    print_notes,
    run_command,
    target_file,
    tell_written,
    write_json,
)
from llmpq.cli.measure.forecast_options import (
    LENGTHS,
    PROFILE,
    JudgeCommand,
    LengthsCommand,
    ProfileCommand,
    TrainCommand,
    lengths_parser,
    profile_parser,
)
from llmpq.cli.parser import made, taken
from llmpq.cli.terminal import TaskProgress
from llmpq.lengths.predictor import Agreement
from llmpq.lengths.training import Judgement, ServedIds, TrainingOptions, judge, train
from llmpq.model_check import checked_shape
from llmpq.profile.layers import Profile, TimedKind, devices_to_profile
from llmpq.profile.tables import hop_table, loading_table, parts_table, sum_table
from llmpq.remote.session import ray_session
from llmpq.report.layout import Fitting, new_table
from llmpq.run.display import about
from planner.cluster.device import Device
from planner.cluster.spec import ClusterSpec
from planner.costs.roofline import RooflineLatency
from planner.model.finding import model_config, model_shape
from planner.profiles.design import DesignSpace, ProfileOptions
from planner.profiles.fit import FitError, all_together, held_out_errors
from quant.checkpoint.model_reference import resolve
from quant.common.errors import SpecError

if TYPE_CHECKING:
    from actors.profiling.task import ProfileState
    from llmpq.lengths.finished_rows import LearntRow
    from planner.profiles.rows import ProfileRow


def profile_main(arguments: Sequence[str] | None = None, prog: str = PROFILE) -> int:
    given = profile_parser(prog).parse(arguments)
    return run_command(prog, lambda: _profile(made(ProfileCommand, given), _profile_options(given)))


def _profile(options: ProfileCommand, chosen: ProfileOptions) -> int:
    target = target_file(options.output)
    shape = model_shape(options.model)
    on_cluster = options.cluster is not None or options.address is not None
    cluster = _profiled_cluster(options)
    devices = devices_to_profile(cluster)
    config = model_config(options.model)
    profile = Profile(target, config, shape, chosen, cluster.own_accelerators)

    # slow to load, as they need torch and Ray
    from llmpq.profile.transfers import profile_links, profile_loading, profile_sums

    with ray_session(options.address if on_cluster else "local"):
        done = [_measure_layers(profile, device) for device in devices]
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
    for device, (rows_of_kinds, states) in zip(devices, done, strict=True):
        dtype = device.compute_dtype(chosen.dtype)
        for kind, rows, state in zip(profile.kinds, rows_of_kinds, states, strict=True):
            _print_profile(kind, device, dtype, rows, state)
        if any(kind.shape.experts for kind in profile.kinds):
            console().print(_EVEN_EXPERTS)
    for table in beside:
        if table.rows:
            console().print(table)
    left = sum(state.left for _, states in done for state in states)  # no budget was left for them
    if left:
        console().print(f"{left} points remain: the same command goes on with them")
    again = command_line("llmpq", "plan", "--model", options.model, "--profiles", target)
    tell_written(target, f"plan with it: {again} --cluster cluster.yaml")
    return EXIT_DONE


_EVEN_EXPERTS = (
    "experts were asked about evenly, by random inputs and a router of random weights; text that "
    "asks some more than others reads fewer of them"
)


def _measure_layers(
    profile: Profile, device: Device
) -> tuple[list[tuple[ProfileRow, ...]], list[ProfileState]]:
    """Measure layer times of a device; says before how long that takes."""
    from actors.profiling.on_cluster import measure_on_cluster

    name, points = device.accelerator.name, profile.points(device)
    with TaskProgress(f"{name}: layer times", "points") as progress:
        if points:
            beside = device.neighbours
            busy = f", while {beside} more of its node do the same" if beside else ""
            how_long = about(profile.expected_s(device))
            progress.say(f"{name}: {points} points to measure{busy}, {how_long}")
        return profile.measure(device, progress.report, measure_on_cluster)


def _profile_options(given: argparse.Namespace) -> ProfileOptions:
    space = taken(DesignSpace, given)
    if "batch_sizes" in space:
        space["batch_sizes"] = tuple(space["batch_sizes"])
    if "max_length" in space:
        space["min_length"] = min(DesignSpace.min_length, space["max_length"])
    chosen = taken(ProfileOptions, given)
    if "bits" in chosen:
        chosen["bits"] = tuple(dict.fromkeys(chosen["bits"]))
    return ProfileOptions(**chosen, space=DesignSpace(**space))


def _profiled_cluster(options: ProfileCommand) -> ClusterSpec:
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


def _print_profile(
    kind: TimedKind, device: Device, dtype: str, rows: Sequence[ProfileRow], state: ProfileState
) -> None:
    """Print the fit's error on held-out points, the parts of layers, and how much speed varied."""
    if kind.is_head:
        return  # a few rows, of no parts
    errors = held_out_errors(rows, RooflineLatency(kind.shape), device, dtype)
    title = (
        f"{kind.title} on {device.accelerator.name}, {dtype}"
        + (f", {device.threads} threads" if device.threads else "")
        + ": error of the fit on points left out of it"
    )
    console().print(Fitting(title, [lambda: _error_table(errors)]))
    parts = parts_table(rows)
    if parts.rows:
        console().print(parts)
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


def lengths_main(arguments: Sequence[str] | None = None, prog: str = LENGTHS) -> int:
    given = lengths_parser(prog).parse(arguments)
    if given.command == "train":
        return run_command(
            prog, lambda: _train(made(TrainCommand, given), taken(TrainingOptions, given))
        )
    return run_command(prog, lambda: _judge(made(JudgeCommand, given)))


def _train(options: TrainCommand, training: Mapping[str, Any]) -> int:
    from llmpq.lengths.folder import check_target, save_predictor

    target, figures = Path(options.output).expanduser(), _json_file(options)
    check_target(target, options.overwrite)
    chosen = TrainingOptions(**training)
    _quiet()
    rows, ids = _rows(options)
    with TaskProgress(f"training on {len(rows)} rows"):
        model, judgement = train(rows, chosen, ids)
    save_predictor(target, model, judgement.confusion, options.overwrite)
    console().print(
        _judgement_table(judgement, f"{model.kind}, {model.trained_rows} rows learnt from")
    )
    console().print(_confusion_shown(judgement, model.buckets))
    if judgement.predictor.accuracy <= judgement.majority.accuracy:
        console().print(
            "It is right no more often than the most frequent bucket alone: give it more rows, or "
            "the answers do not depend on what it reads.",
            soft_wrap=True,
        )
    _write_json(figures, judgement, model.buckets)
    words = ("--input", "prompts.jsonl", "--policy", "s3", "--predictor", target)
    tell_written(target, f"plan with it: {command_line('llmpq', 'plan', *words)}")
    return EXIT_DONE


def _judge(options: JudgeCommand) -> int:
    from llmpq.lengths.folder import check_tokenizer, load_predictor
    from planner.assumed_predictor import predictor_file

    folder, figures = Path(options.predictor).expanduser(), _json_file(options)
    file = predictor_file(folder)
    _quiet()
    rows, ids = _rows(options)
    if ids is not None:
        check_tokenizer(file, folder, ids[0], options.model or "")
    elif file.tokenizer is not None:
        raise SpecError(
            f"the predictor in {folder} reads token ids; name the model whose tokenizer makes "
            "them: --model"
        )
    model = load_predictor(folder)
    with TaskProgress(f"judging by {len(rows)} rows"):
        judgement = judge(model, rows)
    console().print(_judgement_table(judgement, f"{model.kind} in {folder}"))
    console().print(_confusion_shown(judgement, model.buckets))
    _write_json(figures, judgement, model.buckets)
    return EXIT_DONE


def _rows(options: LengthsCommand) -> tuple[list[LearntRow], ServedIds | None]:
    """The finished rows as a predictor sees them, and the ids that they have."""
    from llmpq.lengths.finished_rows import as_prompts, read_finished
    from llmpq.lengths.folder import tokenizer_digest

    model, prompting = options.model, options.prompting
    finished = read_finished(options.input, options.lengths)
    if model is None:
        return as_prompts(finished, None), None
    folder = resolve(model, weights=False)
    vocab_size = checked_shape(folder).vocab_size
    ids = tokenizer_digest(folder, vocab_size), vocab_size
    return as_prompts(finished, folder, prompting), ids


def _quiet() -> None:
    """Keep the progress bars of transformers out of the output, if it is going to be loaded."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _judgement_table(judgement: Judgement, what: str) -> Fitting:
    found = judgement.predictor
    heads = ["accuracy", "too\nshort", "buckets\noff", "calibration\nerror", "ms a\nprompt"]
    table = new_table(["predictor", *heads])
    table.add_row("this one", *_agreement(found), f"{judgement.ms_per_prompt:.2f}")
    table.add_row("the most frequent bucket", *_agreement(judgement.majority), "")
    table.add_row("the longest answer", *_agreement(judgement.longest), "")
    return Fitting(f"{what}; {found.rows} rows held against", [lambda: table])


def _agreement(found: Agreement) -> tuple[str, ...]:
    distance, error = found.wrong_distance, found.calibration_error
    return (
        f"{found.accuracy:.1%}",
        f"{found.too_short:.1%}",
        "-" if distance is None else f"{distance:.2f}",
        "" if error is None else f"{error:.3f}",
    )


def _confusion_shown(judgement: Judgement, buckets: Sequence[int]) -> Fitting:
    """Rows by true and by predicted bucket: a matrix, or lists where that is too wide."""
    rows = list(zip(buckets, judgement.confusion.tolist(), strict=True))

    def matrix() -> Table:
        table = new_table(["tokens", *map(str, buckets)], ())
        for most, row in rows:
            table.add_row(str(most), *(str(count) if count else "·" for count in row))
        return table

    def lists() -> Table:
        table = new_table(["tokens", "rows by predicted bucket"], (1,))
        for most, row in rows:
            counts = zip(buckets, row, strict=True)
            table.add_row(str(most), ", ".join(f"{n} by {which}" for which, n in counts if n))
        return table

    title = "rows by true bucket (first column, up to so many tokens) and by predicted one"
    return Fitting(title, [matrix, lists])


def _json_file(options: LengthsCommand) -> Path | None:
    return None if options.json is None else target_file(options.json)


def _write_json(path: Path | None, judgement: Judgement, buckets: Sequence[int]) -> None:
    if path is not None:
        more = {"buckets": list(buckets), "confusion": judgement.confusion.tolist()}
        write_json(path, dataclasses.asdict(judgement) | more)
