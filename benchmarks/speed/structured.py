"""What a JSON schema costs: tokens/s of 32 rows with one and without, on this CPU.

    python -m benchmarks.speed.structured [--model FOLDER] [--tokens 96] [--passes 5]

SmolLM2-135M-Instruct unless another model is given: the smaller the model, the larger the share of
masks. Both kinds of rows go through the same warm stage, pass by pass in turn, and have the same
number of tokens: the schema is of a list that does not end before. Ratios are taken pass by pass;
the first passes warm up. The lines before are of one form in one process, without a model: loading
the vocabulary, compiling, a row's mask, and the masking of all rows' logits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.lab import header, processor_name, spread, table_row

ROWS, PROMPT_TOKENS = 32, 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["child", "adult", None]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "kind", "tags", "at"],
    "additionalProperties": False,
}
FORM = {"json": {"type": "array", "items": PERSON, "minItems": 1000}}
KINDS: dict[str, Any] = {"without": None, "with": FORM}


def parts(folder: Path, steps: int) -> list[str]:
    """Rows of a table with what the parts take, of answers that are drawn among all tokens."""
    import torch
    from transformers import AutoTokenizer

    from actors.sampling_options import checked_form
    from actors.stage.grammar import Grammars, compiled, vocabulary_of

    tokenizer = AutoTokenizer.from_pretrained(folder)
    form = checked_form(FORM)

    def timed(work: Callable[[], Any], times: int = 1) -> tuple[Any, float]:
        began = perf_counter()
        for _ in range(times):
            found = work()
        return found, (perf_counter() - began) / times

    vocabulary, loading_s = timed(lambda: vocabulary_of(tokenizer))
    _, compiling_s = timed(lambda: compiled(form, vocabulary))
    grammars = Grammars(lambda: vocabulary)
    answers = [grammars.begin(form, ()) for _ in range(ROWS)]
    logits = torch.zeros(ROWS, len(tokenizer), dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    mask_s = masking_s = 0.0
    for _ in range(steps):
        began = perf_counter()
        grammars.look_ahead(answers)
        for answer in answers:
            assert answer.mask is not None
            answer.mask()
        mask_s += (perf_counter() - began) / steps / ROWS
        masked, seconds = timed(lambda: grammars.masked(logits, answers))
        masking_s += seconds / steps
        tokens = masked.float().softmax(-1).multinomial(1, generator=draw)[:, 0].tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.give(token)
    return [
        table_row((f"vocabulary of {len(tokenizer)} tokens, once", f"{loading_s * 1e3:.0f} ms")),
        table_row(("compiling, once a form", f"{compiling_s * 1e3:.1f} ms")),
        table_row(("a row's mask, while the model computes", f"{mask_s * 1e6:.0f} µs")),
        table_row((f"masking the logits of {ROWS} rows", f"{masking_s * 1e3:.1f} ms")),
    ]


def race(folder: Path, tokens: int, passes: int) -> list[str]:
    """Rows of a table with tokens/s of both kinds of rows, and their ratios."""
    from benchmarks.speed.throughput_contestants import CLUSTER, CORES
    from llmpq import Cluster, Workload

    with tempfile.TemporaryDirectory() as name:
        cluster = Path(name) / "cluster.yaml"
        cluster.write_text(CLUSTER.format(stages=1, threads=CORES))
        workload = Workload(ROWS, PROMPT_TOKENS, tokens)
        plan = Cluster.from_yaml(cluster).plan(folder, workload, theta=0.0, bits=[16])
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        with plan.session(ignore_eos=True, generation_config="none") as session:
            for turn in range(passes + 1):
                for place, (kind, form) in enumerate(KINDS.items()):
                    own = len(KINDS) * turn + place + 3  # no pass begins as another
                    prompts = [[own, *range(n + 3, n + PROMPT_TOKENS + 2)] for n in range(ROWS)]
                    began = perf_counter()
                    made = [len(r.token_ids) for r in session.run(prompts, structured_outputs=form)]
                    assert made == [tokens] * ROWS, made
                    if turn:
                        rates[kind].append(sum(made) / (perf_counter() - began))
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    shown = [table_row((f"{kind} a schema", spread(each, 0))) for kind, each in rates.items()]
    return [*shown, table_row(("with / without", spread(ratios, 3)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    if options.model is None:
        from benchmarks.quantization.models import smollm2

        options.model = smollm2()
    print(f"{processor_name()}; {options.model.name}, {len(json.dumps(FORM))} bytes of schema\n")
    print(header(("part", "time")), *parts(options.model, options.tokens), sep="\n", flush=True)
    lines = race(options.model, options.tokens, options.passes)
    print("\n" + header((f"{ROWS} rows", "tokens/s")), *lines, sep="\n")


if __name__ == "__main__":
    main()
