"""`llmpq models`: the models whose shapes are built in, and what any other name stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import (
    EXIT_DONE,
    facts_table,
    plain_table,
    print_json,
    print_table,
    run_command,
    with_notes,
)
from llmpq.cli.parser import Parser, made
from planner.cluster.accelerators import registry
from planner.cluster.device import CUDA_CONTEXT_BYTES
from planner.option_rules import argument, flag
from quant.common.units import GIB, KIB, MIB
from quant.scheme import BITWIDTHS, FULL_BITS, HEAD_BITWIDTHS, Processor

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.model.shape import ModelShape

MODELS = "llmpq models"

_MODELS_DESCRIPTION = (
    "List the models whose shapes are built in, so that they are planned for without weights and "
    "without a hub, or show one in full: a built-in name, a folder, a config.json or a hub id."
)
_MODELS_EXAMPLES = ("%(prog)s", "%(prog)s qwen2.5-14b-instruct", "%(prog)s /models/opt-30b --json")

_LISTED_BITS = (16, 8, 4, 3)
"""Those for which the list has room; `llmpq models NAME` tells of all."""

_MODEL_HEADS = (
    "model",
    "B",
    "active",
    *(f"{bits}bit" for bits in _LISTED_BITS),
    "on GPUs of",
    "tokens",
)

_USUAL_GPU = Processor(compute_capability=(8, 0))
_DTYPE = "bfloat16"

_REQUEST_TOKENS = 4096
"""Of the one request for which a GPU has room in the list of models."""

_MODEL_NOTES = (
    "B: 10^9 parameters; active: all but those of experts that a token does not ask. 16 to 3 bit: "
    "GiB of all weights, with every decoder layer at these bits by the kernels of a usual GPU; "
    "embeddings, norms and head stay in 16 bit. on GPUs of: so many GiB hold them, at each of "
    "these bits, and a request of 4096 tokens; -: several do, as `llmpq plan` divides it. tokens: "
    "the longest prompt with its answer.",
    "`llmpq models NAME` shows one in full. Any other model of these families is planned by its "
    "folder, its config.json or its hub id: {families}.",
)


@dataclass(frozen=True)
class ModelsCommand:
    model: str | None = argument(
        "MODEL", "a name, a folder, a config.json or a hub id", more={"nargs": "?"}
    )
    json: bool = flag("as JSON, sizes in bytes")


def models_main(arguments: Sequence[str] | None = None, prog: str = MODELS) -> int:
    options = made(ModelsCommand, models_parser(prog).parse(arguments))
    return run_command(prog, partial(_show_models, options))


def models_parser(prog: str | None = MODELS) -> Parser:
    parser = Parser(prog, _MODELS_DESCRIPTION, _MODELS_EXAMPLES)
    parser.declare({"what is shown": "model json"}, ModelsCommand)
    return parser


def _show_models(options: ModelsCommand) -> int:
    from planner.model.finding import builtin_names, model_shape

    name = options.model
    if name is not None:
        shape = model_shape(name)
        if options.json:
            print_json(_model_json(shape, name))
        else:
            print_table(facts_table(_model_facts(shape, name)))
        return EXIT_DONE
    shapes = [(model_shape(each), each) for each in builtin_names()]
    if options.json:
        print_json([_model_json(*each) for each in shapes])
    else:
        print_table(_model_table([shape for shape, _ in shapes]))
    return EXIT_DONE


def weight_bytes(shape: ModelShape, bits: int) -> int:
    """Bytes of a model's weights, layers at `bits` on a usual GPU; a tied head counts once."""
    from planner.costs.stored_bytes import packed_bytes

    packed = shape.over_layers(lambda kind: packed_bytes(kind, bits, _USUAL_GPU, _DTYPE))
    linears = shape.over_layers(lambda kind: kind.layer_linear_parameters)
    return packed + 2 * (shape.total_parameters - linears)


def head_bytes(shape: ModelShape, bits: int) -> int:
    """Bytes of embedding and LM head at `bits` on one usual GPU."""
    from planner.costs import stored_bytes

    coded = shape.with_all(head_bits=bits)
    embedding = stored_bytes.embedding_bytes(coded, _DTYPE, _USUAL_GPU, with_head=True)
    return embedding + stored_bytes.head_bytes(coded, _DTYPE, _USUAL_GPU, on_first=True)


def least_gpu_gib(shape: ModelShape, bits: int) -> int | None:
    """GiB of the smallest GPUs that all hold the model at `bits` and one request; None: no one."""
    needed = weight_bytes(shape, bits) + _REQUEST_TOKENS * _kv_bytes(shape) + _state_bytes(shape)
    usable = dict[int, int]()
    for each in registry():
        if not each.is_cpu:
            size = round(each.nominal_memory_bytes / GIB)
            held = each.usable_memory_bytes - CUDA_CONTEXT_BYTES
            usable[size] = min(held, usable.get(size, held))
    return min((size for size, held in usable.items() if held >= needed), default=None)


def _model_json(shape: ModelShape, name: str) -> dict[str, Any]:
    from planner.model.finding import names_of_builtin

    return {
        "name": name,
        "names": list(names_of_builtin(name)),
        "family": shape.model_type,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_positions": shape.max_positions,
        "sliding_window": shape.sliding_window,
        "tied_embeddings": shape.tied_embeddings,
        "parameters": shape.total_parameters,
        "active_parameters": shape.active_parameters,
        "kinds": [
            _kind_json(*each) for each in zip(shape.kind_shapes, shape.kind_counts, strict=True)
        ],
        "stored_bits": None if shape.stored is None else shape.stored.bits,
        "weight_bytes": {str(bits): weight_bytes(shape, bits) for bits in reversed(BITWIDTHS)},
        "head_bytes": {str(bits): head_bytes(shape, bits) for bits in reversed(HEAD_BITWIDTHS)},
        "gpu_gib": {str(bits): least_gpu_gib(shape, bits) for bits in reversed(BITWIDTHS)},
        "kv_bytes_per_token": _kv_bytes(shape),
        "state_bytes_per_request": _state_bytes(shape),
    }


