"""`llmpq models`: the models that are built in, or one in full, also of a folder or a hub id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
from planner.model.families import supported_model_types
from planner.model.finding import builtin_names, model_shape, names_of_builtin
from planner.model.shape import ModelShape
from planner.option_rules import argument, flag
from quant.backends.selection import rule_for
from quant.common.units import GIB, KIB
from quant.scheme import BITWIDTHS, FULL_BITS, Processor

if TYPE_CHECKING:
    from rich.console import RenderableType

PROG = "llmpq models"

_DESCRIPTION = (
    "List the models whose shapes are built in, so that they are planned for without weights and "
    "without a hub, or show one in full: a built-in name, a folder, a config.json or a hub id."
)
_EXAMPLES = ("%(prog)s", "%(prog)s qwen2.5-14b-instruct", "%(prog)s /models/opt-30b --json")

_HEADS = (
    "model",
    "family",
    "layers",
    "hidden",
    "B",
    *(f"{bits} bit" for bits in reversed(BITWIDTHS)),
    "tokens",
)

_USUAL_GPU = Processor(compute_capability=(8, 0))
_DTYPE = "bfloat16"

_NOTES = (
    "B: 10^9 parameters. 16 to 3 bit: GiB of all weights, with every decoder layer at these bits "
    "by the kernels of a usual GPU; embeddings, norms and head stay in 16 bit. tokens: the longest "
    "prompt with its answer.",
    "`llmpq models NAME` shows one in full. Any other model of these families is planned by its "
    "folder, its config.json or its hub id: {families}.",
)


@dataclass(frozen=True)
class ModelsCommand:
    """Which models are shown, and how."""

    model: str | None = argument(
        "MODEL", "a name, a folder, a config.json or a hub id", more={"nargs": "?"}
    )
    json: bool = flag("as JSON, sizes in bytes")


def main(arguments: Iterable[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    given = None if arguments is None else list(arguments)
    options = made(ModelsCommand, models_parser(prog).parse(given))
    return run_command(prog, lambda: _show(options))


def models_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
    parser.declare({"what is shown": "model json"}, ModelsCommand)
    return parser


def _show(options: ModelsCommand) -> int:
    name = options.model
    if name is not None:
        shape = model_shape(name)
        if options.json:
            print_json(_as_json(shape, name))
        else:
            print_table(facts_table(_facts(shape, name)))
        return EXIT_DONE
    shapes = [(model_shape(each), each) for each in builtin_names()]
    if options.json:
        print_json([_as_json(*each) for each in shapes])
    else:
        print_table(_overview([shape for shape, _ in shapes]))
    return EXIT_DONE


def weight_bytes(shape: ModelShape, bits: int) -> int:
    """The bytes of a model's weights with all decoder layers at `bits` on a usual GPU; those of a
    tied head count once.
    """
    linears = shape.layer_linears()
    rules = [(rule_for(_USUAL_GPU, bits, linear, _DTYPE), linear) for linear in linears]
    layer = sum(rule.nbytes(linear, _DTYPE) for rule, linear in rules)
    others = shape.total_parameters - shape.layers * shape.layer_linear_parameters
    return shape.layers * layer + 2 * others


def _as_json(shape: ModelShape, name: str) -> dict[str, Any]:
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
        "stored_bits": None if shape.stored is None else shape.stored.bits,
        "weight_bytes": {str(bits): weight_bytes(shape, bits) for bits in reversed(BITWIDTHS)},
        "kv_bytes_per_token": _kv_bytes(shape),
    }


def _kv_bytes(shape: ModelShape) -> int:
    """The bytes of a token's keys and values in all layers, in 16 bit."""
    return 2 * 2 * shape.kv_width * shape.layers


def _overview(shapes: Iterable[ModelShape]) -> RenderableType:
    table = plain_table(_HEADS, left=("model", "family"), gap=1)
    for shape in shapes:
        table.add_row(*_cells(shape))
    families = ", ".join(supported_model_types())
    return with_notes(table, *(note.format(families=families) for note in _NOTES))


def _cells(shape: ModelShape) -> tuple[str, ...]:
    return (
        shape.name,
        shape.model_type,
        str(shape.layers),
        str(shape.hidden_size),
        _billions(shape),
        *(_gib(weight_bytes(shape, bits)) for bits in reversed(BITWIDTHS)),
        f"{shape.max_positions / KIB:g}K",
    )


def _billions(shape: ModelShape) -> str:
    return _short(shape.total_parameters / 1e9)


def _gib(amount: int) -> str:
    return _short(amount / GIB)


def _short(amount: float) -> str:
    """Three digits or so."""
    decimals = 0 if amount >= 100 else 1 if amount >= 10 else 2 if amount >= 0.01 else 4
    return f"{amount:.{decimals}f}"


def _facts(shape: ModelShape, name: str) -> Iterable[tuple[str, str]]:
    yield "model", shape.name
    names = [each for each in names_of_builtin(name) if each.lower() != name.lower()]
    yield "same shape as", ", ".join(names)
    yield "family", shape.model_type
    yield "layers", f"{shape.layers} of {shape.layer_parameters / 1e6:.4g} million parameters"
    yield "parameters", f"{_billions(shape)} billion"
    widths = f"{shape.hidden_size} hidden, {shape.intermediate_size} in the MLP"
    yield "widths", widths
    heads = f"{shape.heads} heads of {shape.head_dim}, {shape.kv_heads} for keys and values"
    yield "attention", heads
    window = shape.sliding_window
    yield "looks back", "" if window is None else f"{window} tokens"
    tied = "tied to the head" if shape.tied_embeddings else "beside a head of its own"
    yield "vocabulary", f"{shape.vocab_size}, {tied}"
    yield "positions", f"{shape.max_positions}{' (no limit: ALiBi)' if shape.alibi else ''}"
    stored = shape.stored
    yield "stored as", "" if stored is None else f"{stored.bits} bit (GPTQ)"
    for bits in reversed(BITWIDTHS):
        full = " (as published)" if bits == FULL_BITS and stored is None else ""
        yield f"{bits} bit", f"{_gib(weight_bytes(shape, bits))} GiB of weights{full}"
    yield "KV cache", f"{_kv_bytes(shape) / KIB:.4g} KiB a token in 16 bit"


if __name__ == "__main__":
    raise SystemExit(main())
