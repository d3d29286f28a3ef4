"""The child that tokenizes, with two more tasks: another chat template, and another model folder.

`{"template": …}` renders a chat with it, `{"load": FOLDER}` loads that tokenizer and uses it; a new
process for each would take half a second.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).resolve().parents[2] / "llmpq" / "tokenizing" / "tokenizer_child.py"
_SPEC = importlib.util.spec_from_file_location("child", _CHILD)
assert _SPEC is not None
assert _SPEC.loader is not None
child = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(child)

CHAT = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"})
TASKS = ({"text": "hello world [ a ] xx1"}, {"chat": CHAT}, {"ids": [5, 2, 1000], "before": [1]})


class Changing(child.RowTokenizer):  # type: ignore[misc,name-defined]
    """Is told by a task what to be."""

    def answer(self, line: str) -> dict[str, Any]:
        task = json.loads(line)
        if "template" in task:
            try:
                child.compile_template(task["template"])
            except child.BrokenTemplateError as error:
                return {"error": child.error_words(error), "of": "chat template"}
            self.tokenizer.chat_template = task["template"]
            return dict(super().answer(json.dumps({"chat": CHAT})))
        if "load" in task:
            return self._loaded(Path(task["load"]))
        return dict(super().answer(line))

    def _loaded(self, folder: Path) -> dict[str, Any]:
        row_tokenizer, first = child._first_line(folder, self.most_tokens, {})
        if row_tokenizer is None:
            return {"error": f"{first['file']}: {first['error']}", "of": "load"}
        answers = [super(Changing, row_tokenizer).answer(json.dumps(task)) for task in TASKS]
        return {"text": json.dumps(answers)}


child.RowTokenizer = Changing  # type: ignore[attr-defined]

if __name__ == "__main__":
    try:
        child.serve(json.loads(sys.argv[1]))
    except BrokenPipeError:
        os._exit(0)