def _kind_json(kind: ModelShape, layers: int) -> dict[str, Any]:
    experts = kind.experts
    return {
        "kind": kind.kind or None,
        "stored_bits": None if kind.stored is None else kind.stored.bits,
        "layers": layers,
        "parameters": kind.layer_linear_parameters + kind.layer_other_parameters,
        "sliding_window": kind.sliding_window,
        "kv_bytes_per_token": 2 * kind.kv_elements,
        "state_bytes_per_request": kind.state_bytes(2),
        "experts": None if experts is None else experts.count,
        "experts_per_token": None if experts is None else experts.per_token,
    }


def _kv_bytes(shape: ModelShape) -> int:
    return shape.over_layers(lambda kind: 2 * kind.kv_elements)


def _state_bytes(shape: ModelShape) -> int:
    return shape.over_layers(lambda kind: kind.state_bytes(2))


def _model_table(shapes: Iterable[ModelShape]) -> RenderableType:
    """A row for each model, below one that names its family."""
    from planner.model.families import supported_model_types

    table = plain_table(_MODEL_HEADS, left=("model",), gap=1)
    family = None
    for shape in shapes:
        if shape.model_type != family:
            family = shape.model_type
            table.add_row(f"{family}")
        sizes = (least_gpu_gib(shape, bits) for bits in _LISTED_BITS)
        is_sparse = shape.active_parameters < shape.total_parameters
        table.add_row(
            f"  {shape.name}",
            _short(shape.total_parameters / 1e9),
            _short(shape.active_parameters / 1e9) if is_sparse else "",
            *(_short(weight_bytes(shape, bits) / GIB) for bits in _LISTED_BITS),
            " ".join("-" if size is None else str(size) for size in sizes),
            f"{shape.max_positions / KIB:g}K",
        )
    families = ", ".join(supported_model_types())
    return with_notes(table, *(note.format(families=families) for note in _MODEL_NOTES))


def _short(amount: float) -> str:
    """Three digits or so."""
    decimals = 0 if amount >= 100 else 1 if amount >= 10 else 2 if amount >= 0.01 else 4
    return f"{amount:.{decimals}f}"


def _model_facts(shape: ModelShape, name: str) -> Iterable[tuple[str, str]]:
    from planner.model.finding import names_of_builtin
    from planner.model.stored_bits import stored_words

    yield "model", shape.name
    names = [each for each in names_of_builtin(name) if each.lower() != name.lower()]
    yield "same shape as", ", ".join(names)
    yield "family", shape.model_type
    yield from _layer_facts(shape)
    active = _short(shape.active_parameters / 1e9)
    asked = f", {active} a token" if shape.active_parameters < shape.total_parameters else ""
    yield "parameters", f"{_short(shape.total_parameters / 1e9)} billion{asked}"
    yield "widths", f"{shape.hidden_size} hidden, {shape.intermediate_size} in the MLP"
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys and values"
    yield "attention", heads
    window = shape.sliding_window
    yield "looks back", "" if window is None else f"{window} tokens"
    tied = "tied to the head" if shape.tied_embeddings else "beside a head of its own"
    yield "vocabulary", f"{shape.vocab_size}, {tied}"
    yield "positions", f"{shape.max_positions}{' (no limit: ALiBi)' if shape.alibi else ''}"
    stored = stored_words(shape)
    yield "stored as", stored
    for bits in reversed(BITWIDTHS):
        full = " (as published)" if bits == FULL_BITS and not stored else ""
        size = least_gpu_gib(shape, bits)
        on = "" if size is None else f", on GPUs of {size} GiB"
        yield f"{bits} bit", f"{_short(weight_bytes(shape, bits) / GIB)} GiB of weights{full}{on}"
    full, *fewer = (f"{_short(head_bytes(shape, b) / GIB)}" for b in reversed(HEAD_BITWIDTHS))
    coded = (f"{size} in {b}" for size, b in zip(fewer, reversed(HEAD_BITWIDTHS[:-1]), strict=True))
    yield "of which", f"{full} GiB of embedding and LM head; {', '.join(coded)} bit"
    yield "KV cache", f"{_kv_bytes(shape) / KIB:.4g} KiB a token in 16 bit"
    state = _state_bytes(shape)
    yield "states", f"{state / MIB:.4g} MiB a request" if state else ""


def _layer_facts(shape: ModelShape) -> Iterable[tuple[str, str]]:
    kinds = list(zip(shape.kind_shapes, shape.kind_counts, strict=True))
    for index, (kind, count) in enumerate(kinds):
        parameters = kind.layer_linear_parameters + kind.layer_other_parameters
        words = f"{count} of {parameters / 1e6:.4g} million parameters"
        words += f", {kind.kind.replace('_', ' ')}" if kind.kind else ""
        if kind.stored is not None and shape.kinds:
            words += f", stored with {kind.stored.bits} bits"
        if kind.sliding_window is not None and shape.kinds:
            words += f", over {kind.sliding_window} tokens"
        if kind.experts is not None:
            words += (
                f", {kind.experts.count} experts of which a token asks {kind.experts.per_token}"
            )
        yield ("layers" if index == 0 else ""), words
