"""The options of the commands on weights: `llmpq indicator`, `quantize`, `export`, `eval`,
`convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmpq.cli.parser import Parser
from llmpq.quality.options import AUTO, DEVICES, DTYPES, ERROR, EvaluationOptions, IndicatorOptions
from llmpq.tokenizing.prompting import PROMPTING_OPTIONS, PromptingOptions, prompting_rule
from planner.option_rules import REQUIRED, Rule, argument, flag, option
from quant.checkpoint.formats.writing import METHODS
from quant.checkpoint.stored_config import GPTQ_METHOD
from quant.rounding.importance_header import SUFFIX
from quant.scheme import (
    BITWIDTHS,
    DAMPING,
    FORM_ROUNDINGS,
    FORM_SCALES,
    FORM_SCHEMES,
    ROUNDINGS,
    VarianceForm,
)

INDICATOR, QUANTIZE, EXPORT = "llmpq-indicator", "llmpq-quantize", "llmpq export"
EVALUATE, CONVERT = "llmpq-eval", "llmpq-convert"

SEQUENCES = 128
SEQUENCE_LENGTH = 2048
"""Frantar et al. (section 4) calibrate on 128 sequences of 2,048 tokens."""

_EXTEND = {"action": "extend"}
_PROMPTING = " ".join(PROMPTING_OPTIONS)
_COMPUTING = {"computing": "device dtype"}


@dataclass(frozen=True, kw_only=True)
class CalibrationCommand(PromptingOptions):
    model: str | None = option(
        "MODEL", "folder, GGUF file or hub id of the weights (default: the plan's own)"
    )
    calibration: tuple[str, ...] = option(
        "FILE",
        "plain text, or .jsonl with prompt or text (a string or token ids); folders, globs; - for "
        "stdin",
        (),
        more=_EXTEND,
    )
    input: tuple[str, ...] = option(
        "PATH",
        "prompts of the job, as for llmpq run: calibrated on as the model will see them",
        (),
        more=_EXTEND,
    )


_CALIBRATION_RULES = (prompting_rule("input"),)

_INDICATOR_DESCRIPTION = """
Measure how much each layer of a model loses at each bitwidth (LLM-PQ section 4.2), for llmpq plan
--omega_file.
"""
_INDICATOR_EXAMPLES = (
    "%(prog)s --model /models/opt-30b --calibration text.txt -o omega.json",
    "%(prog)s --model /models/opt-30b --input prompts.jsonl \\\n"
    "      --perplexity held_out.txt -o omega.json",
)
_INDICATOR_GROUPS = {
    "model and texts": f"model adapter calibration input {_PROMPTING} perplexity sequences "
    "sequence_length max_tokens",
    "output": "output importance",
    "method": "method bits rounding scheme scales seed",
    **_COMPUTING,
}
_INDICATOR_RULES = (
    *_CALIBRATION_RULES,
    Rule(
        ("scheme", "scales"),
        "it is an option of the variance indicator; leave it out, or use --method variance",
        beside="method",
        values=(ERROR, "hessian", "random"),
    ),
    Rule(
        ("rounding",),
        "it is an option of the methods variance and error; leave it out, or use one of them",
        beside="method",
        values=("hessian", "random"),
    ),
    Rule(
        ("calibration", "input", "importance", "sequences"),
        "it looks at no text; leave it out",
        beside="method",
        values=("random",),
    ),
    Rule(
        ("sequence_length", "device", "dtype"),
        "it computes nothing; leave it out, or give a --perplexity text",
        beside="method",
        values=("random",),
        without=("perplexity",),
    ),
    Rule(("max_tokens",), "it limits the held-out text; leave it out", without=("perplexity",)),
)


@dataclass(frozen=True, kw_only=True)
class IndicatorCommand(CalibrationCommand):
    model: str = option("MODEL", "folder, GGUF file or hub id of the weights", REQUIRED)
    perplexity: tuple[str, ...] = option(
        "FILE",
        "held-out text to measure perplexities on too, for llmpq plan --max_ppl_delta",
        (),
        more=_EXTEND,
    )
    max_tokens: int | None = option(
        "COUNT", "most tokens of the held-out text to use (default: all)"
    )
    output: str = option("FILE", "omega JSON to write", REQUIRED, names=("-o", "--output"))
    importance: str | None = option(
        "FILE", f"where to write what weights are rounded by (default: OUTPUT's name with {SUFFIX})"
    )
    rounding: str | None = option(
        tuple(dict.fromkeys((*ROUNDINGS, *FORM_ROUNDINGS))),
        f"as in the plan for the method error (default: {IndicatorOptions.rounding}), nearest or "
        f"stochastic of Theorem 1 for variance (default there: {VarianceForm.rounding})",
    )
    scheme: str = option(
        FORM_SCHEMES, "how the scales S_W of variance are formed", VarianceForm.scheme
    )
    scales: str = option(
        FORM_SCALES,
        "one S_W a tensor as in Proposition 2, or one for each group of the quantizer",
        VarianceForm.scales,
    )


def indicator_parser(prog: str | None = INDICATOR) -> Parser:
    parser = Parser(prog, _INDICATOR_DESCRIPTION, _INDICATOR_EXAMPLES, _INDICATOR_RULES)
    parser.usage = "%(prog)s --model MODEL --calibration FILE [FILE ...] -o FILE [options]"
    parser.declare(_INDICATOR_GROUPS, IndicatorCommand, IndicatorOptions)
    return parser


_QUANTIZE_DESCRIPTION = "Make a checkpoint with the bits of a plan, calibrated with GPTQ."
_QUANTIZE_EXAMPLES = (
    "%(prog)s --plan plan.json --calibration text.txt -o /models/opt-30b-gptq",
    "%(prog)s --model opt-30b --bits 4 --calibration text.txt -o opt-30b-4bit",
)
_QUANTIZE_GROUPS = {
    "model and bits": "plan bits model adapter",
    "calibration": f"calibration input {_PROMPTING} sequences sequence_length seed",
    "output": "output overwrite format",
    "rounding": "symmetric no_act_order damping",
    **_COMPUTING,
}


@dataclass(frozen=True, kw_only=True)
class _WritingCommand(CalibrationCommand):
    adapter: str | Path | None = option(
        "FOLDER", "LoRA adapter of PEFT that is merged into the weights"
    )
    sequences: int = option("COUNT", "sequences of the text to calibrate on", SEQUENCES)
    sequence_length: int | None = option(
        "TOKENS",
        f"length of each (default: {SEQUENCE_LENGTH}, or the model's positions where these are "
        "fewer)",
    )
    seed: int = option("SEED", "of the choice of sequences", 0)
    output: str = option("FOLDER", "folder to make", REQUIRED, names=("-o", "--output"))
    overwrite: bool = flag("replace an existing output")
    device: str = option(DEVICES, "where to compute", AUTO)
    dtype: str = option(
        DTYPES, "type to compute in; auto: float32, or on a GPU its 16-bit type", AUTO
    )


@dataclass(frozen=True, kw_only=True)
class QuantizeCommand(_WritingCommand):
    plan: str | None = option(
        "FILE", "plan of llmpq plan, whose bits to use", names=("--plan", "--strat_file_name")
    )
    bits: tuple[int, ...] | None = option(
        BITWIDTHS, "without a plan: one number for all layers, or one for each"
    )
    format: str = option(
        tuple(METHODS),
        "what loads it: gptq GPTQModel, compressed-tensors vLLM, awq others at 4 bit; llmpq all",
        GPTQ_METHOD,
    )
    symmetric: bool = flag("put the zero point in the middle, as Marlin kernels require")
    no_act_order: bool = flag(
        "round columns in their order instead of those with the largest inputs first"
    )
    damping: float = option("SHARE", "of the mean diagonal of X^T X", DAMPING)


def quantize_parser(prog: str | None = QUANTIZE) -> Parser:
    parser = Parser(prog, _QUANTIZE_DESCRIPTION, _QUANTIZE_EXAMPLES, _CALIBRATION_RULES)
    parser.usage = "%(prog)s --plan FILE --calibration FILE [FILE ...] -o FOLDER [options]"
    parser.declare(_QUANTIZE_GROUPS, QuantizeCommand)
    return parser


_EXPORT_DESCRIPTION = """
Write a plan for another engine: its weights with the plan's bits, calibrated with GPTQ on a text
(else on random ids), and a script that starts the engine over the plan's stages.
"""
_EXPORT_EXAMPLES = (
    "%(prog)s vllm plan.json -o opt-30b-vllm",
    "%(prog)s vllm plan.json --input prompts.jsonl -o opt-30b-vllm",
)
_EXPORT_GROUPS = {
    "what to write": "engine plan model adapter",
    "calibration": _QUANTIZE_GROUPS["calibration"],
    "output": "output overwrite",
    **_COMPUTING,
}


@dataclass(frozen=True, kw_only=True)
class ExportCommand(_WritingCommand):
    engine: str = argument(("vllm",), "the engine that shall serve it", REQUIRED)
    plan: str = argument("PLAN", "plan of llmpq plan", REQUIRED)


def export_parser(prog: str | None = EXPORT) -> Parser:
    parser = Parser(prog, _EXPORT_DESCRIPTION, _EXPORT_EXAMPLES, _CALIBRATION_RULES)
    parser.usage = "%(prog)s vllm PLAN [--model MODEL] -o FOLDER [options]"
    parser.declare(_EXPORT_GROUPS, ExportCommand)
    return parser


_EVALUATE_DESCRIPTION = (
    "Measure the perplexity of plans or bitwidths on a text, and their KL from 16 bit."
)
_EVALUATE_EXAMPLES = (
    "%(prog)s --plan plan.json --text held_out.txt",
    "%(prog)s --model /models/opt-1.3b --bits 16 8 4 --text held_out.txt",
)
_EVALUATE_GROUPS = {
    "what to evaluate": "plan bits model adapter",
    "text": "text sequence_length max_tokens",
    "output": "json",
    "rounding": "rounding importance cache_dir",
    **_COMPUTING,
}
_EVALUATE_RULES = (
    Rule(("rounding",), "a plan has its own rounding; leave it out", without=("bits",)),
)


@dataclass(frozen=True)
class EvaluateCommand:
    plan: tuple[str, ...] = option(
        "FILE", "plans of llmpq plan, all of one model", (), names=("--plan", "--strat_file_name")
    )
    bits: tuple[str, ...] = option(
        "BITS", "bitwidths, by this machine's kernels: 16 8 4, or one for each layer 3,4,4,8", ()
    )
    model: str | None = option(
        "MODEL", "folder, GGUF file or hub id of the weights (default: the plan's own)"
    )
    text: tuple[str, ...] = option(
        "FILE",
        "plain text, or .jsonl with prompt or text (a string or token ids); - for stdin",
        (),
        more=_EXTEND,
    )
    json: str | None = option("FILE", "write the figures as JSON")
    rounding: str = option(
        ROUNDINGS, "how weights are rounded for --bits; a plan has its own", ROUNDINGS[0]
    )


def evaluate_parser(prog: str | None = EVALUATE) -> Parser:
    parser = Parser(prog, _EVALUATE_DESCRIPTION, _EVALUATE_EXAMPLES, _EVALUATE_RULES)
    parser.usage = "%(prog)s --plan FILE [FILE ...] --text FILE [FILE ...] [options]"
    parser.declare(_EVALUATE_GROUPS, EvaluateCommand, EvaluationOptions)
    return parser


@dataclass(frozen=True)
class ConvertCommand:
    source: Path = argument("SOURCE", "folder with pytorch_model.bin or its index", REQUIRED)
    target: Path = argument("TARGET", "folder to make", REQUIRED)


def convert_parser(prog: str | None = CONVERT) -> Parser:
    parser = Parser(
        prog,
        "Make a safetensors checkpoint of a .bin one, since stages read no .bin.",
        ("%(prog)s /models/opt-30b-bin /models/opt-30b",),
    )
    parser.declare({"folders": "source target"}, ConvertCommand)
    return parser
