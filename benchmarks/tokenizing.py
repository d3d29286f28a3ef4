"""Rows to requests in the process that tokenizes, against transformers in the driver itself.

Run from the root: `python -m benchmarks.tokenizing [--rows 100000] [--passes 3]`. Passes take
turns, each with texts of its own. Medians are printed as Markdown: seconds of the clock, the
driver's own processor time, and the seconds until each can tokenize, in a Python that has loaded
nothing yet.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median

from actors.sampling_options import GREEDY
from benchmarks.machine import processor_name
from llmpq.rows.row import Row
from llmpq.tokenizing.requests import RequestMaker, load_tokenizer
from llmpq.tokenizing.tokenizer_process import Limits
from planner.model.finding import model_shape
from planner.workload import Workload

MODEL = Path(__file__).parents[1] / "examples/demo_model"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WORKLOAD = Workload(global_batch=32, prompt_length=64, new_tokens=1)

Times = tuple[float, float]
"""Seconds of the clock, and of this process's processor time."""

LOADING = {
    "process": "from llmpq.tokenizing.requests import load_tokenizer as load",
    "driver": "from transformers import AutoTokenizer\nload = AutoTokenizer.from_pretrained",
}
_TIMED = """
import sys, time
from pathlib import Path
began = time.perf_counter()
{}
tokenizer = load(Path(sys.argv[1]))
print(time.perf_counter() - began)
"""


def rows(count: int, number: int, chat: bool) -> Iterator[Row]:
    """Rows of 30 characters that no other pass has."""
    for i in range(count):
        text = f"{number:03d} a prompt, of number {i:06d}"
        messages = ({"role": "user", "content": text},)
        yield Row(str(i), messages=messages) if chat else Row(str(i), text=text)


def in_process(folder: Path, given: Iterator[Row]) -> Times:
    """Times of requests that are made through the process."""
    tokenizer = load_tokenizer(folder, Limits(most_tokens=WORKLOAD.prompt_length))
    assert tokenizer is not None
    with closing(tokenizer):
        maker = RequestMaker(WORKLOAD, model_shape(folder).vocab_size, GREEDY, tokenizer)
        return _times(lambda: all(map(bool, maker.requests(given))))


def in_driver(folder: Path, given: Iterator[Row]) -> Times:
    """Times of token ids that transformers makes in this process."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(row: Row) -> tuple[int, ...]:
        if row.messages is None:
            return tuple(tokenizer(row.text)["input_ids"])
        encoded = tokenizer.apply_chat_template(
            list(row.messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return tuple(encoded["input_ids"])

    return _times(lambda: all(map(ids, given)))


def _times(work: Callable[[], bool]) -> Times:
    began, spent = time.perf_counter(), time.process_time()
    assert work()
    return time.perf_counter() - began, time.process_time() - spent


def loading_s(contestant: str, folder: Path) -> float:
    """Seconds until it can tokenize."""
    command = [sys.executable, "-c", _TIMED.format(LOADING[contestant]), str(folder)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    contestants = {"process": in_process, "driver": in_driver}
    print("| tokenizing | plain s | driver's CPU s | chat s | driver's CPU s | ready after s |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        shutil.copytree(MODEL, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        found: dict[str, list[tuple[float, ...]]] = {each: [] for each in contestants}
        for number in range(options.passes):
            for each, tokenized in contestants.items():
                plain, chat = (
                    tokenized(folder, rows(options.rows, 2 * number + kind, bool(kind)))
                    for kind in range(2)
                )
                found[each].append((*plain, *chat, loading_s(each, folder)))
    for each, passes in found.items():
        cells = " | ".join(f"{median(column):.2f}" for column in zip(*passes, strict=True))
        print(f"| in the {each} | {cells} |")
    print(f"\n{options.rows:,} rows, median of {options.passes} passes; {processor_name()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
