"""What `llmpq plan` does with a bound on the latency of requests: their lengths, and the front."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmpq.cli.common import EXIT_DONE, console
from llmpq.cli.options.prompting import asked_prompting, given_prompting
from llmpq.cli.plan_files import (
    PageOfRefusal,
    searching,
    show_stages,
    write_files,
    write_latency_front_file,
)
from llmpq.cli.progress import TaskProgress
from llmpq.cluster import Cluster
from llmpq.tables import latency_front_table
from llmpq.tokenizing.requests import tokenizer_checked
from llmpq.workload.defaults import DEFAULT_WORKLOAD
from llmpq.workload.input_job import job_of_input
from llmpq.workload.request_lengths import (
    Requests,
    normal_lengths,
    request_lengths,
    requests_of,
    same_lengths,
)
from planner.latency_bound.front import KindFronts
from planner.length_distribution import LengthDistribution, RequestLengths
from quant.common.errors import SpecError


def plan_bounded(
    options: argparse.Namespace,
    cluster: Cluster,
    model: str,
    given: Mapping[str, Any],
    command: Sequence[str],
) -> int:
    """Plan under a bound on the latency of requests, or trace throughput over such bounds; print
    and write what was asked for.
    """
    prompting = asked_prompting(options)
    with TaskProgress("measuring the prompts"):
        requests = requests_asked(options, model)
    page = PageOfRefusal(options, cluster, model, requests, command)
    fronts: KindFronts | None = None
    if "pareto" in options:
        with tokenizer_checked(model, prompting), page, searching(given, "the front"):
            fronts = cluster.latency_front(model, requests, **given)
        write_latency_front_file(options, fronts)
        if "report" not in options:
            return _show_front(options, fronts)
    with tokenizer_checked(model, prompting), page, searching(given, "a plan"):
        plan = cluster.plan(model, requests, **given)
    if options.json:
        sys.stdout.write(plan.spec.to_json())
    else:
        show_stages(options, plan)
        if fronts is not None:
            console().print(latency_front_table(fronts))
    write_files(options, plan, () if fronts is None else fronts, command)
    return EXIT_DONE


def _show_front(options: argparse.Namespace, fronts: KindFronts) -> int:
    """Print the front as a table or as JSON."""
    if options.json:
        sys.stdout.write(fronts.to_json())
    else:
        console().print(latency_front_table(fronts))
    return EXIT_DONE


def requests_asked(options: argparse.Namespace, model: str) -> Requests:
    """The requests that the options name: of an input, of a file of lengths, or by distributions.

    Notes on rows that are not planned for are printed.
    """
    found = _requests(options, model)
    for note in found.notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    return found


def _requests(options: argparse.Namespace, model: str) -> Requests:
    new_tokens = getattr(options, "new_tokens", None)
    lengths, prompts = getattr(options, "lengths", None), getattr(options, "prompts", None)
    if "input" in options:
        prompt_length = getattr(options, "prompt_length", None)
        job = job_of_input(
            options.input,
            model,
            new_tokens,
            prompt_length,
            lengths=lengths,
            **given_prompting(options),
        )
        found = requests_of(job)
        if "output_lengths" not in options:
            return found
        outputs = normal_lengths("output_lengths", options.output_lengths)
        return replace(found, lengths=RequestLengths(found.lengths.prompts, outputs))
    if lengths is not None:
        return Requests(request_lengths(lengths, new_tokens), prompts, new_tokens)
    return Requests(
        RequestLengths(
            _distribution(options, "prompt_lengths", "prompt_length"),
            _distribution(options, "output_lengths", "new_tokens"),
        ),
        prompts,
        new_tokens,
    )


def _distribution(options: argparse.Namespace, normal: str, alike: str) -> LengthDistribution:
    """A normal distribution, or lengths that are all alike; of a job those of any job."""
    if normal in options:
        return normal_lengths(normal, getattr(options, normal))
    if alike in options:
        return same_lengths(getattr(options, alike))
    if "prompts" in options:
        return same_lengths(DEFAULT_WORKLOAD[alike])
    raise SpecError(
        "max_request_latency_s needs the lengths of requests: give --lengths FILE (a CSV "
        "prompt_tokens,output_tokens), --input PATH, or --prompt_lengths MEAN STD MAX with "
        "--output_lengths MEAN STD MAX"
    )
