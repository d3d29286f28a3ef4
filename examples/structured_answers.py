"""Have answers be JSON of a schema, here of a pydantic model, or calls of a tool, and read them.

    python examples/structured_answers.py

The committed demo model knows nothing of pets; what it makes up has the form all the same.
"""

import tempfile
from pathlib import Path

from pydantic import BaseModel, Field

from llmpq import Cluster, Workload

EXAMPLES = Path(__file__).resolve().parent
ROWS = [
    {"prompt": "A pet:", "seed": number, "temperature": 0.7, "max_new_tokens": 100}
    for number in range(4)
]
CHOICE = {"prompt": "Cats or dogs?", "structured_outputs": {"choice": ["cats", "dogs"]}}
"""A row's own form comes before that of the job."""
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}{# tools #}"
"""A chat template, which the demo model has not; that of a real model shows it the tools."""


class Pet(BaseModel, extra="forbid"):  # else a model may go on with fields of its own
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=30)
    is_tame: bool


FEED = {"type": "function", "function": {"name": "feed", "parameters": Pet.model_json_schema()}}
CALL = {
    "messages": [{"role": "user", "content": "Feed it:"}],
    "tools": [FEED],
    "tool_choice": {"type": "function", "function": {"name": "feed"}},
}


if __name__ == "__main__":
    cluster = Cluster.from_yaml(EXAMPLES.parent / "cluster_specs" / "demo_mixed_cpu.yaml")
    plan = cluster.plan(EXAMPLES / "demo_model", Workload(8, 16, 100), theta=1.0)
    template = Path(tempfile.mkdtemp(), "chat.jinja")
    template.write_text(TEMPLATE)
    given = {"json_schema": Pet.model_json_schema(), "chat_template": template}
    for result in plan.run([*ROWS, CHOICE, CALL], **given):
        if result.finish_reason == "length":
            print("cut, as it was longer than 100 tokens:", result.text)
        elif result.text in ("cats", "dogs"):
            print(result.text)
        elif result.columns.get("tool_calls"):
            (call,) = (each["function"] for each in result.columns["tool_calls"])
            print(call["name"], Pet.model_validate_json(call["arguments"]))
        else:
            print(Pet.model_validate_json(result.text))
