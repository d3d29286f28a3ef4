"""What `llmpq plan` plans: the model, the cluster, and the batch, the job or the requests."""

from __future__ import annotations

from dataclasses import replace

from llmpq.cli.common import print_notes, tell_notes
from llmpq.cli.plan_options import PlanCommand
from llmpq.cluster import Cluster
from llmpq.workload import DEFAULT_WORKLOAD, SEPARATE
from llmpq.workload.input_job import (
    InputBatch,
    InputJob,
    batch_of_input,
    job_of_input,
    job_of_prompts,
)
from llmpq.workload.long_rows import LongRowRule
from llmpq.workload.request_lengths import (
    Requests,
    normal_lengths,
    request_lengths,
    requests_of,
    same_lengths,
)
from planner.cluster.spec import ClusterSpec
from planner.lengths import LengthDistribution, RequestLengths
from planner.workload import Job, Workload
from quant.common.errors import SpecError


def asked_model(options: PlanCommand) -> str:
    """The model by its name, folder or hub id; raises `SpecError` unless it is named once."""
    if (options.model is None) == (options.model_name is None):
        raise SpecError("name the model once: --model, or --model_name with --model_size")
    if options.model is not None:
        return options.model
    size = "" if options.model_size is None else f"-{options.model_size}"
    return f"{options.model_name}{size}"


def asked_cluster(options: PlanCommand) -> Cluster:
    """The cluster of a file, of counts, or as it is found here or on Ray."""
    names, numbers = options.device_names, options.device_numbers
    by_counts = names is not None or numbers is not None
    if options.cluster is not None:
        if by_counts:
            raise SpecError(
                "describe the cluster once: --cluster, or --device_names and --device_numbers"
            )
        return Cluster(print_notes(ClusterSpec.from_yaml(options.cluster)))
    if not by_counts:
        from llmpq.detect import detect_cluster

        return Cluster(print_notes(detect_cluster(options.address)))
    if names is None or numbers is None:
        raise SpecError("--device_names and --device_numbers go together, one number for each name")
    return Cluster(print_notes(ClusterSpec.from_counts(names, numbers)))


def asked_workload(options: PlanCommand, model: str) -> Workload | Job | InputJob | InputBatch:
    """One batch, as in the paper, or a job; notes on rows that are not planned for are printed."""
    named = {name: getattr(options, name) for name in DEFAULT_WORKLOAD}
    given = {name: value for name, value in named.items() if value is not None}
    if options.prompts is not None:
        return job_of_prompts(
            options.prompts, options.prompt_length, options.new_tokens, options.lengths
        )
    if options.input is None:
        return Workload(**{**DEFAULT_WORKLOAD, **given})
    rule = LongRowRule(options.long_rows or SEPARATE, options.percentile)
    found: InputJob | InputBatch
    if options.global_batch is not None:
        found = batch_of_input(options.input, model, given, rule.percentile, options.prompting)
    else:
        found = job_of_input(
            options.input,
            model,
            options.new_tokens,
            options.prompt_length,
            rule,
            options.lengths,
            **options.given_prompting,
        )
    tell_notes(found.notes)
    return found


def asked_requests(options: PlanCommand, model: str) -> Requests:
    """The requests that the options name: of an input, of a file of lengths, or by distributions.

    Notes on rows that are not planned for are printed.
    """
    found = _requests(options, model)
    tell_notes(found.notes)
    return found


def _requests(options: PlanCommand, model: str) -> Requests:
    new_tokens, lengths = options.new_tokens, options.lengths
    if options.input is not None:
        job = job_of_input(
            options.input,
            model,
            new_tokens,
            options.prompt_length,
            lengths=lengths,
            **options.given_prompting,
        )
        found = requests_of(job)
        if options.output_lengths is None:
            return found
        outputs = normal_lengths("output_lengths", options.output_lengths)
        return replace(found, lengths=replace(found.lengths, outputs=outputs, correlation=0.0))
    if lengths is not None:
        return Requests(request_lengths(lengths, new_tokens), options.prompts, new_tokens)
    return Requests(
        RequestLengths(
            _distribution(options, "prompt_lengths", "prompt_length"),
            _distribution(options, "output_lengths", "new_tokens"),
        ),
        options.prompts,
        new_tokens,
    )


def _distribution(options: PlanCommand, normal: str, alike: str) -> LengthDistribution:
    """A normal distribution, or lengths that are all alike; of a job those of any job."""
    drawn, same = getattr(options, normal), getattr(options, alike)
    if drawn is not None:
        return normal_lengths(normal, drawn)
    if same is not None:
        return same_lengths(same)
    if options.prompts is not None:
        return same_lengths(DEFAULT_WORKLOAD[alike])
    raise SpecError(
        "max_request_latency_s needs the lengths of requests: give --lengths FILE (a CSV "
        "prompt_tokens,output_tokens), --input PATH, or --prompt_lengths MEAN STD MAX with "
        "--output_lengths MEAN STD MAX"
    )
