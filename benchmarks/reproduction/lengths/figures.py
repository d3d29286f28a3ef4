"""S³'s figures beside its throughput: an objective for each token (fig. 4d), where the time goes
(fig. 6), and predictors of four sizes (table 5). Rows are the short answers of `papers`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import torch
from transformers import BertConfig, BertModel

from benchmarks.lab import header, table_row
from benchmarks.reproduction.lengths.rows import MEAN_PROMPT, confusion_of, short_answers, tenths
from benchmarks.reproduction.lengths.tables import (
    NEAR,
    SETTINGS,
    predictions_of,
    whole_memory,
)
from benchmarks.reproduction.lengths.virtual_job import Contestant, contestants

ROWS, SEED = 1000, 0
TOKEN_S = 0.1875
"""Seconds of a token at which an average reader reads (section 4.1)."""
KEEPING = 0.99
"""The share of rows that keep it."""
PREDICTING_S = 0.0037
"""Of a prompt by Distilbert on an A100 (section 3)."""
PAPER_MODELS = SETTINGS[:4]


def objective_table() -> Iterator[str]:
    """Yield the lines of the table: answers a second within the objective, and how many times the
    first contestant's; the 99th percentile of the seconds of a token, and requests at once.
    """
    rows = short_answers(ROWS, SEED)
    chosen = contestants(rows, *predictions_of(rows, SEED))
    yield header(f"model | the paper's | {' | '.join(each.name for each in chosen)}")
    for setting in PAPER_MODELS:
        memory = whole_memory(setting, rows)
        cells, first = [], 0.0
        for each in chosen:
            run = each.within(TOKEN_S, KEEPING, memory, rows)
            if run is None:
                cells.append("NS")
                continue
            per_s = len(rows) / run.seconds
            first = first or per_s
            late = sorted(run.token_s)[int(KEEPING * len(rows))]
            cells.append(f"{per_s:.1f} ({per_s / first:.2f}), {late:.3f} s, {run.mean_batch:.0f}")
        yield table_row([setting.model, setting.paper, *cells])


def breakdown_table() -> Iterator[str]:
    """Yield the lines of the table: shares of the time of a job under S³."""
    rows = short_answers(ROWS, SEED)
    yield header(
        "model | the paper's | generating | preempting and moving | scheduling (this machine) | "
        f"predicting, {1e3 * PREDICTING_S:.1f} ms a prompt | all but generating"
    )
    ((_, expected),), _ = predictions_of(rows, SEED)
    beside_generating = []
    for setting in PAPER_MODELS:
        run = Contestant("S³", "published", expected).best(whole_memory(setting, rows), rows)
        beside = run.copies_s, run.scheduler_s, PREDICTING_S * len(rows)
        whole_s = run.seconds + run.scheduler_s + PREDICTING_S * len(rows)
        shares = [each / whole_s for each in (run.seconds - run.copies_s, *beside)]
        beside_generating.append(1 - shares[0])
        cells = [f"{share:.1%}" for share in (*shares, beside_generating[-1])]
        yield table_row([setting.model, setting.paper, *cells])
    yield f"| mean | ours | | | | | {mean(beside_generating):.1%} |"
    yield "| mean | the paper | | | | | 11 % |"


TABLE_5 = {
    "MS-minibert": (22, (6, 384, 12), (0.9806, 0.7799, 0.601), 2.3),
    "Distilbert-base": (66, (6, 768, 12), (0.986, 0.8268, 0.656), 4.1),
    "Bert-base": (110, (12, 768, 12), (0.9954, 0.8508, 0.682), 7.6),
    "Bert-large": (340, (24, 1024, 16), (0.996, 0.8925, 0.719), 14.5),
}
"""Millions of parameters; layers, hidden size and heads; accuracy on Alpaca, Google's questions and
the Pile; milliseconds a prompt on an A100."""
AT_ONCE, TURNS = 16, 3


def predictors_table() -> Iterator[str]:
    """Yield the lines of table 5: what a prompt takes on a core of this machine, and shares of
    Oracle's tokens a second with the accuracies of the paper.
    """
    setting, rows = PAPER_MODELS[3], short_answers(ROWS, SEED)
    memory, ten = whole_memory(setting, rows), replace(rows, bounds=tenths(rows.limit))
    oracle = Contestant("Oracle", "published", rows.answers).best(memory, rows).tokens_per_s
    names = [f"right, {name}: share of Oracle" for name in ("Alpaca", "Google", "Pile")]
    yield header(["predictor", "parameters", "ms, A100", "CPU ms, a core here", *names])
    for name, (millions, sizes, accuracies, paper_ms) in TABLE_5.items():
        cells = []
        for accuracy in accuracies:
            expected = ten.expected_by(confusion_of(accuracy, NEAR), SEED)
            run = Contestant("S³", "published", expected).best(memory, rows)
            cells.append(f"{accuracy:.1%}: {run.tokens_per_s / oracle:.2f}")
        yield table_row([name, f"{millions}M", paper_ms, f"{_prompt_ms(*sizes):.1f}", *cells])


def _prompt_ms(layers: int, hidden_size: int, heads: int) -> float:
    """CPU milliseconds of a prompt on one thread, with random weights, in batches as runs make."""
    torch.set_num_threads(1)
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
    )
    model, ids = BertModel(config).eval(), torch.ones(AT_ONCE, MEAN_PROMPT, dtype=torch.long)
    taken = []
    with torch.inference_mode():
        for _ in range(1 + TURNS):
            began_s = time.process_time()
            model(ids)
            taken.append(time.process_time() - began_s)
    return 1e3 * median(taken[1:]) / AT_ONCE
