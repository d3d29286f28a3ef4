"""What a JSON schema costs: decode steps of 32 rows with one and without, on this CPU.

    python -m benchmarks.speed.structured [--model FOLDER] [--turns 8]

SmolLM2-135M-Instruct unless another model is given: the smaller the model, the larger the share of
masks. One stage with all layers has both kinds of rows, which take turns of eight steps; every row
gets its own tokens, and the schema is of a list that does not end before. Ratios are taken turn by
turn; the first warms up. Seconds are those of one core, of all threads of the process together, so
that masks count although they are made beside, and other programs do not. The lines before are of
the form alone: loading the vocabulary, compiling, a row's mask, and masking all rows' logits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from benchmarks.lab import header, processor_name, spread, table_row

ROWS, PROMPT_TOKENS, STEPS = 32, 32, 8
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


class Rows:
    """Rows of one kind in a stage, from slot `first` on; greedy."""

    def __init__(self, stage: Any, first: int, longest: int, form: Any) -> None:
        import numpy as np
        import torch

        from actors.messages import Admission, MicroBatch, Sampling, TokenRange

        self._stage, self._slots = stage, np.arange(first, first + ROWS)
        begins, tokens = self._slots * longest, np.full(ROWS, PROMPT_TOKENS)
        sampling = Sampling(ignore_eos=True, structured_outputs=form or "")
        admitted = tuple(
            Admission(slot, str(slot), 10**9, sampling, room=TokenRange(slot * longest, longest))
            for slot in self._slots.tolist()
        )
        self._decode = MicroBatch(self._slots, tokens, tokens * 0 + 1, begins)
        prompts = torch.arange(ROWS * PROMPT_TOKENS) % 1000 + 3
        self._next = stage.step(
            MicroBatch(self._slots, tokens * 0, tokens, begins, admitted), prompts
        )

    def turn(self) -> float:
        """Seconds of a core for a step, over `STEPS` of them."""
        import torch

        began = process_time()
        for _ in range(STEPS):
            self._next = self._stage.step(self._decode, torch.from_numpy(self._next.token_ids))
            assert not any(self._next.finish_reasons)
            self._decode = replace(self._decode, starts=self._decode.starts + 1)
        return (process_time() - began) / STEPS


def stage_alone(folder: Path, slots: int, longest: int) -> Any:
    """All layers of the model in `folder`, in bfloat16 on this CPU, as one stage."""
    import torch

    from actors.stage.spec import StageSpec
    from actors.stage.stage import Stage
    from planner.model.finding import model_shape
    from quant.devices import local_processor

    layers, device = model_shape(folder).layers, torch.device("cpu")
    spec = StageSpec(
        index=0, stages=1, layers=range(layers), bitwidths=(16,) * layers, slots=slots,
        max_tokens=longest, kv_tokens=slots * longest, dtype="bfloat16",
    )  # fmt: skip
    return Stage(spec, folder, device, local_processor(device))


def race(folder: Path, turns: int) -> list[str]:
    """Rows of a table with the milliseconds of both kinds of steps, tokens/s, and their ratios."""
    longest = PROMPT_TOKENS + STEPS * (turns + 1) + 1
    stage = stage_alone(folder, 2 * ROWS, longest)
    rows = {kind: Rows(stage, ROWS * n, longest, KINDS[kind]) for n, kind in enumerate(KINDS)}
    took = {kind: [] for kind in KINDS}
    for _ in range(turns + 1):
        for kind, each in rows.items():
            took[kind].append(each.turn())
    ratios = [b / a for a, b in zip(took["with"][1:], took["without"][1:], strict=True)]
    return [
        *(
            table_row((f"{kind} a schema", spread([s * 1e3 for s in each[1:]], 1),
                       spread([ROWS / s for s in each[1:]], 0)))
            for kind, each in took.items()
        ),
        table_row(("with / without", "", spread(ratios, 3))),
    ]  # fmt: skip


def given(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of `parser` with the model and the turns; torch has one thread from then on."""
    import torch

    parser.add_argument("--model", type=Path, help="folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model is None:
        from benchmarks.quantization.models import smollm2

        options.model = smollm2()
    return options


def main() -> None:
    options = given(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    print(f"{processor_name()}; {options.model.name}, {len(json.dumps(FORM))} bytes of schema\n")
    print(
        header(("part", "time")), *parts(options.model, STEPS * options.turns), sep="\n", flush=True
    )
    print("\n" + header((f"{ROWS} rows", "ms of a core for a step", "tokens/s of a core")))
    print(*race(options.model, options.turns), sep="\n")


if __name__ == "__main__":
    main()
